"""Distribution of any dataset over the replicas: each global batch is cut, and this replica gets its slice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distnb.errors import ProgramError
from distnb.input.agreeing import Agree
from distnb.input.dataset import Dealing, Dealt, DistributedDataset
from distnb.input.dealing import ReplicaInput, Turns
from distnb.input.draws import Drawing, Shared, on_host
from distnb.input.sharding import part_for_worker, resolve_policy
from distnb.input.sources.choosing import source_of
from distnb.options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from distnb.topology import Device

__all__ = ["distribute", "distribute_from_function"]

_logger = logging.getLogger("distnb.input")

Current = Callable[[], Mapping[str, Any]]
"""A function that returns the current values of arguments of `distribute`, by name. It is pickled by its name."""


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
    current: Current | None = None,
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
        current: Returns the current values of `num_replicas`, `replica_id`, `device`, `shared_randomness` and `agree`.
            If the number of replicas changes, the data is dealt to the new number. None: it never changes.

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
    dealing = _Dealing(dataset, batch_size, options, current, (num_replicas, replica_id))
    return DistributedDataset(dealing, dealing.dealt(place, Drawing(shared_randomness, place), agree))


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
    current: Current | None = None,
) -> DistributedDataset:
    """Distribute the input pipelines that a function makes. Runs on each replica.

    Each replica is a process and makes its worker's pipeline for itself. The pipelines of a worker's replicas are the
    same, since random numbers are drawn from a stream that these replicas share. Of every n successive batches, the
    worker's n replicas take one each, in order. Map-style data is loaded only by the replica that takes it. Other
    pipelines are read completely by every replica of the worker.

    `make` is called with an `InputContext`. It returns an iterable of batches (a DataLoader, a generator's function, a
    list) of the size for one replica. The other arguments are those of `distribute`. If the number of replicas changes,
    `make` is not called again: each replica still takes one batch of the pipeline for each step.
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
    dealing = _Dealing(dataset, None, options, current, (num_replicas, replica_id), by_turns=True)
    return DistributedDataset(dealing, dealing.dealt(place, drawing, agree))


@dataclass(frozen=True)
class _Dealing(Dealing):
    """The dealing of a dataset.

    Attributes:
        batch_size: The number of examples in a global batch, for data that is not batched yet.
        current: See `distribute`.
        fixed: The number of replicas and the number of this one, if they never change.
        by_turns: True if each replica takes whole batches of one pipeline, in turn.
    """

    data: Any
    batch_size: int | None
    options: InputOptions
    current: Current | None
    fixed: tuple[int, int]
    by_turns: bool = False

    def replicas(self) -> tuple[int, int]:
        if self.current is None:
            return self.fixed
        now = self.current()
        return now["num_replicas"], now["replica_id"]

    def deal(self) -> Dealt:
        assert self.current is not None, "the number of replicas of other datasets never changes"
        now = self.current()
        replicas, own, device = now["num_replicas"], now["replica_id"], now["device"]
        turns = _turns([0] * replicas, own, 1) if self.by_turns and replicas > 1 else None
        place = ReplicaInput(
            num_replicas=replicas, replica_id=own, device=device, target=_target(device, self.options), turns=turns
        )
        return self.dealt(place, Drawing(now["shared_randomness"], place), now["agree"])

    def dealt(self, place: ReplicaInput, drawing: Drawing, agree: Agree | None) -> Dealt:
        """Return the data dealt to a place."""
        source = source_of(self.data, self.batch_size, place, self.options, drawing)
        _logger.info(
            "replica %d of %d reads a %s as %s%s",
            place.replica_id,
            place.num_replicas,
            type(self.data).__name__,
            type(source).__name__,
            "" if place.turns is None else f", pipeline {place.turns.pipeline} of {place.turns.pipelines}",
        )
        return Dealt(source=source, place=place, drawing=drawing, agree=agree if place.num_replicas > 1 else None)


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
