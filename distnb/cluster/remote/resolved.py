"""What a resolver says of the machines where a notebook's engines are to run, or run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distnb.cluster.resolvers.base import ClusterResolver
from distnb.cluster.worker_placement import Worker, host_of, split_address, workers_of
from distnb.errors import OptionError

__all__ = ["Machines", "are_workers", "machines_of", "machines_with_servers"]


@dataclass(frozen=True)
class Machines:
    """Machines, and how many engines they should have.

    Attributes:
        names: Each once.
        engines: For each: one per accelerator of its tasks; None where that is not known.
        without_gpus: For each: one per task; empty where that is not known.
    """

    names: tuple[str, ...]
    engines: Mapping[str, int] | None = None
    without_gpus: Mapping[str, int] = field(default_factory=dict)


def machines_with_servers(resolver: ClusterResolver) -> Machines:
    """The addresses of a cluster's chief and workers, without this process's own.

    Raises:
        OptionError: There is none.
    """
    workers = _workers(resolver)
    own = (resolver.task_type, resolver.task_id)
    found = [worker for worker in workers if (worker.task_type, worker.task_id) != own]
    if not found:
        raise OptionError(
            f"The cluster {resolver.cluster_spec().as_dict()} has no worker beside this process, so there is no server."
        )
    for worker in found:
        split_address(worker.address)
    return Machines(tuple(worker.address for worker in found), _engines(resolver, {w.address: [w] for w in found}))


def machines_of(resolver: ClusterResolver) -> Machines:
    """The machines of a cluster's chief and workers, without their ports.

    Raises:
        OptionError: There is none.
    """
    by_host: dict[str, list[Worker]] = {}
    for worker in _workers(resolver):
        by_host.setdefault(host_of(worker.address), []).append(worker)
    tasks = {host: len(workers) for host, workers in by_host.items()}
    return Machines(tuple(by_host), _engines(resolver, by_host), tasks)


def are_workers(machines: Sequence[str], resolver: ClusterResolver) -> bool:
    """Whether these machines, as a launcher names them, are those of a cluster's workers.

    Where the process itself is one of the workers, its machine may be lacking.
    """
    there = {host_of(name.rpartition("@")[2]) for name in machines}
    workers = workers_of(resolver.cluster_spec())
    if there == {host_of(worker.address) for worker in workers}:
        return True
    own = (resolver.task_type, resolver.task_id)
    return there == {host_of(worker.address) for worker in workers if (worker.task_type, worker.task_id) != own}


def _workers(resolver: ClusterResolver) -> tuple[Worker, ...]:
    spec = resolver.cluster_spec()
    workers = workers_of(spec)
    if not workers:
        raise OptionError(
            f"{resolver!r} tells of no chief and no worker, so there is no machine for engines: {spec.as_dict()}."
        )
    return workers


def _engines(resolver: ClusterResolver, workers: Mapping[str, Sequence[Worker]]) -> Mapping[str, int] | None:
    """One engine per accelerator, where the resolver knows other machines' accelerators."""
    if not resolver.knows_accelerators:
        return None
    counts = {
        name: sum(sum(resolver.num_accelerators(task.task_type, task.task_id).values()) for task in tasks)
        for name, tasks in workers.items()
    }
    return {name: count for name, count in counts.items() if count} or None
