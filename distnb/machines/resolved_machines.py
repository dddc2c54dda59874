"""The machines that a cluster resolver names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from distnb.cluster.resolvers import ClusterResolver
from distnb.cluster.worker_placement import (
    Worker,
    host_of,
    is_own,
    server_cluster_tasks,
    split_address,
    workers_of,
)
from distnb.errors import OptionError
from distnb.machines.host_plan import HostOptions
from distnb.topology import PS, WORKER, Task

__all__ = ["addresses_of", "check_resolver", "machines_of"]


def check_resolver(resolver: object) -> None:
    """Raise OptionError unless an object is a cluster resolver."""
    if not isinstance(resolver, ClusterResolver):
        raise OptionError(
            f"{resolver!r} is not a resolver. Give an object of distnb.cluster_resolver, such as "
            "SimpleClusterResolver({'worker': ['a:2222', 'b:2222']})."
        )


def addresses_of(resolver: ClusterResolver) -> HostOptions:
    """Return the addresses of a cluster's workers and parameter servers.

    Without parameter servers, return the addresses of the chief and the workers, except for this process.
    """
    if tasks := server_cluster_tasks(resolver):
        if resolver.task_type in (WORKER, PS):
            raise OptionError(
                f"This process is {resolver.task_type} {resolver.task_id} of its cluster, but only the coordinator "
                "starts it: the chief, or a process that is not a task. On workers and servers run `distnb worker`."
            )
        addresses = tuple(tasks.values())
        for task, address in tasks.items():
            split_address(address)
            if addresses.count(address) > 1:
                raise OptionError(
                    f"The cluster gives several tasks the address of {task}, {address}. Give each its own; those of "
                    "one machine need different ports."
                )
        return HostOptions(hosts=addresses, tasks=tasks, replicas=_replicas_per_worker(resolver, tasks))
    found = {worker.address: [worker] for worker in _workers(resolver) if not is_own(worker, resolver)}
    if not found:
        raise OptionError(
            f"The cluster {resolver.cluster_spec().as_dict()} has no worker except this process. Add one that runs a "
            "server."
        )
    for address in found:
        split_address(address)
    return HostOptions(hosts=tuple(found), per_host=_accelerators(resolver, found))


def machines_of(resolver: ClusterResolver) -> HostOptions:
    """Return the machines of a cluster's chief and workers, without ports.

    A machine without GPUs gets one engine for each of its tasks. With parameter servers, return the machines of the
    workers and servers.
    """
    if addresses := server_cluster_tasks(resolver):
        placed = {task: host_of(address) for task, address in addresses.items()}
        machines = tuple(dict.fromkeys(placed.values()))
        return HostOptions(hosts=machines, tasks=placed, replicas=_replicas_per_worker(resolver, placed))
    by_host: dict[str, list[Worker]] = {}
    for worker in _workers(resolver):
        by_host.setdefault(host_of(worker.address), []).append(worker)
    tasks = {host: len(workers) for host, workers in by_host.items()}
    return HostOptions(hosts=tuple(by_host), per_host=_accelerators(resolver, by_host), without_gpus=tasks)


def _workers(resolver: ClusterResolver) -> tuple[Worker, ...]:
    spec = resolver.cluster_spec()
    workers = workers_of(spec)
    if not workers:
        raise OptionError(
            f"{resolver!r} has no chief and no worker, so there is no machine for engines: {spec.as_dict()}. Add one."
        )
    return workers


def _accelerators(resolver: ClusterResolver, workers: Mapping[str, Sequence[Worker]]) -> Mapping[str, int] | None:
    """Return the accelerators by host, if the resolver knows those of other machines."""
    if not resolver.knows_accelerators:
        return None
    counts = {
        name: sum(sum(resolver.num_accelerators(task.task_type, task.task_id).values()) for task in tasks)
        for name, tasks in workers.items()
    }
    return {name: count for name, count in counts.items() if count}


def _replicas_per_worker(resolver: ClusterResolver, tasks: Iterable[Task]) -> int:
    """Return the number of accelerators of each worker of a cluster with servers, if the resolver knows it; else 1."""
    if not resolver.knows_accelerators:
        return 1
    counts = {
        str(task): sum(resolver.num_accelerators(task.job, task.index).values()) for task in tasks if task.job == WORKER
    }
    if len(set(counts.values())) > 1:
        raise OptionError(
            f"The workers have different numbers of accelerators, {counts}, but each must have the same number of "
            "replicas. Give the number to use: distnb.start(..., replicas_per_worker=1)."
        )
    return max(1, *counts.values())
