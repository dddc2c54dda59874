"""The argument `on` of `distnb.start`, an object for each way to other machines: what these have in common."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

from distnb.cluster.devices import check_count
from distnb.cluster.engine_plan import Planner, check_replicas_per_worker
from distnb.cluster.resolvers import ClusterResolver
from distnb.cluster.start_options import StartOptions
from distnb.errors import OptionError
from distnb.machines.host_plan import HostOptions, plan_hosts
from distnb.machines.resolved_machines import machines_of
from distnb.machines.transport import Way
from distnb.machines.users_code.sent_folders import read_folders

__all__ = ["NamedMachines", "OtherMachines", "one_host_each", "with_engines"]

_NAME = re.compile(r"[^\s,-][^\s,]*")
_COUNTED = re.compile(r"([^:]+):([0-9]+)")  # an IPv6 address has several colons


class OtherMachines(ABC):
    """The machines of a cluster's engines. Each class is a way to reach them, and validates its arguments."""

    @abstractmethod
    def find_hosts(self, options: StartOptions) -> HostOptions:
        """Return the machines for a start.

        Raises:
            OptionError: An option of the start does not apply to them.
        """

    @abstractmethod
    def way(self, machines: HostOptions) -> Way:
        """Return the transport to machines that `find_hosts` has returned."""

    def planner(self, options: StartOptions) -> Planner:
        """Return the function that plans the engines.

        Raises:
            OptionError: An option of the start does not apply to these machines.
        """
        machines = self.find_hosts(options)
        check_replicas_per_worker(options, options.tasks or tuple(machines.tasks))
        return partial(plan_hosts, machines, self.way(machines), read_folders(options.sync))


def one_host_each(prefix: str, options: StartOptions, usual: Callable[[], int], interface: str | None) -> HostOptions:
    """Return a host for each engine of a start, as on a Ray or ipyparallel cluster.

    Args:
        prefix: The beginning of a host's name, before its number.
        usual: Returns the number of engines if the options name none.
        interface: See `HostOptions`.
    """
    check_count("n", options.n)
    if options.replicas_per_worker not in (None, 1):
        raise OptionError(
            f"replicas_per_worker={options.replicas_per_worker} does not apply to a {prefix} cluster, each of whose "
            "engines has a place of its own. Start more workers instead."
        )
    count = len(options.tasks) or options.n or usual()
    hosts = tuple(f"{prefix}-{number}" for number in range(count))
    tasks = dict(zip(options.tasks, hosts, strict=True)) if options.tasks else {}
    return HostOptions(hosts=hosts, per_host=1, interface=interface, tasks=tasks)


@dataclass(frozen=True)
class NamedMachines(OtherMachines):
    """Machines that a launcher reaches by their names.

    Args:
        machines: The names, as a sequence or as text with commas; "gpu1:4" for four engines on gpu1. Or a resolver of
            `distnb.cluster_resolver`, which names the machines of its tasks.
        per_host: The number of engines on each machine. None for one for each accelerator that the resolver reports,
            or one per GPU, or two on the CPU.
        interface: The network interface, or the address, at which this machine listens for the engines. None for the
            interface that leads to the machines.
        arguments: More arguments for the launcher.

    Raises:
        OptionError: A name or a number is invalid.
    """

    machines: str | Sequence[str] | ClusterResolver | None
    per_host: int | None = None
    _: KW_ONLY
    interface: str | None = None
    arguments: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_count("per_host", self.per_host)
        if isinstance(self.arguments, str) or not all(isinstance(word, str) for word in self.arguments):
            raise OptionError(f"arguments={self.arguments!r}: give a list of words, such as ['-p', '2222'].")
        if self._counts() and self.per_host is not None:
            raise OptionError(
                f"per_host={self.per_host} and machines={self.machines!r}: both give numbers of engines. Leave one out."
            )

    def find_hosts(self, options: StartOptions) -> HostOptions:
        """Return the machines for a start."""
        found = replace(self._resolve(), interface=self.interface)
        return with_engines(found, options, self._counts() or self.per_host)

    def _resolve(self) -> HostOptions:
        """Return the machines, without the numbers of engines that the user gives."""
        if isinstance(self.machines, ClusterResolver):
            return machines_of(self.machines)
        return HostOptions(hosts=tuple(self._named()))

    def _counts(self) -> dict[str, int]:
        """Return the numbers of engines that the names contain."""
        return {name: count for name, count in self._named().items() if count is not None}

    def _named(self) -> dict[str, int | None]:
        """Return the number of engines, or None, by the name of each machine; {} if a resolver names the machines."""
        machines = self.machines
        if machines is None or isinstance(machines, ClusterResolver):
            return {}
        names = (
            [part.strip() for part in machines.split(",") if part.strip()] if isinstance(machines, str) else machines
        )
        if not names:
            raise OptionError("machines is empty. Name at least one, or leave out `on` to start engines on this one.")
        named: dict[str, int | None] = {}
        for each in names:
            # For ssh, a name that begins with a dash is an option. For srun and mpiexec, a comma separates two names.
            if not isinstance(each, str) or not _NAME.fullmatch(each):
                raise OptionError(
                    f"{each!r} is not the name of a machine. Give one that the launcher accepts: 'gpu1', for ssh "
                    "'me@gpu1'; or 'gpu1:4' for four engines."
                )
            counted = _COUNTED.fullmatch(each)
            name, count = (counted[1], int(counted[2])) if counted else (each, None)
            if name in named:
                raise OptionError(
                    f"{name!r} is named more than once. Give the number of engines in another way: '{name}:2'."
                )
            check_count(f"the number in {each!r}", count)
            named[name] = count
        return named


def with_engines(found: HostOptions, options: StartOptions, per_host: int | Mapping[str, int] | None) -> HostOptions:
    """Return machines with the engines of a start.

    The tasks of the engines are assigned to the machines in turn: workers from the first machine on, and then servers
    from the first one on.

    Args:
        found: The machines, with the numbers of engines that a resolver reports. Named devices take precedence.
        per_host: The numbers of engines that the user gives.

    Raises:
        OptionError: The numbers contradict each other.
    """
    check_count("n", options.n)
    if options.tasks and found.tasks:
        raise OptionError(
            f"{len(set(options.tasks))} workers and servers were asked for, but the cluster_resolver names them "
            f"already: {', '.join(map(str, found.tasks))}. Leave out one of the two."
        )
    tasks = found.tasks or {task: found.hosts[task.index % len(found.hosts)] for task in options.tasks}
    for name, given in (("per_host", per_host), ("n", options.n)):
        if tasks and given is not None:
            raise OptionError(
                f"{name}={given} for a cluster of {', '.join(map(str, tasks))}: a server is one engine, and "
                f"replicas_per_worker gives the number of engines of a worker. Leave {name} out."
            )
    if options.n is not None:
        per_host = _divided(options.n, found.hosts, per_host)
    elif per_host is None and options.devices is None:
        per_host = found.per_host
    replicas = found.replicas if options.replicas_per_worker is None else options.replicas_per_worker
    return replace(found, tasks=tasks, per_host=per_host, replicas=replicas)


def _divided(n: int, hosts: Sequence[str], per_host: int | Mapping[str, int] | None) -> Mapping[str, int]:
    """Return the number of engines on each machine, if `n` engines are divided over the machines."""
    if per_host is None:
        if n < len(hosts):
            raise OptionError(f"n={n} for {len(hosts)} machines, {', '.join(hosts)}: name as many machines as engines.")
        return {host: n // len(hosts) + (place < n % len(hosts)) for place, host in enumerate(hosts)}
    counts = dict.fromkeys(hosts, per_host) if isinstance(per_host, int) else dict(per_host)
    if len(counts) < len(hosts) or sum(counts.values()) != n:
        raise OptionError(f"n={n}, but the machines have other numbers of engines: {counts}. Leave n out.")
    return counts
