"""On which machines, and on what there, engines are to run: read and planned before anything is started."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distnb.cluster.connection import Connection
from distnb.cluster.devices import plan_devices
from distnb.cluster.launcher import Launcher
from distnb.cluster.local.capacity import check_capacity, crowding, this_machine
from distnb.cluster.local.forking import ThisMachine
from distnb.cluster.remote.network import listening_address
from distnb.cluster.remote.resolved import Machines, machines_of, machines_with_servers
from distnb.cluster.remote.secret import secret_path
from distnb.cluster.resolvers import ClusterResolver, SlurmClusterResolver
from distnb.errors import OptionError
from distnb.topology import Device

if TYPE_CHECKING:
    from distnb.cluster.remote.base import Transport

__all__ = ["HostOptions", "HostPlan", "make_plan", "read_host_options"]

_LAUNCHERS = ("local", "ssh", "slurm", "mpi", "server")
_BATCH = ("pbs", "sge", "lsf", "htcondor")
_NAME = re.compile(r"[^\s,-][^\s,]*")


@dataclass(frozen=True)
class HostOptions:
    """Which machines, and how they are reached.

    Attributes:
        hosts: As the launcher names them, each once: for "server" their addresses.
        per_host: How many engines each gets; None as without hosts: one per GPU, else two on the CPU.
        interface: The interface of this machine, or its address, where it listens for them; None for the one that
            leads to them.
        arguments: More arguments for the launcher's command.
        launcher: "ssh", "slurm", "mpi" or "server".
        secret: The secret file, where the machines run servers.
        without_gpus: How many engines each gets that has no GPUs, in place of two.
    """

    hosts: tuple[str, ...]
    per_host: int | Mapping[str, int] | None = None
    interface: str | None = None
    arguments: tuple[str, ...] = ()
    launcher: str = "ssh"
    secret: Path | None = None
    without_gpus: Mapping[str, int] = field(default_factory=dict)

    def transport(self) -> Transport:
        """How the machines are reached."""
        # Imported late: engines on this machine need none of it.
        if self.launcher == "server":
            from distnb.cluster.remote.server_transport import ServerTransport

            assert self.secret is not None
            return ServerTransport(self.secret)
        if self.launcher == "slurm":
            from distnb.cluster.remote.srun import Slurm

            return Slurm(self.arguments)
        if self.launcher == "mpi":
            from distnb.cluster.remote.mpiexec import MPI

            return MPI(self.arguments)
        from distnb.cluster.remote.ssh import SSH

        return SSH(self.arguments)


def read_host_options(
    hosts: str | Sequence[str] | None = None,
    per_host: int | None = None,
    launcher: str | None = None,
    interface: str | None = None,
    ssh_args: Sequence[str] = (),
    cluster_resolver: ClusterResolver | None = None,
    secret: str | os.PathLike[str] | None = None,
    launcher_args: Sequence[str] = (),
    *,
    n: int | None = None,
) -> HostOptions | None:
    """Read what `distnb.start` was given.

    Returns:
        None where the engines are to run on this machine.

    Raises:
        OptionError: It makes no sense.
        StartError: Servers are to be called, and no secret file is named.

    Example:
        >>> read_host_options("a,b", per_host=2).hosts
        ('a', 'b')
    """
    _check_launcher(launcher)
    if not isinstance(cluster_resolver, (ClusterResolver, type(None))):
        raise OptionError(
            f"cluster_resolver={cluster_resolver!r} is none. Give an object of distnb.cluster_resolver, such as "
            "SimpleClusterResolver({'worker': ['a:2222', 'b:2222']})."
        )
    chosen = launcher or _usual_launcher(hosts, cluster_resolver)
    given: dict[str, Any] = {
        "hosts": hosts,
        "per_host": per_host,
        "interface": interface,
        "ssh_args": ssh_args or None,
        "launcher_args": launcher_args or None,
        "cluster_resolver": cluster_resolver,
        "secret": secret,
    }
    if chosen == "local":
        _check_local(launcher, given)
        return None
    if n is not None:
        raise OptionError(f"n={n} counts engines on this machine. On others, per_host says how many each one gets.")
    _check_given(chosen, given)
    if per_host is not None and (isinstance(per_host, bool) or not isinstance(per_host, int) or per_host < 1):
        raise OptionError(f"per_host={per_host!r}: give a whole number of engines for each machine, from 1.")
    arguments = (*_words("ssh_args", ssh_args), *_words("launcher_args", launcher_args))
    machines = _machines(chosen, hosts, cluster_resolver)
    return HostOptions(
        machines.names,
        machines.engines if per_host is None else per_host,
        interface,
        arguments,
        chosen,
        secret_path(secret) if chosen == "server" else None,
        machines.without_gpus,
    )


def _check_launcher(launcher: str | None) -> None:
    if launcher in _BATCH:
        raise OptionError(
            f"launcher={launcher!r}: engines are not submitted as batch jobs. Inside an allocation of your cluster "
            "manager, launcher='mpi' (or 'ssh') with its machines as hosts=[…] starts them there."
        )
    if launcher is not None and launcher not in _LAUNCHERS:
        raise OptionError(f"launcher={launcher!r}: the launchers are {', '.join(map(repr, _LAUNCHERS))}.")


def _usual_launcher(hosts: str | Sequence[str] | None, resolver: ClusterResolver | None) -> str:
    if isinstance(resolver, SlurmClusterResolver):
        return "slurm"
    if resolver is not None:
        return "server"
    return "local" if hosts is None else "ssh"


def _check_local(launcher: str | None, given: Mapping[str, Any]) -> None:
    """What is for other machines is not given for this one."""
    extra = _first_of(given, given)
    if extra is None:
        return
    if launcher == "local":
        raise OptionError(f"launcher='local' starts engines on this machine, and {extra} is for others. Leave one out.")
    raise OptionError(f"{extra} is for engines on other machines: name them too, hosts=['a', 'b'].")


_TAKEN_BY = {
    "ssh": ("hosts", "cluster_resolver", "ssh_args"),
    "mpi": ("hosts", "cluster_resolver", "launcher_args"),
    "slurm": ("hosts", "cluster_resolver", "launcher_args"),
    "server": ("cluster_resolver", "secret"),
}


def _check_given(launcher: str, given: Mapping[str, Any]) -> None:
    """What is given is for this launcher, and says which machines."""
    if given["cluster_resolver"] is not None and given["hosts"] is not None:
        raise OptionError(f"hosts={given['hosts']!r} cannot be given with cluster_resolver, which names the machines.")
    strange = _first_of(given, [name for name in given if name not in (*_TAKEN_BY[launcher], "per_host", "interface")])
    if strange is not None:
        takes = " and ".join(_TAKEN_BY[launcher])
        raise OptionError(f"{strange} is nothing for launcher={launcher!r}, which takes {takes}.")
    if launcher == "server" and given["cluster_resolver"] is None:
        raise OptionError("Engines of servers are started by cluster_resolver=…, which says where the servers are.")
    if launcher in ("ssh", "mpi") and given["cluster_resolver"] is None and given["hosts"] is None:
        raise OptionError(f"launcher={launcher!r} is for engines on other machines: name them too, hosts=['a', 'b'].")


def _first_of(given: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((f"{name}={given[name]!r}" for name in names if given[name] is not None), None)


def _words(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise OptionError(f"{name}={words!r}: give a list of words, such as ['-p', '2222'].")
    return tuple(words)


def _machines(launcher: str, hosts: str | Sequence[str] | None, resolver: ClusterResolver | None) -> Machines:
    if launcher == "server":
        assert resolver is not None
        return machines_with_servers(resolver)
    from distnb.cluster.remote.srun import allotted_nodes, tasks_of_nodes

    nodes = allotted_nodes() if launcher == "slurm" else ()
    machines = Machines(() if hosts is None else _read_names(hosts)) if resolver is None else machines_of(resolver)
    if launcher != "slurm":
        return machines
    strange = [name for name in machines.names if name not in nodes]
    if strange:
        raise OptionError(f"{strange[0]!r} is no node of this Slurm allocation; those are {', '.join(nodes)}.")
    return Machines(machines.names or nodes, machines.engines, machines.without_gpus or tasks_of_nodes())


def _read_names(hosts: str | Sequence[str]) -> tuple[str, ...]:
    names = [part.strip() for part in hosts.split(",") if part.strip()] if isinstance(hosts, str) else list(hosts)
    if not names:
        raise OptionError("hosts is empty. Name at least one machine, or leave it out to start engines on this one.")
    for name in names:
        # A name that began with a dash would be an option to ssh, and one with a comma several to srun and mpiexec.
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionError(
                f"{name!r} is no name of a machine. Give what the launcher understands: 'gpu1', for ssh 'me@gpu1'."
            )
    doubles = [name for name in names if names.count(name) > 1]
    if doubles:
        raise OptionError(f"hosts names {doubles[0]!r} more than once. per_host says how many engines each one gets.")
    return tuple(names)


@dataclass(frozen=True)
class HostPlan:
    """What is to be started.

    Attributes:
        devices: One per engine.
        address: Where the notebook listens for them.
        hosts: The machine of each engine; empty for this one.
        options: What the user said of the machines.
        notices: What the user should know before they start.
    """

    devices: tuple[Device, ...]
    address: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    options: HostOptions | None = None
    notices: tuple[str, ...] = ()

    def launcher(self, connection: Connection) -> Launcher:
        """What starts the engines of a cluster with this connection."""
        if self.options is None:
            return ThisMachine(self.devices)
        from distnb.cluster.remote.base import Hosts

        return Hosts(self.hosts, connection, self.address, self.options.transport())


def make_plan(
    n: int | None,
    devices: str | Sequence[str | Device] | None,
    options: HostOptions | None,
    on_progress: Callable[[str], None],
    *,
    oversubscribe: bool,
) -> HostPlan:
    """Decide how many engines run where. Machines are asked what they have.

    Args:
        n, devices, oversubscribe: As `plan_devices` takes them; with `options` they are each machine's.
        options: The machines; None for this one.
        on_progress: Told, in words, how far it is.

    Raises:
        OptionError: The numbers or names make no sense.
        StartError: A machine cannot be reached, or does not have what was asked for.
    """
    if options is None:
        here, room = plan_devices(n, devices, oversubscribe=oversubscribe), this_machine()
        check_capacity(len(here), room, oversubscribe=oversubscribe)
        return HostPlan(here, notices=tuple(filter(None, [crowding(len(here), room)])))
    from distnb.cluster.remote.base import plan_hosts

    on_progress(f"asking {', '.join(options.hosts)}")
    transport = options.transport()
    address = listening_address(map(transport.network_name, options.hosts), options.interface)
    hosts, planned, notices = plan_hosts(
        options.hosts,
        transport,
        # What a resolver tells of GPUs is not meant where devices are named.
        options.per_host if isinstance(options.per_host, int) or devices is None else None,
        devices,
        oversubscribe=oversubscribe,
        without_gpus=options.without_gpus,
    )
    return HostPlan(planned, address, hosts, options, notices)
