"""The owner of a cluster's engines, as the notebook sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distnb.cluster.connection import Keys
from distnb.cluster.engine_plan import Placed
from distnb.cluster.local.launcher import PlacedEngine
from distnb.wire.channel import Addresses

__all__ = ["ClusterFacts", "EngineOwner", "EngineProcess", "OnExit", "OnLost", "OnProgress"]

_LOG_LINES = 15

OnExit = Callable[[int, int, str], None]
"""A function called with (engine, pid, status in words) when an engine ends unexpectedly."""

OnLost = Callable[[str, str], None]
"""A function called with (what has become of each engine, the reason with its cure) when the cluster is lost."""

OnProgress = Callable[[str], None]
"""A function called with a line of text at each step of a start."""


@dataclass(frozen=True)
class EngineProcess(PlacedEngine):
    """The process of an engine.

    Attributes:
        pid: The id of its process, which leads a process group; for an engine on another machine, of the local ssh.
        ready: True once the engine's agent serves programs.
        ended: The way in which the process ended, in words; "" while it runs.
    """

    pid: int = 0
    ready: bool = False
    ended: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """The facts about a cluster that a notebook needs to reach its engines.

    Attributes:
        directory: The cluster's private directory on this machine.
        engines: The engines.
        keys: The cluster's keys. The notebook is the channels' server.
        address: The address at which the notebook listens for engines on other machines; None if there are none.
        ports: The ports at which it does, for programs and for control.
        store: The address of the rendezvous store, or None if the engines meet by files.
        notices: The notices for the user before the start.
        packages: The versions of the packages on each other machine.
        folders: The notebook's folders that are sent to them.
        data_limit_nbytes: The size above which data stays on the engines.
        name: The name under which another notebook connects to engines that stay; "" if they end with this one.
    """

    directory: Path
    engines: tuple[PlacedEngine, ...]
    keys: Keys
    address: str | None
    ports: tuple[int, int] | None
    store: tuple[str, int] | None
    notices: tuple[str, ...]
    packages: Mapping[str, Mapping[str, str]]
    folders: tuple[str, ...]
    data_limit_nbytes: int
    name: str = ""

    @property
    def hosts(self) -> dict[int, str]:
        """The machine of each engine that does not run on this one."""
        return {each.engine: each.host for each in self.engines if each.host}


class EngineOwner(ABC):
    """The owner of the engines' processes, of the cluster's directory and keys, and of the store.

    It is a `Cluster` of this process, or of a daemon, which another implementation asks.

    Attributes:
        facts: The facts about the cluster.
        on_exit: Called in a thread of its own when an engine ends unexpectedly.
    """

    facts: ClusterFacts
    on_exit: OnExit

    def __init__(self) -> None:
        self.on_exit = lambda engine, pid, status: None
        self._engines: dict[int, EngineProcess] = {}

    @property
    def engines(self) -> dict[int, EngineProcess]:
        """The latest process of every engine, running or ended, by engine id."""
        return dict(sorted(self._engines.copy().items()))  # another thread may add one meanwhile

    @property
    def missing(self) -> tuple[int, ...]:
        """The ids of the engines whose process has ended."""
        return tuple(process.engine for process in self.engines.values() if process.ended)

    @property
    def directory(self) -> Path:
        """The cluster's private directory with secrets and logs."""
        return self.facts.directory

    def host(self, engine: int) -> str:
        """Return the name of an engine's machine; "" for this one, and for an engine that was removed."""
        process = self._engines.get(engine)
        return "" if process is None else process.host

    @property
    def client_file(self) -> Path:
        """The file for `ipyparallel.Client(path)`, ipyparallel's own client.

        Its first use starts ipyparallel's controller, which the engines then join.

        Raises:
            StartError: The controller did not start.
            ClusterError: Engines run on other machines, where the controller cannot reach them.
        """
        self.start_controller()
        return self.directory / "security" / "ipcontroller-client.json"

    def log_tail(self, engine: int, lines: int = _LOG_LINES) -> str:
        """Return the last lines that an engine wrote outside programs, indented."""
        try:
            text = self._log_path(engine).read_text(errors="replace").rstrip().splitlines()[-lines:]
        except OSError:
            text = []
        return "\n".join(f"    {line}" for line in text) or "    (it is empty)"

    def _log_path(self, engine: int) -> Path:
        return self.directory / "log" / f"engine-{engine}.log"

    @abstractmethod
    def start(
        self,
        addresses: Addresses,
        *,
        on_progress: OnProgress = lambda text: None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the engines and return when all of them are ready. `meanwhile` runs in this thread while they start.

        Args:
            addresses: The addresses at which the notebook listens for them.

        Raises:
            StartError: An engine ended or did not start in time. The message contains the last lines of its log. All
                processes of the cluster have been ended.
        """

    def restart(self, engines: Sequence[int], *, on_progress: OnProgress = lambda text: None) -> None:
        """Replace engines with new processes of the same ids and devices.

        Raises:
            StartError: An engine ended or did not start in time. All of these engines are now `missing`.
        """
        self.order("restart", tuple(engines), on_progress=on_progress)

    def place_further(
        self, there: Sequence[PlacedEngine], count: int, *, on_progress: OnProgress = lambda text: None
    ) -> Placed:
        """Return places for further engines or, with tasks, for the engines of further workers; and notices."""
        placed: Placed = self.order("place_further", list(there), count, on_progress=on_progress)
        return placed

    def add(self, placed: Sequence[PlacedEngine], *, on_progress: OnProgress = lambda text: None) -> None:
        """Start further engines. Until they have `joined`, they end with the notebook.

        Raises:
            StartError: An engine ended or did not start in time. None of these engines exists then.
        """
        self.order("add", list(placed), on_progress=on_progress)

    def joined(self) -> None:
        """Note that further engines have a copy of what the others have. From now on they stay if the notebook ends."""
        self.order("joined")

    def leave(self, engines: Sequence[int]) -> None:
        """Note that engines are about to be removed. From now on they end with the notebook."""
        self.order("leave", tuple(engines))

    def remove(self, engines: Sequence[int]) -> None:
        """End engines, and forget them."""
        self.order("remove", tuple(engines))

    def end_engines(self) -> None:
        """End all engines. `restart` starts others in their places."""
        self.order("end_engines")

    def start_controller(self) -> None:
        """Start ipyparallel's controller, unless it runs, and wait until clients can connect to it."""
        self.order("start_controller")

    def notice_ends(self) -> None:
        """Wait until `missing` includes the engines that have ended already."""
        self.order("notice_ends")

    @abstractmethod
    def order(self, name: str, *arguments: Any, on_progress: OnProgress = lambda text: None) -> Any:
        """Carry out the order that a method of this name gives."""

    @abstractmethod
    def engine_ready(self, engine: int) -> None:
        """Record that the agent of an engine serves programs. Any thread may call this."""

    @abstractmethod
    def stop(self) -> None:
        """End every process of the cluster, and free all its resources. A second call does nothing."""

    def close(self) -> None:
        """Release the engines: those that stay when the notebook ends stay, and all others end."""
        self.stop()

    def when_lost(self, handle: OnLost) -> None:  # noqa: B027  (only another process can take engines away)
        """Call a function, in a thread of its own, when this notebook loses the engines to another one, or to an end.

        It is called with a description of each engine's end, and with a text for the user: the reason and the cure.
        """

    def note_names(self, user_ns: Mapping[str, Any], program: int) -> None:  # noqa: B027  (engines may end with it)
        """Note the names of the notebook's namespace, and the latest program whose end it has seen, for a later one."""
