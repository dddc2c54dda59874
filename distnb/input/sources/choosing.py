"""Which source reads a dataset: by the slice where it can be asked for single examples, else whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterDataPipe, MapDataPipe

from distnb.errors import OptionError, ProgramError, StructureError
from distnb.input.collating import CollateRule
from distnb.input.cutting import count_examples
from distnb.input.pipelines import TurnsSource
from distnb.input.sources.arrays import ArraySource
from distnb.input.sources.base import Place, Shared, Source
from distnb.input.sources.loaders import is_plain
from distnb.input.sources.samples import SampleSource, SlicedSource
from distnb.input.sources.whole import LoaderSource, PythonSource
from distnb.input.sources.workers import WorkerSource
from distnb.options import InputOptions

__all__ = ["source_of"]


def source_of(dataset: Any, batch_size: int | None, place: Place, options: InputOptions, shared: Shared) -> Source:
    """What reads this kind of dataset best.

    Args:
        dataset: See `distribute`.
        batch_size: Likewise.
        place: The replica that reads.
        options: How it is fed.
        shared: The random stream of whoever reads the same data.

    Raises:
        OptionError, ProgramError, StructureError: See `distribute`.
    """
    source = _whole_or_sliced(dataset, batch_size, place, options, shared)
    if place.turns is None or isinstance(source, SlicedSource):
        return source
    return TurnsSource(source, place.turns)


def _whole_or_sliced(
    dataset: Any, batch_size: int | None, place: Place, options: InputOptions, shared: Shared
) -> Source:
    if batch_size is not None:
        dataset = _batched(dataset, _checked(batch_size), place)
    elif _needs_batch_size(dataset):
        raise OptionError(
            f"A {type(dataset).__name__} is not batched yet. Wrap it in a DataLoader (one with batch_size=None, if its "
            "elements are batches), or give distribute_dataset the size of the global batch (batch_size=…)."
        )
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, DataLoader):
        return _of_loader(dataset, place, options, shared)
    if isinstance(dataset, Iterable) or callable(dataset):
        return PythonSource(dataset, place, shared)
    raise ProgramError(
        f"{type(dataset).__name__} cannot be distributed: it is neither a DataLoader, a Dataset, nor an iterable "
        "of batches."
    )


def _checked(batch_size: int) -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise OptionError(f"batch_size={batch_size!r}: give the size of the global batch, a whole number, 1 or more.")
    return int(batch_size)


def _needs_batch_size(dataset: Any) -> bool:
    if isinstance(dataset, DataLoader):
        return False
    # A list may be one of batches; a tuple or dict of arrays is data.
    return isinstance(dataset, (Dataset, torch.Tensor, np.ndarray, Mapping, tuple, str, bytes))


def _batched(dataset: Any, batch_size: int, place: Place) -> DataLoader[Any] | Source:
    """Data that is not batched yet, with a batch size."""
    if isinstance(dataset, DataLoader):
        raise OptionError(
            "batch_size was given for a DataLoader, which makes batches itself. Leave it out, or give the DataLoader "
            "that batch size."
        )
    if isinstance(dataset, Dataset):
        return DataLoader(dataset, batch_size=batch_size)
    if isinstance(dataset, (torch.Tensor, np.ndarray, Mapping, tuple)) or _is_list_of_fields(dataset):
        # Batches whose pieces are taken in turn are loaded whole.
        return ArraySource(dataset, batch_size, replace(place, num_replicas=1, replica_id=0) if place.turns else place)
    if hasattr(dataset, "iloc"):
        raise OptionError(f"A {type(dataset).__name__} with a batch size: pass its values, such as frame.to_numpy().")
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, (str, bytes)):
        return DataLoader(dataset, batch_size=batch_size)  # a list of examples, or what acts as a Dataset
    raise OptionError(
        f"batch_size was given for a {type(dataset).__name__}, which is no Dataset and no structure of arrays. An "
        "iterable must yield global batches itself: leave batch_size out."
    )


def _is_list_of_fields(dataset: Any) -> bool:
    """Whether a list holds arrays of one length (fields), and not examples."""
    if not isinstance(dataset, list) or not any(isinstance(field, (torch.Tensor, np.ndarray)) for field in dataset):
        return False
    try:
        return count_examples(dataset) != len(dataset)
    except StructureError:
        return False


def _of_loader(loader: DataLoader[Any], place: Place, options: InputOptions, shared: Shared) -> Source:
    if place.num_replicas == 1:
        return LoaderSource(loader, place, shared)
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    for candidate in (sampler, loader.batch_sampler):
        # Each of several pipelines may have a part of the data, and this is a way to make it.
        if place.turns is None and isinstance(candidate, DistributedSampler) and candidate.num_replicas > 1:
            raise ProgramError(
                "The DataLoader has a DistributedSampler, so its batches are one replica's part already; distributing "
                "them would cut them twice. Either give the DataLoader an ordinary sampler (shuffle=True) and the "
                "global batch size, or iterate over it directly, without distribute_dataset."
            )
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        raise ProgramError(
            "The DataLoader reads a data pipe, which cuts itself by rank inside the loader; distributing its batches "
            "would cut them twice. Wrap what it yields in an IterableDataset of your own."
        )
    if loader.timeout and not loader.num_workers:
        raise OptionError(f"timeout={loader.timeout!r} needs workers: give the DataLoader num_workers=1 or more.")
    if loader._dataset_kind != 0 or loader.batch_sampler is None or not is_plain(loader):
        return LoaderSource(loader, place, shared)
    pieces = place.turns.pieces if place.turns is not None else 0
    # A pipeline's batch that is nobody's to cut is collated as it is.
    rule = CollateRule(loader, place, replace(options, collate="slice") if pieces == 1 else options)
    if pieces > 1 and rule.needs_whole_batches():
        return LoaderSource(loader, place, shared)
    kind = WorkerSource if loader.num_workers else SampleSource
    return kind(loader, place, rule, shared)
