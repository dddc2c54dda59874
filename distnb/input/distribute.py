"""Any dataset, distributed over the replicas: each global batch is cut, and this replica gets its slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterDataPipe, MapDataPipe

from distnb.errors import OptionError, ProgramError, StructureError
from distnb.input.arrays import ArraySource
from distnb.input.base import Place, Shared, Source
from distnb.input.collating import CollateRule
from distnb.input.dataset import Agree, DistributedDataset
from distnb.input.layout import count_examples
from distnb.input.samples import SampleSource
from distnb.input.whole import LoaderSource, PythonSource, is_plain
from distnb.input.workers import WorkerSource
from distnb.options import InputOptions
from distnb.topology import Device

__all__ = ["distribute"]


def distribute(
    dataset: Any,
    *,
    num_replicas: int,
    replica_id: int,
    device: Device,
    batch_size: int | None = None,
    options: InputOptions | None = None,
    shared_randomness: Shared,
    agree: Agree | None = None,
) -> DistributedDataset:
    """Distribute a dataset of global batches. Runs on each replica.

    Map-style data is loaded by the slice; what can only be read from end to end (iterable datasets, generators, lists
    of batches) every replica reads whole and cuts. A `collate_fn` that pads or mixes gets whole batches (see
    `InputOptions.collate`).

    Args:
        dataset: A DataLoader whose batches are the global batches; or, with `batch_size`, a Dataset or a structure of
            tensors, arrays and lists with one entry per example; or an iterable of batches, or a function without
            arguments that returns one.
        num_replicas: How many slices each batch is cut into.
        replica_id: Whose slices are wanted.
        device: Where they are wanted.
        batch_size: Examples in a global batch, for data that is not batched yet. Batches come in order.
        options: How the dataset is fed.
        shared_randomness: Makes the random stream that all replicas share the current one; shuffles draw from it.
        agree: Gathers one small value of each replica on all, in replica order. It is called after the first batch
            and at the end of each iteration, to find replicas that read different data.

    Returns:
        The distributed dataset.

    Raises:
        OptionError: The batch size is no positive whole number, missing, or given for batches that are made already.
        ProgramError: The dataset cuts itself by rank already, or is nothing that can be read.
        StructureError: The tensors, arrays and lists disagree about the number of examples.

    Example:
        >>> from contextlib import nullcontext
        >>> here = dict(num_replicas=2, device=Device("cpu"), shared_randomness=nullcontext)
        >>> for replica_id in range(2):
        ...     print([x.values for x in distribute(torch.arange(5), batch_size=3, replica_id=replica_id, **here)])
        [(tensor([0, 1]),), (tensor([3]),)]
        [(tensor([2]),), (tensor([4]),)]
    """
    options = options or InputOptions()
    place = Place(num_replicas, replica_id, device)
    source = _source_of(dataset, batch_size, place, options, shared_randomness)
    return DistributedDataset(source, place, options, shared_randomness, agree)


def _source_of(dataset: Any, batch_size: int | None, place: Place, options: InputOptions, shared: Shared) -> Source:
    """What reads this kind of dataset best."""
    if isinstance(dataset, DistributedDataset):
        raise ProgramError("This dataset is distributed already. Distribute the dataset it was made from.")
    if batch_size is not None:
        dataset = _batched(dataset, _checked(batch_size), place)
    elif _needs_batch_size(dataset):
        raise OptionError(
            f"A {type(dataset).__name__} is not batched yet. Give distribute_dataset the size of the global batch "
            "(batch_size=…), or wrap it in a DataLoader (one with batch_size=None, if its elements are batches)."
        )
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, DataLoader):
        return _of_loader(dataset, place, options, shared)
    if isinstance(dataset, Iterable) or callable(dataset):
        return PythonSource(dataset, place, shared)
    raise ProgramError(
        f"A {type(dataset).__name__} cannot be distributed: it is neither a DataLoader, a Dataset, nor an iterable "
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
        return ArraySource(dataset, batch_size, place)
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
        if isinstance(candidate, DistributedSampler) and candidate.num_replicas > 1:
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
    rule = CollateRule(loader, place, options)
    kind = WorkerSource if loader.num_workers else SampleSource
    return kind(loader, place, rule, shared)
