"""On which machines, and on what there, engines are to run: read and planned before anything is started."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distnb.cluster.connection import Connection
from distnb.cluster.devices import plan_devices
from distnb.cluster.ground import Ground, ThisMachine
from distnb.cluster.network import listening_address
from distnb.cluster.placement import split_address
from distnb.cluster.resolvers.base import ClusterResolver
from distnb.cluster.secret import secret_path
from distnb.errors import OptionError
from distnb.topology import Device

if TYPE_CHECKING:
    from distnb.cluster.remote import Way

__all__ = ["HostOptions", "Plan", "make_plan", "read_host_options"]

_LAUNCHERS = ("local", "ssh", "server")
_NOT_YET = ("slurm", "mpi", "pbs", "sge", "lsf", "htcondor")
_NAME = re.compile(r"[^\s-]\S*")


@dataclass(frozen=True)
class HostOptions:
    """Which machines, and how they are reached.

    Attributes:
        hosts: As ssh names them, each once.
        per_host: How many engines each gets; None as without hosts: one per GPU, else two on the CPU.
        interface: The interface of this machine, or its address, where it listens for them; None for the one that
            leads to them.
        ssh_args: More arguments for ssh.
        secret: The secret file, where the machines run servers; hosts are their addresses then. None for ssh.
    """

    hosts: tuple[str, ...]
    per_host: int | None = None
    interface: str | None = None
    ssh_args: tuple[str, ...] = ()
    secret: Path | None = None

    def way(self) -> Way:
        """How the machines are reached."""
        # Imported late: engines on this machine need none of it.
        if self.secret is not None:
            from distnb.cluster.served import Served

            return Served(self.secret)
        from distnb.cluster.ssh import SSH

        return SSH(self.ssh_args)


def read_host_options(
    hosts: str | Sequence[str] | None = None,
    per_host: int | None = None,
    launcher: str | None = None,
    interface: str | None = None,
    ssh_args: Sequence[str] = (),
    cluster_resolver: ClusterResolver | None = None,
    secret: str | os.PathLike[str] | None = None,
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
    if cluster_resolver is not None:
        given: dict[str, Any] = {"n": n, "hosts": hosts, "ssh_args": ssh_args or None}
        extra = next((name for name, value in given.items() if value is not None), None)
        if extra is not None or launcher not in (None, "server"):
            what = f"{extra}={given[extra]!r}" if extra else f"launcher={launcher!r}"
            raise OptionError(f"{what} cannot be given with cluster_resolver, which names the machines with servers.")
        servers = _servers(cluster_resolver)
        return HostOptions(servers, per_host, interface, secret=secret_path(secret))
    if launcher == "server" or secret is not None:
        raise OptionError("Engines of servers are started by cluster_resolver=…, which says where the servers are.")
    if hosts is None:
        given = {"per_host": per_host, "interface": interface, "ssh_args": ssh_args or None}
        extra = next((name for name, value in given.items() if value is not None), None)
        if extra is not None or launcher == "ssh":
            what = f"{extra}={given[extra]!r}" if extra else "launcher='ssh'"
            raise OptionError(f"{what} is for engines on other machines: name them too, hosts=['a', 'b'].")
        return None
    if launcher == "local":
        raise OptionError("launcher='local' starts engines on this machine, and hosts names others. Leave one out.")
    if n is not None:
        raise OptionError(f"n={n} counts engines on this machine. With hosts, per_host says how many each one gets.")
    if isinstance(ssh_args, str) or not all(isinstance(word, str) for word in ssh_args):
        raise OptionError(f"ssh_args={ssh_args!r}: give a list of words, such as ['-p', '2222'].")
    return HostOptions(_read_names(hosts), per_host, interface, tuple(ssh_args))


def _servers(resolver: ClusterResolver) -> tuple[str, ...]:
    """The addresses of a cluster's chief and workers, without this process's own."""
    spec = resolver.cluster_spec()
    found = [
        spec.task_address(job, index)
        for job in ("chief", "worker")
        if job in spec.jobs
        for index in spec.task_indices(job)
        if (job, index) != (resolver.task_type, resolver.task_id)
    ]
    if not found:
        raise OptionError(f"The cluster {spec.as_dict()} has no worker beside this process, so there is no server.")
    for address in found:
        split_address(address)
    return tuple(found)


def _check_launcher(launcher: str | None) -> None:
    if launcher in _NOT_YET:
        raise OptionError(
            f"launcher={launcher!r} is not there yet. Engines start on this machine, or by ssh: inside an allocation "
            "of your cluster manager, give its machines as hosts=[…]."
        )
    if launcher is not None and launcher not in _LAUNCHERS:
        raise OptionError(f"launcher={launcher!r}: the launchers are {', '.join(map(repr, _LAUNCHERS))}.")


def _read_names(hosts: str | Sequence[str]) -> tuple[str, ...]:
    names = [part.strip() for part in hosts.split(",") if part.strip()] if isinstance(hosts, str) else list(hosts)
    if not names:
        raise OptionError("hosts is empty. Name at least one machine, or leave it out to start engines on this one.")
    for name in names:
        # A name that began with a dash would be an option to ssh.
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionError(f"{name!r} is no name of a machine. Give what ssh understands: 'gpu1', 'me@10.0.0.2'.")
    doubles = [name for name in names if names.count(name) > 1]
    if doubles:
        raise OptionError(f"hosts names {doubles[0]!r} more than once. per_host says how many engines each one gets.")
    return tuple(names)


@dataclass(frozen=True)
class Plan:
    """What is to be started.

    Attributes:
        devices: One per engine.
        address: Where the notebook listens for them.
        hosts: The machine of each engine; empty for this one.
        options: What the user said of the machines.
    """

    devices: tuple[Device, ...]
    address: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    options: HostOptions | None = None

    def ground(self, connection: Connection) -> Ground:
        """Where the engines of a cluster with this connection are started."""
        if self.options is None:
            return ThisMachine(self.devices)
        from distnb.cluster.remote import Hosts

        return Hosts(self.hosts, connection, self.address, self.options.way())


def make_plan(
    n: int | None,
    devices: str | Sequence[str | Device] | None,
    options: HostOptions | None,
    on_progress: Callable[[str], None],
    *,
    oversubscribe: bool,
) -> Plan:
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
        return Plan(plan_devices(n, devices, oversubscribe=oversubscribe))
    from distnb.cluster.remote import plan_hosts

    on_progress(f"asking {', '.join(options.hosts)}")
    way = options.way()
    address = listening_address(map(way.network_name, options.hosts), options.interface)
    hosts, planned = plan_hosts(options.hosts, way, options.per_host, devices, oversubscribe=oversubscribe)
    return Plan(planned, address, hosts, options)
