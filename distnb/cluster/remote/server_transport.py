"""Other machines on which a `distnb.Server` runs."""

from __future__ import annotations

from pathlib import Path

from distnb.cluster.process_environment import PYTHON_MODULE
from distnb.cluster.remote.base import Transport
from distnb.cluster.remote.secret import read_secret
from distnb.cluster.worker_placement import split_address

__all__ = ["ServerTransport"]


class ServerTransport(Transport):
    """Machines whose servers share a secret file with this notebook; hosts are their addresses, host:port."""

    def __init__(self, secret: Path) -> None:
        read_secret(secret)
        self._secret = secret.absolute()

    def command(self, host: str, task: str) -> list[str]:
        """A client, which gets the secret's path, never the secret."""
        return [*PYTHON_MODULE, "distnb.cluster.remote.server_client", host, str(self._secret), task]

    def network_name(self, host: str) -> str:
        """The address without its port."""
        return split_address(host)[0]

    def unreached(self, host: str, status: int) -> str:
        """What has to be so."""
        return f"There is no connection to the server at {host}."
