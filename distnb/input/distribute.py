"""Distribution of any dataset over the replicas: each global batch is cut, and this replica gets its slice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from distnb.errors import ProgramError
from distnb.input.agreeing import Agree
from distnb.input.dataset import DistributedDataset
from distnb.input.dealing import ReplicaInput, Turns
from distnb.input.draws import Drawing, Shared, on_host
from distnb.input.sharding import part_for_worker, resolve_policy
from distnb.input.sources.choosing import source_of
from distnb.options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from distnb.topology import Device

__all__ = ["distribute", "distribute_from_function"]

_logger = logging.getLogger("distnb.input")


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

    A replica loads only its slice of map-style data. Data that can only be read sequentially (iterable datasets,
    generators, lists of batches) is read completely and cut by every replica. A `collate_fn` that may pad or mix gets
    whole batches (see `InputOptions.collate`).

    Args:
        dataset: A DataLoader whose batches are the global batches; or, with `batch_size`, a Dataset or a structure of
            tensors, arrays and lists with one entry per example; or an iterable of batches, or a function without
            arguments that returns one.
        num_replicas, replica_id, device: The number of slices of each batch, the replica, and its device.
        batch_size: The number of examples in a global batch, for data that is not batched yet. Batches come in order.
        options: The input options.
        shared_randomness: Makes the random stream that all replicas share the current one; shuffles draw from it.
        agree: Gathers one small value of each replica on all, in replica order. It is called after the first batch
            and at the end of each iteration, to detect replicas that read different data. If the replicas read
            different data on purpose, it is called for each batch.
        workers: The worker (machine) of each replica, numbered from 0; None for one worker. With several, the
            `auto_shard_policy` of the options selects the data of each.

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
    policy = resolve_policy(dataset, options.auto_shard_policy, own.pipelines)
    if policy in (AutoShardPolicy.OFF, AutoShardPolicy.FILE, AutoShardPolicy.HINT):
        # Each worker reads its own global batches.
        dataset = part_for_worker(dataset, policy, own.pipeline, own.pipelines)
        turns = own if own.pipelines > 1 else None
    place = ReplicaInput(
        num_replicas=num_replicas, replica_id=replica_id, device=device, target=_target(device, options), turns=turns
    )
    return _make_dataset(dataset, batch_size, place, options, Drawing(shared_randomness, place), agree)


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

    Each replica is a process and makes its worker's pipeline for itself. The pipelines of a worker's replicas are the
    same, since random numbers are drawn from a stream that these replicas share. Of every n successive batches, the
    worker's n replicas take one each, in order. Map-style data is loaded only by the replica that takes it. Other
    pipelines are read completely by every replica of the worker.

    `make` is called with an `InputContext`. It returns an iterable of batches (a DataLoader, a generator's function, a
    list) of the size for one replica. The other arguments are those of `distribute`.
    """
    options = options or InputOptions()
    alone = options.replication_mode is InputReplicationMode.PER_REPLICA
    turns = _turns(range(num_replicas) if alone else workers or [0] * num_replicas, replica_id, 1)
    place = ReplicaInput(
        num_replicas=num_replicas,
        replica_id=replica_id,
        device=device,
        target=_target(device, options),
        turns=turns if num_replicas > 1 else None,
    )
    drawing = Drawing(shared_randomness, place)
    drawing.begin()
    with drawing(), on_host(device):
        dataset = make(InputContext(turns.pipelines, turns.pipeline, num_replicas))
    _check_undistributed(dataset)
    if dataset is None:
        raise ProgramError(
            "The function that distribute_datasets_from_function called returned None. It must return its dataset: an "
            "iterable of batches, such as a DataLoader."
        )
    return _make_dataset(dataset, None, place, options, drawing, agree)


def _make_dataset(
    dataset: Any,
    batch_size: int | None,
    place: ReplicaInput,
    options: InputOptions,
    drawing: Drawing,
    agree: Agree | None,
) -> DistributedDataset:
    source = source_of(dataset, batch_size, place, options, drawing)
    _logger.info(
        "replica %d of %d reads a %s as %s%s",
        place.replica_id,
        place.num_replicas,
        type(dataset).__name__,
        type(source).__name__,
        "" if place.turns is None else f", pipeline {place.turns.pipeline} of {place.turns.pipelines}",
    )
    return DistributedDataset(source, place, options, drawing, agree)


def _check_undistributed(dataset: Any) -> None:
    if isinstance(dataset, DistributedDataset):
        raise ProgramError("This dataset is distributed already. Distribute the dataset it was made from.")


def _turns(pipelines: Sequence[int], replica_id: int, pieces: int) -> Turns:
    own = pipelines[replica_id]
    takers = [replica for replica, pipeline in enumerate(pipelines) if pipeline == own]
    return Turns(
        pipelines=max(pipelines) + 1, pipeline=own, takers=len(takers), turn=takers.index(replica_id), pieces=pieces
    )


def _target(device: Device, options: InputOptions) -> Device:
    return device if options.fetch_to_device else Device("cpu")
