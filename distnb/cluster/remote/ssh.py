"""Other machines by ssh."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from distnb.cluster.remote.base import NODE_AGENT, Transport
from distnb.cluster.remote.heartbeat import LOST_AFTER_S
from distnb.errors import StartError

__all__ = ["SSH"]

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


class SSH(Transport):
    """Machines that ssh reaches without a password.

    Args:
        arguments: More arguments for ssh.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._user_arguments = tuple(arguments)
        self._arguments = _ssh_arguments(arguments)

    def command(self, host: str, task: str) -> list[str]:
        """An ssh that stays; by `exec`, so that no shell of that machine stands between."""
        return ["ssh", *self._arguments, host, f"exec {shlex.join([*NODE_AGENT, task])}"]

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
