"""The position of this process among the workers of a cluster of machines, and the address on which it listens.

This module does not import torch, because `distnb run` starts its replicas before it loads torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from distnb.cluster.network import interface_of, listening_address
from distnb.cluster.resolvers.base import ClusterResolver
from distnb.cluster.resolvers.spec import ClusterSpec
from distnb.errors import OptionError, StartError
from distnb.topology import PS, WORKER, Task

__all__ = [
    "Worker",
    "WorkerPlacement",
    "are_workers",
    "host_of",
    "is_loopback",
    "is_own",
    "network_environment",
    "own_interface",
    "placement_of",
    "server_cluster_tasks",
    "split_address",
    "tasks_in",
    "workers_of",
]

_REPLICA_JOBS = ("chief", "worker")
_JOBS = (*_REPLICA_JOBS, "ps", "evaluator")


@dataclass(frozen=True)
class Worker:
    """A machine of the group: its task, and its address in the cluster."""

    task_type: str
    task_id: int
    address: str

    def __str__(self) -> str:
        return f"{self.task_type} {self.task_id} ({self.address})"


@dataclass(frozen=True)
class WorkerPlacement:
    """The workers that train together, and the position of this process among them.

    Attributes:
        workers: The workers in rank order: the chief, then the workers by index. Without a chief, the first worker is
            the chief.
        index: The position of this process.
    """

    workers: tuple[Worker, ...]
    index: int

    @property
    def me(self) -> Worker:
        """The task of this process."""
        return self.workers[self.index]

    @property
    def chief(self) -> Worker:
        """The worker at whose address all workers connect to the rendezvous store."""
        return self.workers[0]


def placement_of(resolver: ClusterResolver) -> WorkerPlacement | None:
    """Return the position of this process according to a resolver.

    Return None if this process trains alone: if there is no cluster, if the cluster has only one worker, or if this
    process is an evaluator, which belongs to no group.

    Raises:
        OptionError: The cluster is malformed, or the resolver does not determine the task of this process.
    """
    spec = resolver.cluster_spec()
    kind, index = resolver.task_type, resolver.task_id
    if kind == "evaluator" or not spec:
        return None
    workers = workers_of(spec)
    if kind in spec.jobs and kind not in _REPLICA_JOBS:
        raise OptionError(
            f"This process is {kind} {index} of its cluster, but only {' and '.join(_REPLICA_JOBS)} tasks hold "
            "replicas. Make a MultiWorkerMirroredStrategy in one of those, or in an evaluator."
        )
    if not workers:
        raise OptionError(
            f"The cluster has no {' and no '.join(_REPLICA_JOBS)}, so no process trains: {spec.as_dict()}. Add one."
        )
    if kind is not None and index is not None:
        spec.task_address(kind, index)
    if len(workers) < 2:
        return None
    if kind is None or index is None:
        raise OptionError(
            f"The cluster has the workers {_list(workers)}, but nothing says which of them this process is. Add "
            '"task": {"type": "worker", "index": …} to TF_CONFIG, or assign the resolver\'s task_type and task_id.'
        )
    split_address(workers[0].address)
    addresses = [worker.address for worker in workers]
    duplicates = {address for address in addresses if addresses.count(address) > 1}
    if duplicates:
        raise OptionError(
            f"The cluster gives several tasks the same address, {min(duplicates)}: {_list(workers)}. Give each its own."
        )
    own = next(rank for rank, worker in enumerate(workers) if (worker.task_type, worker.task_id) == (kind, index))
    return WorkerPlacement(workers, own)


def workers_of(spec: ClusterSpec) -> tuple[Worker, ...]:
    """Return the tasks of a cluster that hold replicas, in rank order.

    Raises:
        OptionError: The cluster has an unknown job, or several chiefs.
    """
    unknown = [job for job in spec.jobs if job not in _JOBS]
    if unknown:
        raise OptionError(
            f"The cluster {spec.as_dict()} has the job {unknown[0]!r}, which is unknown. The jobs are "
            f"{', '.join(_JOBS)}."
        )
    if "chief" in spec.jobs and spec.num_tasks("chief") > 1:
        raise OptionError(f"The cluster has {spec.num_tasks('chief')} chiefs: {spec.as_dict()['chief']}. Name one.")
    return tuple(
        Worker(job, index, spec.task_address(job, index))
        for job in _REPLICA_JOBS
        if job in spec.jobs
        for index in spec.task_indices(job)
    )


def server_cluster_tasks(resolver: ClusterResolver) -> dict[Task, str]:
    """Return the workers and servers in a resolver's cluster with their addresses; none if it has no server.

    Raises:
        OptionError: The cluster has a server but is malformed: see `tasks_in`.
    """
    spec = resolver.cluster_spec()
    return tasks_in(spec) if PS in spec.jobs and spec.task_indices(PS) else {}


def tasks_in(spec: ClusterSpec) -> dict[Task, str]:
    """Return the workers and servers of a cluster with their addresses, in the order of its engines.

    Raises:
        OptionError: The cluster has no worker, no server, several chiefs or an unknown job, or the tasks of a job are
            not numbered from 0.
    """
    workers_of(spec)
    tasks: dict[Task, str] = {}
    for job in (WORKER, PS):
        indices = spec.task_indices(job) if job in spec.jobs else []
        if not indices:
            raise OptionError(
                f"The cluster {spec.as_dict()} has no {job}. A cluster with parameter servers needs at least one "
                "worker and one ps."
            )
        if indices != list(range(len(indices))):
            raise OptionError(f"The {job} tasks of the cluster are {indices}. Number them from 0, without a gap.")
        tasks |= {Task(job, index): spec.task_address(job, index) for index in indices}
    return tasks


def are_workers(machines: Sequence[str], resolver: ClusterResolver) -> bool:
    """Return whether machines, by a launcher's names, are the machines of a cluster's workers.

    The machine of this process may be missing.
    """
    there = {host_of(name.rpartition("@")[2]) for name in machines}
    workers = workers_of(resolver.cluster_spec())
    if there == {host_of(worker.address) for worker in workers}:
        return True
    return there == {host_of(worker.address) for worker in workers if not is_own(worker, resolver)}


def is_own(worker: Worker, resolver: ClusterResolver) -> bool:
    """Return whether a worker of a cluster is this process."""
    return (worker.task_type, worker.task_id) == (resolver.task_type, resolver.task_id)


def _list(workers: Iterable[object]) -> str:
    return ", ".join(map(str, workers))


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port of `host:port` or `[::1]:port`. Raises OptionError if the port is missing or invalid."""
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise OptionError(f"{address!r} is not an address. Write host:port, with a port from 1 to 65535.")
    return host, int(port)


def own_interface(placement: WorkerPlacement) -> tuple[str, str]:
    """Return the network interface that has this worker's address, and its numeric address.

    GLOO_SOCKET_IFNAME can name another interface. That is necessary behind address translation, where the addresses in
    the cluster are not the machines' own addresses.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if named:
        try:
            return named, listening_address((), named)
        except StartError as error:
            raise StartError(f"GLOO_SOCKET_IFNAME: {error}") from None
    host, failures = host_of(placement.me.address), ""
    for address in _resolve(host, placement.me):
        try:
            interface = interface_of(address)
        except StartError as error:
            failures = str(error)
        else:
            _check_reachable(placement, host, address)
            return interface, address
    raise StartError(
        f"This process is {placement.me} of its cluster. {failures} Is it the right task? Behind address translation, "
        "name the interface to use: GLOO_SOCKET_IFNAME=eth0."
    )


def host_of(address: str) -> str:
    """Return the host of an address whose port may be missing."""
    host = address.rpartition(":")[0] if address.rpartition(":")[2].isdigit() and not address.endswith("]") else address
    return host.strip("[]") or address


def _resolve(host: str, worker: Worker) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise StartError(f"The address of {worker} is unknown on this machine: {error}.") from error
    addresses = {str(each[4][0]).partition("%")[0] for each in found}
    return sorted(addresses, key=lambda address: (":" in address, address))


def _check_reachable(placement: WorkerPlacement, host: str, address: str) -> None:
    hosts = {host_of(worker.address) for worker in placement.workers}
    if ip_address(address).is_loopback and len(hosts) > 1 and not all(map(is_loopback, hosts)):
        raise StartError(
            f"{placement.me}: on this machine {host!r} means {address}, where other machines cannot reach it (often "
            "because of a line in /etc/hosts). Give the cluster this machine's address on the network."
        )


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address is a loopback one, which other machines cannot reach."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def network_environment(interface: str) -> dict[str, str]:
    """Return the variables that keep a worker's communication on one interface, unless the user chose another."""
    chosen = {name: os.environ.get(name) for name in ("TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": chosen["TP_SOCKET_IFNAME"] or interface,
        "NCCL_SOCKET_IFNAME": chosen["NCCL_SOCKET_IFNAME"] or f"={interface}",  # NCCL treats a bare name as a prefix
    }
