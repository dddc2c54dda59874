"""The transport to machines that run a `distnb.Server`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distnb.cluster.process_environment import PYTHON_MODULE
from distnb.cluster.worker_placement import split_address
from distnb.machines.base import Transport
from distnb.machines.heartbeat import LOST
from distnb.machines.secret import read_secret
from distnb.machines.server_client import connect_patience_s

__all__ = ["ServerTransport"]

_ANSWER_S = 30.0


class ServerTransport(Transport):
    """The machines whose servers share a secret file with this notebook. A host is a server's address, host:port.

    `tasks` contains the name of each address's task.
    """

    def __init__(self, secret: Path, tasks: Mapping[str, str] | None = None) -> None:
        read_secret(secret)
        self._secret = secret.absolute()
        self._tasks = tasks or {}
        self.patience_s = connect_patience_s() + _ANSWER_S

    def command(self, host: str, task: str) -> list[str]:
        """Return a client's command. It contains the path of the secret, never the secret."""
        return [*PYTHON_MODULE, "distnb.machines.server_client", host, str(self._secret), task]

    def network_name(self, host: str) -> str:
        """Return the address without its port."""
        return split_address(host)[0]

    def unreached(self, host: str, status: int) -> str:
        """Return the error, with the address and the task."""
        task = f" of {self._tasks[host]}" if host in self._tasks else ""
        if status != LOST:
            return f"The server{task} at {host} could not run a node agent."
        return f"There is no connection to the server{task} at {host}."

    def machine(self, host: str) -> str:
        """Return the address without its port, in which the servers of one machine differ."""
        return self.network_name(host)
