"""The transport by ssh."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

from distnb import __version__
from distnb.errors import StartError
from distnb.machines.base import NODE_AGENT, Transport
from distnb.machines.heartbeat import LOST

__all__ = ["SSH"]

_OPTIONS = {
    "BatchMode": "yes",  # no user can answer a question
    # A connection that is shared with other ssh sessions would end with them.
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "RequestTTY": "no",
}


class SSH(Transport):
    """The machines that ssh reaches without a password. `arguments` are further arguments for ssh."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)

    def command(self, host: str, task: str) -> list[str]:
        """Return the command of an ssh that stays connected. `exec` replaces the remote shell with the node agent."""
        # If an option is given twice, ssh uses the first value. `_OPTIONS` come first, because distnb relies on them.
        ours = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        ssh = ["ssh", *ours, *self._arguments, "-o", "ConnectTimeout=20"]
        return [*ssh, host, f"exec {shlex.join([*NODE_AGENT, task])}"]

    def network_name(self, host: str) -> str:
        """Return the host name from ssh's configuration."""
        command = ["ssh", "-G", *self._arguments, host]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise StartError(f"There is no ssh on this machine ({error}). Install an OpenSSH client.") from error
        found = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        if done.returncode != 0 or not found:
            raise StartError(f"ssh does not accept the host {host!r}: {done.stderr.strip()}")
        return found[0]

    def unreached(self, host: str, status: int) -> str:
        """Return the error, with the requirements of ssh."""
        if status != LOST:
            return (
                f"{host} has no distnb {__version__} at {sys.executable}. Engines need the same Python environment at "
                "the same path on every machine, from a shared file system or the same image."
            )
        return f"ssh cannot reach {host}. It must work without a password (with a key or an agent)."
