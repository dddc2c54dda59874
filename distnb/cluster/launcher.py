"""Where a cluster's engines run, as far as starting and ending them goes: on this machine, or on others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distnb.cluster.local.processes import Processes
from distnb.topology import Device

__all__ = ["EngineEnded", "EngineOrder", "Launched", "Launcher"]

Launched = Callable[[int, int], None]
"""Called with (engine, pid) when an engine has a process, and again when that is another one."""

EngineEnded = Callable[[int, int, str, bool], None]
"""Called with (engine, pid, how it ended, in words, whether that was our own doing) in the watcher's thread."""


@dataclass(frozen=True)
class EngineOrder:
    """One engine that is to be started.

    Attributes:
        log: The file for what it writes outside programs.
        agent: Module whose `install` makes an engine of the process.
    """

    engine: int
    device: Device
    log: Path
    agent: str


class Launcher(ABC):
    """Starts engines. Each is a process of this machine to the cluster, which leads a process group of its own.

    Attributes:
        has_controller: Whether ipyparallel's controller reaches the engines.
        patience_s: How long an engine that was let go may take.
    """

    has_controller: bool
    patience_s: float

    @abstractmethod
    def launch(
        self, orders: Sequence[EngineOrder], processes: Processes, launched: Launched, ended: EngineEnded
    ) -> None:
        """Start engines, in a thread that stays until they are ready. Raises OSError where that is not possible."""

    def letting_go(self, pids: Sequence[int]) -> Callable[[], None] | None:
        """What asks engines to end; None where a signal does."""
        return None

    def host(self, engine: int) -> str:
        """The name of an engine's machine; "" for this one."""
        return ""
