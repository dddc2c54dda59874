"""The engines of a cluster, from their start to their end."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distnb.cluster.connection import Connection, connection_path
from distnb.cluster.local.forking import ThisMachine
from distnb.cluster.local.launcher import EngineOrder, Launcher
from distnb.cluster.local.open_files import raise_file_limit
from distnb.cluster.local.processes import Processes
from distnb.errors import NoClusterError, StartError
from distnb.topology import Device

__all__ = ["Cluster", "EngineProcess", "RunningCluster"]

_logger = logging.getLogger("distnb.cluster")

_START_TIMEOUT_S = 180.0
_LOG_LINES = 15

OnExit = Callable[[int, int, str], None]
OnProgress = Callable[[str], None]
"""A function called with a line of text at each step of the start."""


@dataclass(frozen=True)
class EngineProcess:
    """The process of an engine.

    Attributes:
        pid: The id of its process, which leads a process group; for an engine on another machine, of the local ssh.
        device: The device on which the engine computes.
        ready: True once the engine's agent serves programs.
        ended: The way in which the process ended, in words; "" while it runs.
    """

    engine: int
    pid: int
    device: Device
    ready: bool = False
    ended: str = ""


class RunningCluster(ABC):
    """The processes of a cluster, whichever process owns them."""

    @property
    @abstractmethod
    def engines(self) -> dict[int, EngineProcess]:
        """The latest process of every engine, running or ended, by engine id."""

    @property
    @abstractmethod
    def directory(self) -> Path:
        """The cluster's private directory with secrets and logs. Raises NoClusterError if it is not running."""

    @abstractmethod
    def host(self, engine: int) -> str:
        """Return the name of an engine's machine, or "" for this one."""

    @abstractmethod
    def restart(self, engines: Sequence[int], *, on_progress: OnProgress = lambda text: None) -> None:
        """Replace engines with new processes of the same ids and devices.

        Raises:
            StartError: An engine ended or did not start in time. All of these engines are now `missing`.
        """

    @abstractmethod
    def add(
        self, devices: Mapping[int, Device], hosts: Mapping[int, str], *, on_progress: OnProgress = lambda text: None
    ) -> None:
        """Start further engines.

        Args:
            devices: Their devices, by their new ids.
            hosts: The names of their machines. Engines without an entry run on this machine.
            on_progress: Called with a text whenever the start makes progress.

        Raises:
            StartError: An engine ended or did not start in time. None of these engines exists then.
        """

    @abstractmethod
    def remove(self, engines: Sequence[int]) -> None:
        """End engines, and forget them."""

    @abstractmethod
    def notice_ends(self) -> None:
        """Wait until `missing` includes the engines that have ended already."""

    @abstractmethod
    def engine_ready(self, engine: int) -> None:
        """Record that the agent of an engine serves programs. Any thread may call this."""

    @abstractmethod
    def stop(self) -> None:
        """End every process of the cluster and remove its files. Do nothing if it is not running."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The ids of the engines whose process has ended."""
        return tuple(process.engine for process in self.engines.values() if process.ended)

    @property
    def client_file(self) -> Path:
        """The file for `ipyparallel.Client(path)`, ipyparallel's own client. It is created soon after the start."""
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


class Cluster(RunningCluster):
    """The engines that this process owns, with a watcher thread that handles the end of an engine at once.

    Start a cluster only once. All methods run in the notebook process, and any thread may call them.

    Args:
        devices: One device per engine, from `plan_devices`.
        connection: The information that engines need to reach this process. It is written to a secret file.
        on_exit: Called with (engine, pid, status in words) in the watcher's thread when an engine ends unexpectedly.
        agent: The module whose `install(shell, connection, engine, device)` makes an engine of a process.
        launcher: The launcher of the engines; None for engines on this machine.
        processes: The supervisor of the processes, with their private directory. The cluster closes it. None creates a
            new one.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        connection: Connection,
        *,
        on_exit: OnExit = lambda engine, pid, status: None,
        agent: str = "distnb.engine.agent",
        launcher: Launcher | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._devices = dict(enumerate(devices))
        self._connection = connection
        self._on_exit = on_exit
        self._agent = agent
        self.launcher = launcher or ThisMachine(devices)
        self._lock = threading.RLock()  # one start, stop or restart at a time
        self._engines: dict[int, EngineProcess] = {}
        self._prepared = processes
        self._processes: Processes | None = None  # while it runs
        self._stopping = False
        self._owner = os.getpid()

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> dict[int, EngineProcess]:
        """The latest process of every engine, running or ended, by engine id."""
        return dict(sorted(self._engines.copy().items()))  # the watcher's thread may add one meanwhile

    def notice_ends(self) -> None:
        """Wait until `missing` includes the engines that have ended already."""
        if self._processes is not None:
            running = [process for process in self._engines.values() if not process.ended]
            self.launcher.notice_ends({process.engine: process.pid for process in running}, self._processes)

    @property
    def directory(self) -> Path:
        """The cluster's private directory with secrets and logs. Raises NoClusterError if it is not running."""
        if self._processes is None:
            raise NoClusterError("This cluster is not running, so it has no files. Start one with %distnb start.")
        return self._processes.directory

    def host(self, engine: int) -> str:
        """Return the name of an engine's machine, or "" for this one."""
        return self.launcher.host(engine)

    # -- start ------------------------------------------------------------------------------------------------------

    def start(
        self,
        *,
        on_progress: OnProgress = lambda text: None,
        meanwhile: Callable[[], object] = lambda: None,
        timeout_s: float = _START_TIMEOUT_S,
    ) -> None:
        """Start the engines and return when all of them are ready. `meanwhile` runs in this thread while they start.

        Raises:
            StartError: An engine ended or did not start in time. The message contains the last lines of its log. All
                processes of the cluster have been ended.
        """
        with self._lock:
            atexit.register(self.stop)
            try:
                self._processes = self._prepared or Processes()
                (self.directory / "log").mkdir(exist_ok=True)  # the notebook may log already
                engines = tuple(self._devices)
                on_progress(self._starting(engines))
                self._connection.write(self.directory)
                self._launch(self._processes, engines)
                meanwhile()
                self._wait_until_ready(self._processes, engines, on_progress, timeout_s)
                if self.launcher.has_controller:  # last, because its imports would slow down the engines
                    from distnb.cluster.local.controller import start_controller

                    start_controller(self._processes)
            except BaseException:
                self.stop()
                raise

    def restart(self, engines: Sequence[int], *, on_progress: OnProgress = lambda text: None) -> None:
        """Replace engines with new processes of the same ids and devices.

        Raises:
            StartError: An engine ended or did not start in time. All of these engines are now `missing`.
        """
        with self._lock:
            processes = self._running()
            self._end(processes, engines)
            try:
                self._start_again(processes, engines, on_progress)
            except BaseException:
                self._end(processes, engines)
                raise

    def add(
        self, devices: Mapping[int, Device], hosts: Mapping[int, str], *, on_progress: OnProgress = lambda text: None
    ) -> None:
        """Start further engines.

        Args:
            devices: Their devices, by their new ids.
            hosts: The names of their machines. Engines without an entry run on this machine.
            on_progress: Called with a text whenever the start makes progress.

        Raises:
            StartError: An engine ended or did not start in time. None of these engines exists then.
        """
        with self._lock:
            processes = self._running()
            for engine, device in devices.items():
                self._devices[engine] = device
                self.launcher.add(engine, device, hosts.get(engine, ""))
            try:
                on_progress(self._starting(devices))
                self._start_again(processes, tuple(devices), on_progress)
            except BaseException:
                self.remove(tuple(devices))
                raise

    def remove(self, engines: Sequence[int]) -> None:
        """End engines, and forget them."""
        with self._lock:
            try:
                self._end(self._running(), engines)
            finally:
                for engine in engines:
                    self._engines.pop(engine, None)
                    del self._devices[engine]
                    self.launcher.remove(engine)

    def give_up(self, engines: Sequence[int]) -> None:
        """End further engines, and forget them, also while another thread adds them."""
        self._end(self._running(), engines)  # `add`, which holds the lock, fails then
        with self._lock:
            self.remove([engine for engine in engines if engine in self._devices])

    def _running(self) -> Processes:
        if self._processes is None:
            raise NoClusterError("There is no running cluster whose engines could be changed. Start one first.")
        return self._processes

    def _starting(self, engines: Collection[int]) -> str:
        return f"starting {_engines(len(engines))} on {', '.join(str(self._devices[engine]) for engine in engines)}"

    def _start_again(self, processes: Processes, engines: Sequence[int], on_progress: OnProgress) -> None:
        self.launcher.prepare(engines, on_progress)
        self._launch(processes, engines)
        self._wait_until_ready(processes, engines, on_progress, _START_TIMEOUT_S)

    def _launch(self, processes: Processes, engines: Sequence[int]) -> None:
        raise_file_limit(len({*self._engines, *engines}))
        orders = [
            EngineOrder(engine=engine, device=self._devices[engine], log=self._log_path(engine), agent=self._agent)
            for engine in engines
        ]
        with processes.changed:
            try:
                self.launcher.launch(orders, processes, self._engine_launched, self._engine_ended)
            except OSError as error:
                which = f"engine{'s' if len(orders) > 1 else ''} {', '.join(map(str, engines))}"
                raise StartError(
                    f"The process of {which} could not be started: {error}. Free memory or processes, and try again."
                ) from error

    def _wait_until_ready(
        self, processes: Processes, engines: Sequence[int], on_progress: OnProgress, timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        ready = -1

        def has_progressed() -> bool:
            now = [self._engines[engine] for engine in engines]
            ended = self._stopping or any(process.ended for process in now)
            return ended or sum(process.ready for process in now) != ready

        while ready < len(engines):
            with processes.changed:
                progressed = processes.changed.wait_for(has_progressed, deadline - time.monotonic())
                now = [self._engines[engine] for engine in engines]
            if self._stopping:
                raise StartError("The cluster was stopped while its engines started.")
            failed = next((process for process in now if process.ended or not (progressed or process.ready)), None)
            if failed is not None:
                what = f"did not come up within {timeout_s:.0f} s, and was ended."
                if failed.ended:
                    what = f"({failed.device}) {failed.ended} while it started."
                raise StartError(
                    f"Engine {failed.engine} {what} The last lines of its log:\n{self.log_tail(failed.engine)}"
                )
            ready = sum(process.ready for process in now)
            on_progress(f"{ready} of {_engines(len(engines))} ready")

    # -- events from the launcher and the agents -------------------------------------------------------------------

    def _engine_launched(self, engine: int, pid: int) -> None:
        _logger.info("engine %d (%s) is process %d", engine, self._devices[engine], pid)
        self._engines[engine] = EngineProcess(engine=engine, pid=pid, device=self._devices[engine])

    def engine_ready(self, engine: int) -> None:
        """Record that the agent of an engine serves programs. Any thread may call this."""
        processes = self._processes
        _logger.info("engine %d is ready", engine)
        if processes is not None and engine in self._engines:
            with processes.changed:
                self._engines[engine] = replace(self._engines[engine], ready=True)
                processes.changed.notify_all()

    def _engine_ended(self, engine: int, pid: int, words: str, expected: bool) -> None:
        processes = self._processes
        if processes is None:
            return
        with processes.changed:
            process = self._engines.get(engine)
            if process is None or process.pid != pid:
                return
            _logger.info("engine %d %s", engine, words)
            self._engines[engine] = replace(process, ended=words)
            processes.changed.notify_all()
        if not expected:
            self._on_exit(engine, pid, words)

    # -- end --------------------------------------------------------------------------------------------------------

    def _end(self, processes: Processes, engines: Iterable[int]) -> None:
        with processes.changed:  # no engine gets a new process meanwhile
            pids = {engine: self._engines[engine].pid for engine in engines if engine in self._engines}
            self.launcher.expect_end(pids, processes)
        self.launcher.end(pids, processes)

    def stop(self) -> None:
        """End every process of the cluster and remove its files. Do nothing if it is not running."""
        if os.getpid() != self._owner:
            return  # a forked child: these are not its processes
        self._stopping = True  # a start that is under way in another thread, and holds the lock, fails
        if (running := self._processes) is not None:
            with running.changed:
                running.changed.notify_all()
        with self._lock:
            processes = self._processes
            atexit.unregister(self.stop)
            if processes is None:
                return
            try:
                connection_path(processes.directory).unlink(missing_ok=True)
                self._end(processes, [*self._engines])
                self.launcher.close()
            finally:
                self._processes = None
                processes.close()


def _engines(n: int) -> str:
    return f"{n} engine" if n == 1 else f"{n} engines"
