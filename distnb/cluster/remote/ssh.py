"""Other machines by ssh."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

from distnb import __version__
from distnb.cluster.remote.base import NODE_AGENT, Transport
from distnb.cluster.remote.heartbeat import LOST
from distnb.errors import StartError

__all__ = ["SSH"]

_OPTIONS = {
    "BatchMode": "yes",  # nobody could answer a question
    # A connection that is shared with others would end with theirs.
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "RequestTTY": "no",
}


class SSH(Transport):
    """Machines that ssh reaches without a password; `arguments` are more for it."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)

    def command(self, host: str, task: str) -> list[str]:
        """An ssh that stays; by `exec`, so that no shell of that machine stands between."""
        # Of several values ssh takes the first: ours, since the promises rest on them.
        ours = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        ssh = ["ssh", *ours, *self._arguments, "-o", "ConnectTimeout=20"]
        return [*ssh, host, f"exec {shlex.join([*NODE_AGENT, task])}"]

    def network_name(self, host: str) -> str:
        """What ssh's configuration makes of the name."""
        command = ["ssh", "-G", *self._arguments, host]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise StartError(f"There is no ssh on this machine ({error}). Install an OpenSSH client.") from error
        found = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        if done.returncode != 0 or not found:
            raise StartError(f"ssh cannot make anything of {host!r}: {done.stderr.strip()}")
        return found[0]

    def unreached(self, host: str, status: int) -> str:
        """What has to be so."""
        if status != LOST:
            return (
                f"{host} has no distnb {__version__} at {sys.executable}: engines need the same Python environment at "
                "the same path on every machine, from a shared file system or the same image."
            )
        return f"ssh does not reach {host}. It has to work without a password (a key, or an agent)."
