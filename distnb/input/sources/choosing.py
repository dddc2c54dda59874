"""Choice of the source that reads a dataset."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, IterDataPipe, MapDataPipe

from distnb.errors import OptionError, ProgramError, StructureError
from distnb.input.cutting import count_examples
from distnb.input.dealing import ReplicaInput
from distnb.input.draws import Drawing
from distnb.input.sources.arrays import ArraySource
from distnb.input.sources.base import Source
from distnb.input.sources.iterables import IterableSource
from distnb.input.sources.loaders import LoaderSource
from distnb.options import InputOptions

__all__ = ["check_batched", "source_of"]


def source_of(
    dataset: Any, batch_size: int | None, place: ReplicaInput, options: InputOptions, drawing: Drawing
) -> Source:
    """Return the source for this kind of dataset. Arguments and errors are those of `distribute`."""
    if batch_size is not None:
        dataset = _batched(dataset, _checked(batch_size), place)
    else:
        check_batched(dataset)
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, DataLoader):
        if place.num_replicas > 1:
            _check_uncut(dataset, place)
        return LoaderSource(dataset, place, options, drawing)
    if isinstance(dataset, IterableDataset) and place.num_replicas > 1 and not place.takes_whole_batches:
        warnings.warn(
            f"The elements of a {type(dataset).__name__} are treated as global batches, and cut along axis 0. If they "
            "are single examples, give distribute_dataset the size of the global batch (batch_size=…). "
            "Use DataLoader(dataset, batch_size=None) to declare that they are batches.",
            stacklevel=2,
        )
    if isinstance(dataset, Iterable) or callable(dataset):
        return IterableSource(dataset, place, drawing)
    raise ProgramError(
        f"{type(dataset).__name__} cannot be distributed: it is neither a DataLoader, a Dataset, nor an iterable "
        "of batches."
    )


_ARRAYS = (torch.Tensor, np.ndarray, Mapping, tuple)
_UNBATCHED = (Dataset, *_ARRAYS, str, bytes)  # a list may be a list of batches


def check_batched(dataset: Any) -> None:
    """Raise OptionError for data that is not batched yet. The elements of an IterableDataset may be batches."""
    if isinstance(dataset, _UNBATCHED) and not isinstance(dataset, (DataLoader, IterableDataset)):
        raise OptionError(
            f"A {type(dataset).__name__} is not batched yet. Wrap it in a DataLoader (one with batch_size=None, if its "
            "elements are batches), or give distribute_dataset the size of the global batch (batch_size=…)."
        )


def _checked(batch_size: int) -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise OptionError(f"batch_size={batch_size!r}: give the size of the global batch, a whole number, 1 or more.")
    return int(batch_size)


def _batched(dataset: Any, batch_size: int, place: ReplicaInput) -> DataLoader[Any] | Source:
    """Return a loader or source of data that is not batched yet, with a batch size."""
    if isinstance(dataset, DataLoader):
        raise OptionError(
            "batch_size was given for a DataLoader, which makes batches itself. Leave it out, or give the DataLoader "
            "that batch size."
        )
    if isinstance(dataset, Dataset):
        return DataLoader(dataset, batch_size=batch_size)
    if isinstance(dataset, _ARRAYS) or _is_list_of_fields(dataset):
        return ArraySource(dataset, batch_size, place)
    if hasattr(dataset, "iloc"):
        raise OptionError(f"A {type(dataset).__name__} with a batch size: pass its values, such as frame.to_numpy().")
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, (str, bytes)):
        # a list of examples, or an object with the interface of a Dataset
        return DataLoader(dataset, batch_size=batch_size)
    raise OptionError(
        f"batch_size was given for a {type(dataset).__name__}, which is neither a Dataset nor a structure of arrays. "
        "An iterable must yield global batches itself: leave batch_size out."
    )


def _is_list_of_fields(dataset: Any) -> bool:
    """Return whether a list holds arrays of one length (fields), and not examples."""
    if not isinstance(dataset, list) or not any(isinstance(field, (torch.Tensor, np.ndarray)) for field in dataset):
        return False
    try:
        return count_examples(dataset) != len(dataset)
    except StructureError:
        return False


def _check_uncut(loader: DataLoader[Any], place: ReplicaInput) -> None:
    """Refuse loaders that divide their data by rank: it would be divided twice."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    for candidate in (sampler, loader.batch_sampler):
        # A DistributedSampler is a valid way to give each of several pipelines its part of the data.
        if place.turns is None and isinstance(candidate, DistributedSampler) and candidate.num_replicas > 1:
            raise ProgramError(
                "The DataLoader has a DistributedSampler, so its batches are already one replica's part; distributing "
                "them would cut them twice. Either give the DataLoader an ordinary sampler (shuffle=True) and the "
                "global batch size, or iterate over it directly, without distribute_dataset."
            )
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        raise ProgramError(
            "The DataLoader reads a data pipe, which divides its data by rank inside the loader; distributing its "
            "batches would cut them twice. Wrap its elements in an IterableDataset of your own."
        )
