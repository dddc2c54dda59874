"""Other machines on which a `distnb.Server` runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from distnb.cluster.remote.base import CommandNodeAgentLauncher, NodeAgentLauncher, Transport
from distnb.cluster.remote.secret import read_secret
from distnb.cluster.worker_placement import split_address

__all__ = ["ServerTransport"]


class ServerTransport(Transport):
    """Machines whose servers share a secret with this notebook; hosts are their addresses, host:port.

    Args:
        secret: The secret file.

    Raises:
        StartError: It is none.
    """

    def __init__(self, secret: Path) -> None:
        read_secret(secret)
        self._secret = secret.absolute()

    def launcher(self, host: str, **settings: Any) -> NodeAgentLauncher:
        """A client process of this machine: it gets the secret's path, never the secret."""
        return CommandNodeAgentLauncher(engine_cmd=self._client(host, "serve"), **settings)

    def probing(self, host: str) -> list[str]:
        """By the same client."""
        return self._client(host, "probe")

    def _client(self, host: str, task: str) -> list[str]:
        return [sys.executable, "-P", "-m", "distnb.cluster.remote.server_client", host, str(self._secret), task]

    def network_name(self, host: str) -> str:
        """The address without its port."""
        return split_address(host)[0]

    def unreached(self, host: str) -> str:
        """What has to be so."""
        return f"There is no connection to the server at {host}."
