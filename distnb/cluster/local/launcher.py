"""Launchers, which start and end a cluster's engines on this machine or on others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distnb.cluster.local.processes import Processes
from distnb.topology import Device, Task

__all__ = ["LOST_AFTER_S", "EngineEnded", "EngineOrder", "Launched", "Launcher", "PlacedEngine"]

LOST_AFTER_S = 8.0
"""The silence in seconds after which the machine of engines counts as lost."""

Launched = Callable[[int, int], None]
"""A function called with (engine, pid) when an engine gets a process, and again when it gets another one."""

EngineEnded = Callable[[int, int, str, bool], None]
"""A function called with (engine, pid, status in words, whether the end was requested) in the watcher's thread."""


@dataclass(frozen=True)
class PlacedEngine:
    """An engine with its place.

    Attributes:
        host: The name of its machine, or "" for this one.
        task: Its task in a cluster with parameter servers, or None.
    """

    engine: int
    device: Device
    host: str = ""
    task: Task | None = None

    @property
    def computes(self) -> bool:
        """True if the engine may be a replica."""
        return self.task is None or self.task.computes


@dataclass(frozen=True)
class EngineOrder:
    """An engine to start.

    Attributes:
        log: The file for the engine's output outside programs.
        agent: The module whose `install` makes an engine of the process.
    """

    engine: int
    device: Device
    log: Path
    agent: str


class Launcher(ABC):
    """A way to start and to end engines.

    The pid of an engine on another machine is that of the process here by which the machine is reached, such as ssh.
    The methods about ends are those for processes of this machine.

    Args:
        engines: The engines that the first launch may start.

    Attributes:
        places: The engines that a launch may start, or has started.
        has_controller: True if ipyparallel's controller can reach the engines.
        patience_s: The time that a released engine may take to end.
    """

    has_controller: bool
    patience_s: float

    def __init__(self, engines: Iterable[PlacedEngine] = ()) -> None:
        self.places = {each.engine: each for each in engines}

    def prepare(  # noqa: B027  (most launchers need no preparation)
        self, engines: Sequence[int], on_progress: Callable[[str], None]
    ) -> None:
        """Prepare for a launch of these engines. Unlike `launch`, this may wait for long.

        Raises:
            StartError: A machine is not available.
        """

    @abstractmethod
    def launch(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        """Start engines.

        Raises:
            OSError: A process cannot be started.
        """

    def remove(self, engine: int) -> None:
        """Remove an engine whose process has ended."""
        del self.places[engine]

    def expect_end(self, pids: Mapping[int, int], processes: Processes) -> None:
        """Mark the ends of engines, from now on, as requested. `pids` are their processes, by engine."""
        processes.expect(pids.values())

    def end(self, pids: Mapping[int, int], processes: Processes) -> None:
        """End engines, and wait for that.

        Raises:
            ClusterError: An engine did not end.
        """
        processes.end([*set(pids.values())], patience_s=self.patience_s)

    def notice_ends(self, pids: Mapping[int, int], processes: Processes) -> None:
        """Wait until the ends of those among these engines that have ended already are reported."""
        processes.notice(pids.values())
