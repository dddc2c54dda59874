"""The machines that ssh reaches."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

from distnb import __version__
from distnb.errors import StartError
from distnb.machines.host_plan import HostOptions
from distnb.machines.other_machines import NamedMachines
from distnb.machines.transport import LOST, MACHINE_AGENT, Transport, Way

__all__ = ["SSH", "SSHTransport"]

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


class SSH(NamedMachines):
    """Machines that ssh reaches without a password, the argument `on` of `distnb.start`.

    They need the same Python environment at the same path.

    Args:
        machines: The names, as a sequence or as text with commas; "gpu1:4" for four engines on gpu1. Or a resolver of
            `distnb.cluster_resolver`, which names the machines of its tasks.
        per_host: The number of engines on each machine. None for one for each accelerator that the resolver reports,
            or one per GPU, or two on the CPU.
        interface: The network interface, or the address, at which this machine listens for the engines. None for the
            interface that leads to the machines.
        arguments: More arguments for ssh.

    Raises:
        OptionError: A name or a number is invalid.

    Example:
        >>> import distnb
        >>> on = distnb.SSH(["gpu1:4", "me@gpu2:4"], arguments=["-p", "2222"])
        >>> cluster = distnb.start(on=on)       # doctest: +SKIP
    """

    def way(self, machines: HostOptions) -> Way:
        """Return the transport by ssh."""
        return Way(SSHTransport, (tuple(self.arguments),))


class SSHTransport(Transport):
    """The machines that ssh reaches without a password. `arguments` are further arguments for ssh."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)

    def command(self, host: str) -> list[str]:
        """Return the command of an ssh that stays connected. `exec` replaces the remote shell with the agent."""
        # If an option is given twice, ssh uses the first value. `_OPTIONS` come first, because distnb relies on them.
        ours = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        ssh = ["ssh", *ours, *self._arguments, "-o", "ConnectTimeout=20"]
        return [*ssh, host, f"exec {shlex.join([*MACHINE_AGENT])}"]

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
