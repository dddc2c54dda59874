"""The interface to ways to other machines, and what a machine reports before the start."""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distnb import __version__
from distnb.cluster.local.capacity import Capacity
from distnb.cluster.process_environment import PYTHON_MODULE
from distnb.errors import StartError

__all__ = ["LOST", "MACHINE_AGENT", "Found", "Transport", "Way", "check_versions"]

MACHINE_AGENT = (*PYTHON_MODULE, "distnb.machines.agents.machine_agent")
"""The machine agent's command, the same on every machine."""

LOST = 255
"""The exit status of a command whose machine was not reached or was lost. It is ssh's own status for that."""


class Transport(ABC):
    """A way to start machine agents on other machines and to communicate with them.

    Attributes:
        directory: The cluster's private directory, for files that the transport needs.
    """

    directory: Path

    def prepare(  # noqa: B027  (most transports need no preparation)
        self, hosts: Sequence[str], on_progress: Callable[[str], None]
    ) -> None:
        """Prepare for commands on these machines, before each start of engines there. May take long.

        Raises:
            StartError: A machine is not available.
        """

    def further_hosts(self, count: int) -> tuple[str, ...]:
        """Return the names of new hosts, one for each of several further engines.

        Return () if these engines run on the machines of the start.

        Raises:
            StartError: The cluster cannot have more engines.
        """
        return ()

    def release(self, host: str) -> None:  # noqa: B027  (most transports reserve nothing for an engine)
        """Release what was reserved on a host for its only engine, which has been removed."""

    def close(self) -> None:  # noqa: B027  (most transports have no resources)
        """Release the resources of the transport, after the engines have ended."""

    @abstractmethod
    def command(self, host: str) -> list[str]:
        """Return the command that runs the machine agent on a machine.

        The agent's standard streams are those of the command. No argument is secret.
        """

    def environment(self) -> Mapping[str, str]:
        """Return the environment of one command."""
        return os.environ

    patience_s = 90.0
    """The time within which a machine must answer."""

    def machine(self, host: str) -> str:
        """Return the name of a host's machine. Several hosts may be on the same machine."""
        return host

    @abstractmethod
    def network_name(self, host: str) -> str:
        """Return the name or address of a machine on the network."""

    def cause(self, output: str) -> str:
        """Return the cause of a lost machine from the last errors of its command; "" if they have none."""
        return ""

    @abstractmethod
    def unreached(self, host: str, status: int) -> str:
        """Return the error for a machine where no machine agent answered. `status` is the command's exit status."""


class Way(NamedTuple):
    """A transport to open: its class, and the arguments. Pickle can copy it to a detached cluster's daemon."""

    kind: Callable[..., Transport]
    arguments: tuple[Any, ...] = ()

    def open(self) -> Transport:
        """Return a new transport."""
        return self.kind(*self.arguments)


class Found(NamedTuple):
    """The resources and packages of a machine.

    Attributes:
        gpus: The number of its GPUs.
        capacity: The cores and the memory.
        packages: The versions of its installed packages (see `installed_packages`).
    """

    gpus: int
    capacity: Capacity
    packages: Mapping[str, str]

    @classmethod
    def of(cls, host: str, facts: Mapping[str, Any]) -> Found:
        """Return what a machine's agent has reported. Raises StartError if it has other versions than this one."""
        check_versions(host, facts)
        return cls(gpus=int(facts["gpus"]), capacity=Capacity(**facts["capacity"]), packages=facts["packages"])


def check_versions(host: str, found: Mapping[str, Any]) -> None:
    """Raise StartError if a machine has another version of distnb or Python than this one."""
    theirs, ours = str(found["python"]).rpartition(".")[0], platform.python_version().rpartition(".")[0]
    if found["distnb"] != __version__ or theirs != ours:
        raise StartError(
            f"{host} has distnb {found['distnb']} on Python {found['python']}, but this is distnb {__version__} on "
            f"Python {platform.python_version()}. Functions are sent between them: install the same versions."
        )
