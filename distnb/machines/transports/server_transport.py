"""The machines that run a `distnb.Server`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from distnb.cluster.devices import check_count
from distnb.cluster.process_environment import PYTHON_MODULE
from distnb.cluster.resolvers import ClusterResolver
from distnb.cluster.start_options import StartOptions
from distnb.cluster.worker_placement import split_address
from distnb.errors import StartError
from distnb.machines.host_plan import HostOptions
from distnb.machines.other_machines import OtherMachines, with_engines
from distnb.machines.resolved_machines import addresses_of, check_resolver
from distnb.machines.secret import read_secret, secret_path
from distnb.machines.server_client import connect_patience_s
from distnb.machines.transport import LOST, Transport, Way

__all__ = ["ServerTransport", "Servers", "patience_s"]

_ANSWER_S = 30.0


@dataclass(frozen=True)
class Servers(OtherMachines):
    """The servers of a cluster's tasks, the argument `on` of `distnb.start`.

    Each task runs a `distnb.Server`, as `distnb worker` does. With ps tasks, each worker and each ps is a server at its
    own address, and this process is the chief: it is the coordinator, and does not listen at an address. The start
    waits for servers that do not listen yet, for 60 seconds or the seconds in the environment variable
    DISTNB_START_TIMEOUT.

    Args:
        cluster_resolver: The resolver of `distnb.cluster_resolver` that has the addresses.
        per_host: The number of engines of each server. None for the number of accelerators that the resolver reports,
            or one per GPU, or two on the CPU. Servers of one machine divide its GPUs.
        secret: The secret file (mode 0600), which the servers have too. None for the file that the environment variable
            DISTNB_SECRET_FILE names. Without that variable, if all servers listen on loopback, the user's own secret
            file is used.
        interface: The network interface, or the address, at which this machine listens for the engines.

    Raises:
        OptionError: An argument is invalid.

    Example:
        >>> import distnb
        >>> workers = distnb.cluster_resolver.SimpleClusterResolver({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]})
        >>> cluster = distnb.start(on=distnb.Servers(workers))        # doctest: +SKIP
    """

    cluster_resolver: ClusterResolver
    per_host: int | None = None
    _: KW_ONLY
    secret: str | os.PathLike[str] | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        check_resolver(self.cluster_resolver)
        check_count("per_host", self.per_host)

    def find_hosts(self, options: StartOptions) -> HostOptions:
        """Return the servers' addresses."""
        return with_engines(
            replace(addresses_of(self.cluster_resolver), interface=self.interface), options, self.per_host
        )

    def way(self, machines: HostOptions) -> Way:
        """Return the transport to the servers."""
        tasks = {address: str(task) for task, address in machines.tasks.items()}
        return Way(ServerTransport, (secret_path(self.secret, machines.hosts), tasks))


def patience_s() -> float:
    """Return the time within which a server, and then a machine agent, must answer."""
    return connect_patience_s() + _ANSWER_S


class ServerTransport(Transport):
    """The machines whose servers share a secret file with this notebook. A host is a server's address, host:port.

    `tasks` contains the name of each address's task.
    """

    def __init__(self, secret: Path, tasks: Mapping[str, str] | None = None) -> None:
        read_secret(secret)
        self._secret = secret.absolute()
        self._tasks = tasks or {}
        self.patience_s = patience_s()

    def command(self, host: str) -> list[str]:
        """Return a client's command. It contains the path of the secret, never the secret."""
        return [*PYTHON_MODULE, "distnb.machines.server_client", host, str(self._secret)]

    def further_hosts(self, count: int) -> tuple[str, ...]:
        """Return (), because further engines run on the machines of the start. Each task is a server of its own."""
        if self._tasks:
            raise StartError(
                "A cluster whose workers and parameter servers are processes of `distnb worker`, each at an address of "
                "its own, cannot gain workers. Add the worker to the cluster_resolver, and start the cluster again; or "
                "start workers by ssh (on=distnb.SSH([…]), workers=…, ps=…), which can gain more."
            )
        return ()

    def network_name(self, host: str) -> str:
        """Return the address without its port."""
        return split_address(host)[0]

    def unreached(self, host: str, status: int) -> str:
        """Return the error, with the address and the task."""
        task = f" of {self._tasks[host]}" if host in self._tasks else ""
        if status != LOST:
            return f"The server{task} at {host} could not run a machine agent."
        return f"There is no connection to the server{task} at {host}."

    def machine(self, host: str) -> str:
        """Return the address without its port, in which the servers of one machine differ."""
        return self.network_name(host)
