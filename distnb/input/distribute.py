"""Any dataset, distributed over the replicas: each global batch is cut, and this replica gets its slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from distnb.errors import OptionError, ProgramError
from distnb.input.dataset import Agree, DistributedDataset
from distnb.input.draws import Drawing, on_host
from distnb.input.sources.base import Place, Shared, Turns
from distnb.input.sources.choosing import source_of
from distnb.input.sources.loaders import changed, is_plain
from distnb.options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from distnb.topology import Device

__all__ = ["distribute", "distribute_from_function", "part_of"]


_OWN_PARTS = frozenset({AutoShardPolicy.OFF, AutoShardPolicy.FILE, AutoShardPolicy.HINT})
# Policies under which workers read global batches of their own.
_ELSE = (
    "Otherwise AutoShardPolicy.DATA cuts every global batch among all replicas, and distribute_datasets_from_function "
    "leaves it to you what each worker reads."
)


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
    workers: Sequence[int] | None = None,
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
            and at the end of each iteration, to find replicas that read different data; for each batch where they are
            to read different data.
        workers: The worker (machine) of each replica, numbered from 0; None for one worker. With several, the
            `auto_shard_policy` of the options says what each of them reads.

    Returns:
        The distributed dataset.

    Raises:
        OptionError: The batch size is no positive whole number, missing, or given for batches that are made already.
        ProgramError: The dataset cuts itself by rank already, or is nothing that can be read.
        StructureError: The tensors, arrays and lists disagree about the number of examples.

    Example:
        >>> from contextlib import nullcontext
        >>> import torch
        >>> here = dict(num_replicas=2, device=Device("cpu"), shared_randomness=nullcontext)
        >>> for replica_id in range(2):
        ...     print([x.values for x in distribute(torch.arange(5), batch_size=3, replica_id=replica_id, **here)])
        [(tensor([0, 1]),), (tensor([3]),)]
        [(tensor([2]),), (tensor([4]),)]
    """
    options = options or InputOptions()
    _check_undistributed(dataset)
    turns = None
    own = _turns(workers or [0] * num_replicas, replica_id, num_replicas)
    policy = policy_for(dataset, options.auto_shard_policy, own.pipelines)
    if policy in _OWN_PARTS:
        dataset = part_of(dataset, policy, own.pipeline, own.pipelines)
        turns = own if own.pipelines > 1 else None
    place = Place(num_replicas, replica_id, device, _target(device, options), turns)
    return _made(dataset, batch_size, place, options, Drawing(shared_randomness, place), agree)


def distribute_from_function(
    make: Callable[[InputContext], Any],
    *,
    num_replicas: int,
    replica_id: int,
    device: Device,
    options: InputOptions | None = None,
    shared_randomness: Shared,
    agree: Agree | None = None,
    workers: Sequence[int] | None = None,
) -> DistributedDataset:
    """Distribute the input pipelines that a function makes. Runs on each replica.

    Each replica is a process, so each makes its worker's pipeline for itself: the same one, since random numbers are
    drawn from a stream that the worker's replicas share. Of every n successive batches of it, the worker's n replicas
    take one each, in order. Map-style data is loaded only by the replica that takes it; other pipelines are read from
    end to end by every replica of the worker.

    Args:
        make: Called with an `InputContext`; gives an iterable of batches (a DataLoader, a generator's function, a list)
            that are already as large as a replica's shall be.
        num_replicas, replica_id, device, options, shared_randomness, agree, workers: See `distribute`.

    Returns:
        The distributed dataset, whose global batches are what all replicas take in one step.

    Raises:
        OptionError: An option that is for datasets which distnb cuts.
        ProgramError: The function gives nothing that can be read.
    """
    options = options or InputOptions()
    alone = options.replication_mode is InputReplicationMode.PER_REPLICA
    turns = _turns(range(num_replicas) if alone else workers or [0] * num_replicas, replica_id, 1)
    place = Place(num_replicas, replica_id, device, _target(device, options), turns if num_replicas > 1 else None)
    drawing = Drawing(shared_randomness, place)
    drawing.begin()
    with drawing(), on_host(device):
        dataset = make(InputContext(turns.pipelines, turns.pipeline, num_replicas))
    _check_undistributed(dataset)
    if dataset is None:
        raise ProgramError(
            "The function that was given to distribute_datasets_from_function returned None. It must return its "
            "dataset: an iterable of batches, such as a DataLoader."
        )
    return _made(dataset, None, place, options, drawing, agree)


def _made(
    dataset: Any, batch_size: int | None, place: Place, options: InputOptions, drawing: Drawing, agree: Agree | None
) -> DistributedDataset:
    source = source_of(dataset, batch_size, place, options, drawing)
    return DistributedDataset(source, place, options, drawing, agree)


def _check_undistributed(dataset: Any) -> None:
    if isinstance(dataset, DistributedDataset):
        raise ProgramError("This dataset is distributed already. Distribute the dataset it was made from.")


def _turns(pipelines: Sequence[int], replica_id: int, pieces: int) -> Turns:
    own = pipelines[replica_id]
    takers = [replica for replica, pipeline in enumerate(pipelines) if pipeline == own]
    return Turns(max(pipelines) + 1, own, len(takers), takers.index(replica_id), pieces)


def _target(device: Device, options: InputOptions) -> Device:
    return device if options.fetch_to_device else Device("cpu")


# -- the part of a dataset that one worker of several reads ------------------------------------------------------------


def policy_for(dataset: Any, policy: AutoShardPolicy, workers: int) -> AutoShardPolicy:
    """What AUTO means for a dataset: FILE where several workers can have files of their own, else DATA."""
    if policy is not AutoShardPolicy.AUTO or workers == 1:
        return policy
    files = _files_of(dataset.dataset if isinstance(dataset, DataLoader) else dataset)
    return AutoShardPolicy.FILE if files is not None and len(files) >= workers else AutoShardPolicy.DATA


def part_of(dataset: Any, policy: AutoShardPolicy, worker: int, workers: int) -> Any:
    """What one worker reads: a dataset of the same kind.

    Args:
        dataset: What the user distributes; of a DataLoader, its dataset is what is parted.
        policy: Says how.
        worker: Which one, from 0.
        workers: How many there are.

    Raises:
        OptionError: The dataset does not say how it is parted, has fewer files than there are workers, or has a sampler
            that is made for the whole of it.
    """
    if policy not in (AutoShardPolicy.FILE, AutoShardPolicy.HINT):
        return dataset
    whole = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    part = _by_files if policy is AutoShardPolicy.FILE else _by_hint
    own = part(whole, worker, workers)
    if workers == 1:
        return dataset
    return _reading(dataset, own) if isinstance(dataset, DataLoader) else own


def _by_files(dataset: Any, worker: int, workers: int) -> Any:
    files = _files_of(dataset)
    if files is None:
        raise OptionError(
            f"AutoShardPolicy.FILE was asked for, and a {type(dataset).__name__} does not say which files it is made "
            "of. Give it an attribute `files`, a sequence, and a method `with_files(files)` that gives a dataset like "
            f"itself which reads these files only. {_ELSE}"
        )
    if len(files) < workers:
        raise OptionError(
            f"AutoShardPolicy.FILE gives each of {workers} workers files of its own, and this dataset is made of "
            f"{len(files)}: {', '.join(map(str, files)) or 'none'}. Write the data as at least {workers} files. {_ELSE}"
        )
    return dataset if workers == 1 else dataset.with_files(list(files)[worker::workers])


def _files_of(dataset: Any) -> Sequence[Any] | None:
    """The files of a dataset that says which they are, and can be made of a part of them."""
    files = getattr(dataset, "files", None)
    told = isinstance(files, Sequence) and not isinstance(files, (str, bytes))
    return files if told and callable(getattr(dataset, "with_files", None)) else None


def _by_hint(dataset: Any, worker: int, workers: int) -> Any:
    shard = getattr(dataset, "shard", None)
    if not callable(shard):
        raise OptionError(
            f"AutoShardPolicy.HINT was asked for, and a {type(dataset).__name__} has no method `shard(num_shards, "
            f"index)` that gives the part of one worker. {_ELSE}"
        )
    return dataset if workers == 1 else shard(workers, worker)


def _reading(loader: DataLoader[Any], dataset: Any) -> Any:
    """A loader like the user's that reads another dataset."""
    if loader._dataset_kind == 1 and is_plain(loader):
        return changed(loader, dataset=dataset)
    batch_sampler, sampler = loader.batch_sampler, _sampler_like(loader.sampler, dataset)
    if sampler is None or type(batch_sampler) not in (type(None), BatchSampler) or not is_plain(loader):
        raise OptionError(
            f"The DataLoader's {type(loader.sampler).__name__} was made for the whole dataset, and each worker reads "
            "a part of it. Use shuffle=True or False, or make the DataLoader of each part in "
            "distribute_datasets_from_function."
        )
    if batch_sampler is not None:
        batch_sampler = BatchSampler(sampler, batch_sampler.batch_size, batch_sampler.drop_last)  # type: ignore[attr-defined]
    return changed(loader, dataset=dataset, sampler=sampler, batch_sampler=batch_sampler)


def _sampler_like(sampler: Any, dataset: Any) -> Sampler[Any] | None:
    if type(sampler) is SequentialSampler:
        return SequentialSampler(dataset)
    if type(sampler) is RandomSampler and sampler._num_samples is None:
        return RandomSampler(dataset, sampler.replacement, generator=sampler.generator)
    return None
