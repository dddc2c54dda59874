"""A way to machines outside distnb: machines that are processes of this one. docs/machines.md explains it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distnb.machines.host_plan import HostOptions
from distnb.machines.other_machines import NamedMachines
from distnb.machines.transport import MACHINE_AGENT, Transport, Way

__all__ = ["ProcessMachines"]


class ProcessMachines(NamedMachines):
    """Machines that are processes of this one, the argument `on` of `distnb.start`."""

    def way(self, machines: HostOptions) -> Way:
        """Return the transport."""
        return Way(ProcessTransport, (tuple(self.arguments),))


class ProcessTransport(Transport):
    """The processes."""

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._arguments = tuple(arguments)

    def command(self, host: str) -> list[str]:
        """Return the command that runs the machine agent there."""
        return ["env", *self._arguments, *MACHINE_AGENT]

    def network_name(self, host: str) -> str:
        """Return the address by which this machine reaches a host."""
        return "127.0.0.1"

    def unreached(self, host: str, status: int) -> str:
        """Return the error, with the requirements."""
        return f"env cannot start a process on {host}, which needs the Python environment {sys.prefix}."
