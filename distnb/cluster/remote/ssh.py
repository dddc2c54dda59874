"""Other machines by ssh, through ipyparallel's launcher."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from ipyparallel.cluster.launcher import SSHEngineLauncher

from distnb.cluster.remote.base import NODE_AGENT, NodeAgentLauncher, Transport
from distnb.cluster.remote.heartbeat import LOST_AFTER_S
from distnb.errors import StartError

__all__ = ["SSH", "SSHNodeAgentLauncher"]

_ALIVE_S = 2
_OPTIONS = {
    "BatchMode": "yes",  # nobody could answer a question
    "ServerAliveInterval": str(_ALIVE_S),
    "ServerAliveCountMax": str(int(LOST_AFTER_S / _ALIVE_S) - 1),
    # A connection that is shared with others would end with theirs, and be probed as they are.
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "RequestTTY": "no",
}


def _ssh_arguments(user_arguments: Sequence[str]) -> list[str]:
    """For ssh the first of several values counts: ours, since the promises rest on them."""
    ours = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
    return [*ours, *user_arguments, "-o", "ConnectTimeout=20"]


class SSHNodeAgentLauncher(NodeAgentLauncher, SSHEngineLauncher):  # type: ignore[misc]
    """Starts the node agent of one engine on another machine, and stays connected with it."""

    def find_args(self) -> list[str]:
        """The command line: no word of it is secret."""
        return [*self.ssh_cmd, *self.ssh_args, self.location, _remote(self.program)]


def _remote(words: Sequence[str]) -> str:
    # By `exec`, so that no shell of that machine stands between.
    return "exec " + shlex.join(words)


class SSH(Transport):
    """Machines that ssh reaches without a password.

    Args:
        arguments: More arguments for ssh.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._user_arguments = tuple(arguments)
        self._arguments = _ssh_arguments(arguments)

    def launcher(self, host: str, **settings: Any) -> NodeAgentLauncher:
        """ipyparallel's, with a node agent's end."""
        return SSHNodeAgentLauncher(
            engine_cmd=[*NODE_AGENT, "serve"], hostname=host, ssh_args=self._arguments, **settings
        )

    def probing(self, host: str) -> list[str]:
        """By the same ssh."""
        return ["ssh", *self._arguments, host, _remote([*NODE_AGENT, "probe"])]

    def network_name(self, host: str) -> str:
        """What ssh's configuration makes of the name.

        Raises:
            StartError: ssh does not understand its arguments, or is not there.
        """
        command = ["ssh", "-G", *self._user_arguments, host]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise StartError(f"There is no ssh on this machine ({error}). Install an OpenSSH client.") from error
        found = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        if done.returncode != 0 or not found:
            raise StartError(f"ssh cannot make anything of {host!r}: {done.stderr.strip()}")
        return found[0]

    def unreached(self, host: str) -> str:
        """What has to be so."""
        return f"ssh does not reach {host}. It has to work without a password (a key, or an agent)."
