"""Options for engines on other machines, read and checked before anything is started."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distnb.cluster.resolvers import ClusterResolver, SlurmClusterResolver
from distnb.cluster.start_options import StartOptions
from distnb.cluster.tasks import server_cluster_tasks
from distnb.cluster.worker_placement import Worker, host_of, is_own, split_address, workers_of
from distnb.errors import OptionError
from distnb.machines.base import Transport
from distnb.machines.secret import secret_path
from distnb.machines.transports.ipyparallel_cluster import IPythonParallel, IPythonParallelOptions, count_engines
from distnb.machines.transports.mpiexec import MPI
from distnb.machines.transports.ray_nodes import (
    RayNodes,
    RayOptions,
    connected_address,
    usual_number_of_engines,
)
from distnb.machines.transports.server_transport import ServerTransport
from distnb.machines.transports.srun import Slurm, allotted_nodes, tasks_of_nodes
from distnb.machines.transports.ssh import SSH
from distnb.topology import PS, WORKER, Task

__all__ = ["HostOptions", "read_host_options"]

_TAKES = {
    "ssh": ("hosts", "cluster_resolver", "ssh_args"),
    "slurm": ("hosts", "cluster_resolver", "launcher_args"),
    "mpi": ("hosts", "cluster_resolver", "launcher_args"),
    "server": ("cluster_resolver", "secret"),
}
"""The options of each launcher in addition to `per_host` and `interface`."""

_FOR_HOSTS = ("hosts", "per_host", "interface", "ssh_args", "cluster_resolver", "secret", "launcher_args")
"""The options that are for engines on other machines."""

_FOR_RAY = ("cpus_per_engine", "gpus_per_engine", "spread", "wait")
"""The options that are for engines on a Ray cluster."""

_TRANSPORTS: dict[str, Callable[[Sequence[str]], Transport]] = {"ssh": SSH, "slurm": Slurm, "mpi": MPI}
_NAME = re.compile(r"[^\s,-][^\s,]*")


@dataclass(frozen=True)
class HostOptions:
    """The machines for engines, and the options for reaching them.

    Attributes:
        hosts: The machines, by the launcher's names, each once; for "server", their addresses.
        per_host: The number of engines on each machine. None for one per GPU, or two on the CPU.
        interface: The interface or address of this machine at which it listens for engines. None for the interface that
            leads to the machines.
        arguments: Further arguments for the launcher's command.
        launcher: "ssh", "slurm", "mpi", "server", "ray" or "ipyparallel".
        secret: The secret file, if the machines run servers.
        without_gpus: The number of engines on a machine without GPUs, by host; 2 for any other host.
        tasks: In a cluster with parameter servers, the machine of each worker and server, in engine order. Every engine
            belongs to one of these tasks.
        replicas: The number of engines of each worker.
        ray: The options for a Ray cluster, or None.
        ipyparallel: The options for an ipyparallel cluster, or None.
    """

    hosts: tuple[str, ...]
    per_host: int | Mapping[str, int] | None = None
    interface: str | None = None
    arguments: tuple[str, ...] = ()
    launcher: str = "ssh"
    secret: Path | None = None
    without_gpus: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[Task, str] = field(default_factory=dict)
    replicas: int = 1
    ray: RayOptions | None = None
    ipyparallel: IPythonParallelOptions | None = None

    def transport(self) -> Transport:
        """Return the transport to the machines."""
        if self.ray is not None:
            return RayNodes(self.ray)
        if self.ipyparallel is not None:
            return IPythonParallel(self.hosts, self.ipyparallel)
        if self.secret is None:
            return _TRANSPORTS[self.launcher](self.arguments)
        return ServerTransport(self.secret, {address: str(task) for task, address in self.tasks.items()})


# -- the user's options ------------------------------------------------------------------------------------------------


def read_host_options(options: StartOptions) -> HostOptions | None:
    """Return the options of a start for other machines; None if the engines run on this one.

    The tasks of the engines are assigned to the machines in turn: workers from the first machine on, and then servers
    from the first one on.

    Raises:
        OptionError: The options contradict each other, or do not apply to the launcher.

    Example:
        >>> read_host_options(StartOptions(hosts="a,b", per_host=2)).hosts
        ('a', 'b')
    """
    machines = _read_host_options(options)
    if options.replicas_per_worker is not None and not (options.tasks or (machines is not None and machines.tasks)):
        raise OptionError(
            f"replicas_per_worker={options.replicas_per_worker} is for a cluster with parameter servers: give workers "
            "and ps, too. Engines that are all alike are counted by n, or by per_host."
        )
    return machines


def _read_host_options(options: StartOptions) -> HostOptions | None:
    given = {name: getattr(options, name) for name in _FOR_HOSTS}
    given = {
        name: value for name, value in given.items() if not (value is None or (name.endswith("_args") and not value))
    }
    launcher, replicas_per_worker = options.launcher, options.replicas_per_worker
    hosts, resolver, per_host = map(given.get, ("hosts", "cluster_resolver", "per_host"))
    if launcher not in (None, "local", *_TAKES):
        raise OptionError(
            f"launcher={launcher!r} is unknown. The launchers are {', '.join(map(repr, ('local', *_TAKES)))}. Inside "
            "an allocation of another cluster manager, use 'mpi' or 'ssh' with its machines as hosts=[…]."
        )
    if not isinstance(resolver, (ClusterResolver, type(None))):
        raise OptionError(
            f"cluster_resolver={resolver!r} is not a resolver. Give an object of distnb.cluster_resolver, such as "
            "SimpleClusterResolver({'worker': ['a:2222', 'b:2222']})."
        )
    for_ray = {name: value for name in _FOR_RAY if (value := getattr(options, name)) not in (None, False)}
    if options.cluster is not None:
        return _next_to_engines(options, given | for_ray)
    if options.ray is not None:
        return _bundles(options, given)
    if for_ray:
        name, value = next(iter(for_ray.items()))
        other = " or an ipyparallel cluster" if name == "wait" else ""
        raise OptionError(f"{name}={value!r} is for engines on a Ray cluster{other}. Give ray=True, too.")
    chosen = launcher or _usual_launcher(hosts, resolver)
    if chosen == "local":
        if not given:
            return None
        extra = "{}={!r}".format(*next(iter(given.items())))
        if launcher is None:
            raise OptionError(f"{extra} is for engines on other machines. Name them, too: hosts=['a', 'b'].")
        raise OptionError(
            f"launcher='local' starts engines on this machine, but {extra} is for other machines. Leave one out."
        )
    if options.n is not None:
        raise OptionError(
            f"n={options.n} is for engines on this machine. For others, give the number per machine by per_host."
        )
    _check_given(chosen, given)
    machines = _with_tasks(_machines(chosen, hosts, resolver), options.tasks)
    if machines.tasks and per_host is not None:
        raise OptionError(
            f"per_host={per_host} for a cluster of {', '.join(map(str, machines.tasks))}: a server is one engine, and "
            "replicas_per_worker gives the number of engines of a worker. Leave per_host out."
        )
    return replace(
        machines,
        replicas=machines.replicas if replicas_per_worker is None else replicas_per_worker,
        per_host=machines.per_host if per_host is None else per_host,
        interface=given.get("interface"),
        arguments=(*given.get("ssh_args", ()), *given.get("launcher_args", ())),
        launcher=chosen,
        secret=secret_path(given.get("secret"), machines.hosts) if chosen == "server" else None,
    )


def _bundles(options: StartOptions, given: Mapping[str, Any]) -> HostOptions:
    """Return the bundles of a Ray cluster, one for each engine."""
    for name, value in given.items():
        if name != "interface":
            raise OptionError(f"{name}={value!r} does not apply to engines on a Ray cluster. Leave it out.")
    if options.launcher is not None:
        raise OptionError(
            f"launcher={options.launcher!r} and ray={options.ray!r} contradict each other. Leave one out."
        )
    if options.replicas_per_worker not in (None, 1):
        raise OptionError(
            f"replicas_per_worker={options.replicas_per_worker} does not apply to a Ray cluster, where each engine has "
            "resources of its own. Start more workers instead."
        )
    ray = RayOptions(
        # The daemon of a detached cluster is a process of its own, which might find another Ray cluster.
        address=(connected_address() or "auto") if options.ray in (True, "auto") else str(options.ray),
        cpus=1.0 if options.cpus_per_engine is None else options.cpus_per_engine,
        gpus=options.gpus_per_engine,
        spread=options.spread,
        wait_s=options.wait or 0.0,
    )
    count = len(options.tasks) or options.n or usual_number_of_engines(ray)
    hosts = tuple(f"ray-{number}" for number in range(count))
    tasks = dict(zip(options.tasks, hosts, strict=True)) if options.tasks else {}
    return HostOptions(hosts=hosts, per_host=1, interface=options.interface, launcher="ray", tasks=tasks, ray=ray)


def _next_to_engines(options: StartOptions, given: Mapping[str, Any]) -> HostOptions:
    """Return a host for each engine of an ipyparallel cluster, or for the requested number."""
    for name, value in {**given, "ray": options.ray, "launcher": options.launcher}.items():
        if name not in ("interface", "wait") and value is not None:
            raise OptionError(f"{name}={value!r} does not apply to engines on an ipyparallel cluster. Leave it out.")
    if options.replicas_per_worker not in (None, 1):
        raise OptionError(
            f"replicas_per_worker={options.replicas_per_worker} does not apply to an ipyparallel cluster, each of "
            "whose engines gets one engine of distnb. Start more workers instead."
        )
    if options.n is not None and (isinstance(options.n, bool) or not isinstance(options.n, int) or options.n < 1):
        raise OptionError(f"n={options.n!r}: give a whole number of engines, 1 or more.")
    cluster = IPythonParallelOptions(options.cluster, options.interface, options.wait)
    count = len(options.tasks) or options.n or count_engines(cluster)
    hosts = tuple(f"ipyparallel-{number}" for number in range(count))
    tasks = dict(zip(options.tasks, hosts, strict=True)) if options.tasks else {}
    return HostOptions(
        hosts=hosts,
        per_host=1,
        interface=options.interface,
        launcher="ipyparallel",
        tasks=tasks,
        ipyparallel=cluster,
    )


def _usual_launcher(hosts: object, resolver: ClusterResolver | None) -> str:
    if isinstance(resolver, SlurmClusterResolver):
        return "slurm"
    if resolver is not None:
        return "server"
    return "local" if hosts is None else "ssh"


def _check_given(launcher: str, given: Mapping[str, Any]) -> None:
    """Check that the options are valid, suit the launcher, and name the machines."""
    if "cluster_resolver" in given and "hosts" in given:
        raise OptionError(
            f"hosts={given['hosts']!r} cannot be combined with cluster_resolver, which names machines. Leave one out."
        )
    takes = _TAKES[launcher]
    for name, value in given.items():
        if name not in (*takes, "per_host", "interface"):
            raise OptionError(
                f"{name}={value!r} does not apply to launcher={launcher!r}, which takes {' and '.join(takes)}."
            )
        if name.endswith("_args") and (isinstance(value, str) or not all(isinstance(word, str) for word in value)):
            raise OptionError(f"{name}={value!r}: give a list of words, such as ['-p', '2222'].")
    if launcher != "slurm" and "cluster_resolver" not in given and "hosts" not in given:
        named = "cluster_resolver=…" if launcher == "server" else "hosts=['a', 'b']"
        raise OptionError(f"launcher={launcher!r} is for engines on other machines. Name them, too, by {named}.")
    per_host = given.get("per_host", 1)
    if isinstance(per_host, bool) or not isinstance(per_host, int) or per_host < 1:
        raise OptionError(f"per_host={per_host!r}: give a whole number of engines for each machine, 1 or more.")


def _read_names(hosts: str | Sequence[str]) -> tuple[str, ...]:
    names = [part.strip() for part in hosts.split(",") if part.strip()] if isinstance(hosts, str) else list(hosts)
    if not names:
        raise OptionError("hosts is empty. Name at least one machine, or leave it out to start engines on this one.")
    for name in names:
        # For ssh, a name that begins with a dash is an option. For srun and mpiexec, a comma separates two names.
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionError(
                f"{name!r} is not the name of a machine. Give one that the launcher accepts: 'gpu1', for ssh 'me@gpu1'."
            )
        if names.count(name) > 1:
            raise OptionError(f"hosts names {name!r} more than once. Give the number of engines by per_host instead.")
    return tuple(names)


# -- the cluster of a resolver, or of Slurm ----------------------------------------------------------------------------


def _machines(launcher: str, hosts: str | Sequence[str] | None, resolver: ClusterResolver | None) -> HostOptions:
    """Return the machines, each once, with the numbers of their engines."""
    if launcher == "server":
        assert resolver is not None
        return _machines_with_servers(resolver)
    nodes = allotted_nodes() if launcher == "slurm" else ()
    machines = (
        HostOptions(hosts=() if hosts is None else _read_names(hosts)) if resolver is None else _machines_of(resolver)
    )
    if launcher != "slurm":
        return machines
    for name in machines.hosts:
        if name not in nodes:
            raise OptionError(f"{name!r} is not a node of this Slurm allocation. Its nodes are {', '.join(nodes)}.")
    return replace(machines, hosts=machines.hosts or nodes, without_gpus=machines.without_gpus or tasks_of_nodes())


def _with_tasks(machines: HostOptions, tasks: Sequence[Task]) -> HostOptions:
    """Return the machines with tasks assigned to them."""
    if not tasks:
        return machines
    if machines.tasks:
        raise OptionError(
            f"{len(set(tasks))} workers and servers were asked for, but the cluster_resolver names them already: "
            f"{', '.join(map(str, machines.tasks))}. Leave out one of the two."
        )
    assigned = {task: machines.hosts[task.index % len(machines.hosts)] for task in tasks}
    return replace(machines, tasks=assigned, replicas=tasks.count(tasks[0]))


def _machines_with_servers(resolver: ClusterResolver) -> HostOptions:
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
    return HostOptions(hosts=tuple(found), per_host=_engines(resolver, found))


def _machines_of(resolver: ClusterResolver) -> HostOptions:
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
    return HostOptions(hosts=tuple(by_host), per_host=_engines(resolver, by_host), without_gpus=tasks)


def _workers(resolver: ClusterResolver) -> tuple[Worker, ...]:
    spec = resolver.cluster_spec()
    workers = workers_of(spec)
    if not workers:
        raise OptionError(
            f"{resolver!r} has no chief and no worker, so there is no machine for engines: {spec.as_dict()}. Add one."
        )
    return workers


def _engines(resolver: ClusterResolver, workers: Mapping[str, Sequence[Worker]]) -> Mapping[str, int] | None:
    """Return one engine per accelerator, if the resolver knows the accelerators of other machines."""
    if not resolver.knows_accelerators:
        return None
    counts = {
        name: sum(sum(resolver.num_accelerators(task.task_type, task.task_id).values()) for task in tasks)
        for name, tasks in workers.items()
    }
    return {name: count for name, count in counts.items() if count} or None


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
