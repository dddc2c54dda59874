"""The engines of one machine, from their start to their end."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from distnb.cluster.connection import Connection, make_run_directory, remove_run_directory
from distnb.cluster.devices import plan_devices
from distnb.cluster.orphans import end_group, end_process, forget_group, record_group
from distnb.cluster.surroundings import AGENT_VARIABLE, REPLACES_VARIABLE, engine_environment
from distnb.cluster.watcher import Watcher, describe_status
from distnb.errors import ClusterError, NoClusterError, StartError
from distnb.topology import Device

__all__ = ["Cluster", "EngineProcess"]

_START_TIMEOUT_S = 180.0
_ASK_S = 2.0  # what an engine gets to end by itself, then the same after SIGTERM
_KILL_S = 5.0
_CONTROLLER_TRIES = 3
_LOG_LINES = 15

OnExit = Callable[[int, int, str], None]
OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class EngineProcess:
    """A running engine.

    Attributes:
        engine: Its id.
        pid: Its process, which leads a process group of its own.
        device: Where it computes.
        log: File with what it wrote outside programs.
        ready: Whether its agent serves programs.
    """

    engine: int
    pid: int
    device: Device
    log: Path
    ready: bool = False


class Cluster:
    """Engines on this machine, launched through ipyparallel, with a watcher that knows at once when one ends.

    All methods run in the notebook process, and any thread may call them, one at a time.

    Args:
        agent: Module whose `install(shell, connection, engine, device)` makes an engine of a process.
    """

    def __init__(self, *, agent: str = "distnb.engine.agent") -> None:
        self._agent = agent
        self._lock = threading.RLock()  # one start, stop or restart at a time
        self._changed = threading.Condition()  # guards what the watcher's thread writes
        self._engines: dict[int, EngineProcess] = {}
        self._expected: set[int] = set()  # pids whose end is our own doing
        self._ended: dict[int, str] = {}  # pid → status, while somebody waits for it
        self._devices: tuple[Device, ...] = ()
        self._watcher: Watcher | None = None
        self._controller_pid: int | None = None
        self._controller_tries = 0
        self._controller_trouble = ""
        self._directory: Path | None = None
        self._owner = os.getpid()
        self._on_exit: OnExit = lambda engine, pid, status: None
        self._on_progress: OnProgress = lambda text: None

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def engines(self) -> dict[int, EngineProcess]:
        """The engines that live, by id."""
        with self._changed:
            return dict(sorted(self._engines.items()))

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of every engine that was started, dead or alive, in order of ids."""
        return self._devices

    @property
    def missing(self) -> tuple[int, ...]:
        """Ids of engines that have died."""
        with self._changed:
            return tuple(engine for engine in range(len(self._devices)) if engine not in self._engines)

    @property
    def running(self) -> bool:
        """Whether the cluster was started and not stopped."""
        return self._watcher is not None

    @property
    def directory(self) -> Path:
        """The private directory of this cluster: secrets and logs. Raises NoClusterError when it is not running."""
        if self._directory is None:
            raise NoClusterError("This cluster is not running, so it has no files. Start it first.")
        return self._directory

    @property
    def client_file(self) -> Path:
        """For `ipyparallel.Client(path)`: ipyparallel's own way to these engines. It appears soon after the start."""
        return self.directory / "security" / "ipcontroller-client.json"

    @property
    def controller_trouble(self) -> str:
        """Why ipyparallel's controller is not there; empty while all is well. Our own channel does not need it."""
        return self._controller_trouble

    def log_tail(self, engine: int, lines: int = _LOG_LINES) -> str:
        """The last lines of an engine's log."""
        return _tail(self._log_path(engine), lines)

    # -- start ------------------------------------------------------------------------------------------------------

    def start(
        self,
        n: int | None,
        devices: str | Sequence[str | Device] | None,
        connection: Connection,
        *,
        on_exit: OnExit,
        on_progress: OnProgress | None = None,
        oversubscribe: bool = False,
        timeout_s: float = _START_TIMEOUT_S,
    ) -> None:
        """Start the engines and return when each one's agent serves.

        Args:
            n, devices, oversubscribe: As for `plan_devices`.
            connection: How engines reach this process; written to a secret file.
            on_exit: Called with (engine, pid, status in words) in the watcher's thread when an engine ends unasked.
            on_progress: Called with a line of text, in the calling thread, each time there is news.
            timeout_s: How long all engines together may take.

        Raises:
            StartError: An engine ended or did not come up; its last lines are in the text. Nothing is left behind.
            OptionError: The numbers or names make no sense.
        """
        with self._lock:
            if self.running:
                raise StartError(f"This cluster is already running ({len(self.engines)} engines). Stop it first.")
            planned = plan_devices(n, devices, oversubscribe=oversubscribe)
            self._on_exit, self._on_progress = on_exit, on_progress or (lambda text: None)
            self._owner = os.getpid()
            atexit.register(self._stop_at_exit)
            try:
                self._directory = make_run_directory()
                self._connection_file = connection.write(self._directory)
                (self._directory / "log").mkdir()
                self._devices = planned
                self._watcher = Watcher(self._directory, self._engine_ready)
                for engine in range(len(planned)):
                    self._launch(engine)
                self._wait_until_ready(range(len(planned)), timeout_s)
                # Its imports would take the cores from the engines', and nothing of ours waits for it.
                self._launch_controller()
            except BaseException:
                self.stop()
                raise

    def restart(
        self,
        engines: Iterable[int] | None = None,
        *,
        on_progress: OnProgress | None = None,
        timeout_s: float = _START_TIMEOUT_S,
    ) -> None:
        """Replace engines by new processes with the same ids and devices; None for those that have died.

        Raises:
            NoClusterError: The cluster is not running.
            StartError: There is no such engine, or a new one did not come up: it is missing then.
        """
        with self._lock:
            if not self.running:
                raise NoClusterError("There is no running cluster whose engines could be restarted. Start one first.")
            wanted = sorted(set(self.missing if engines is None else engines))
            unknown = [engine for engine in wanted if engine not in range(len(self._devices))]
            if unknown:
                raise StartError(
                    f"There is no engine {unknown[0]!r}; the cluster has engines 0 to {len(self._devices) - 1}."
                )
            self._on_progress = on_progress or (lambda text: None)
            self._end([self._engines[engine].pid for engine in wanted if engine in self._engines])
            try:
                for engine in wanted:
                    self._launch(engine, replaces=True)
                self._wait_until_ready(wanted, timeout_s)
            except BaseException:
                self._end([self.engines[engine].pid for engine in wanted if engine in self.engines])
                raise

    def _launch(self, engine: int, *, replaces: bool = False) -> None:
        from distnb.cluster.launchers import launch_engine

        assert self._watcher is not None
        device, log = self._devices[engine], self._log_path(engine)
        environment = engine_environment(engine, device, len(self._devices), self._connection_file)
        environment[AGENT_VARIABLE] = self._agent
        if replaces:
            environment[REPLACES_VARIABLE] = "1"
        with self._changed:  # held so that the watcher's thread cannot report its end before it is known
            try:
                pid = launch_engine(
                    engine, self.directory, log, environment, self._watcher, partial(self._engine_ended, engine)
                )
            except OSError as error:
                raise StartError(f"The process of engine {engine} could not be started: {error}.") from error
            self._engines[engine] = EngineProcess(engine, pid, device, log)
        record_group(self.directory, pid)

    def _wait_until_ready(self, engines: Iterable[int], timeout_s: float) -> None:
        waiting, told = set(engines), ""
        devices = ", ".join(str(self._devices[engine]) for engine in sorted(waiting))
        self._on_progress(f"starting {_engines(len(waiting))} on {devices}")
        pids = {engine: self._engines[engine].pid for engine in waiting if engine in self._engines}
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                dead = [engine for engine in waiting if engine not in self._engines]
                late = [engine for engine in waiting if engine in self._engines and not self._engines[engine].ready]
            if dead:
                raise StartError(self._explain_death(dead[0], pids.get(dead[0])))
            text = f"{len(waiting) - len(late)} of {_engines(len(waiting))} ready"
            if text != told:
                told = text
                self._on_progress(text)
            if not late:
                return
            if time.monotonic() > deadline:
                raise StartError(
                    f"Engine {late[0]} did not come up within {timeout_s:.0f} s, and was ended. "
                    f"The last lines of its log:\n{self._indented_log(late[0])}"
                )
            with self._changed:
                self._changed.wait_for(partial(self._have_news_of, late), deadline - time.monotonic())

    def _have_news_of(self, engines: list[int]) -> bool:
        return any(engine not in self._engines or self._engines[engine].ready for engine in engines)

    def _explain_death(self, engine: int, pid: int | None) -> str:
        status = self._ended.get(pid or 0, "ended")
        what = f"Engine {engine} ({self._devices[engine]}) {status} while it started."
        return f"{what} The last lines of its log:\n{self._indented_log(engine)}"

    def _indented_log(self, engine: int) -> str:
        return "\n".join(f"    {line}" for line in self.log_tail(engine).splitlines()) or "    (empty)"

    def _log_path(self, engine: int) -> Path:
        return self.directory / "log" / f"engine-{engine}.log"

    # -- ipyparallel's controller -----------------------------------------------------------------------------------

    def _launch_controller(self) -> None:
        from distnb.cluster.launchers import launch_controller

        assert self._watcher is not None
        self._controller_tries += 1
        log = self.directory / "log" / f"controller-{self._controller_tries}.log"
        for stale in (self.directory / "security").glob("ipcontroller-*.json"):
            stale.unlink(missing_ok=True)
        with self._changed:
            self._controller_pid = launch_controller(
                self.directory, log, self._watcher, partial(self._controller_ended, log)
            )

    def _controller_ended(self, log: Path, pid: int, status: int | None) -> None:
        """In the watcher's thread. A port that another process took in the meantime is the usual reason."""
        words = describe_status(status)
        with self._changed:
            self._ended[pid] = words
            expected = pid in self._expected
            if self._controller_pid == pid:
                self._controller_pid = None
            self._changed.notify_all()
        if expected:
            return
        if self._controller_tries < _CONTROLLER_TRIES:
            self._launch_controller()
        else:
            self._controller_trouble = (
                f"ipyparallel's controller {words}. The last lines of its log:\n{_tail(log, _LOG_LINES)}"
            )

    # -- news from the watcher's thread -----------------------------------------------------------------------------

    def _engine_ready(self, engine: int) -> None:
        with self._changed:
            if engine in self._engines:
                self._engines[engine] = replace(self._engines[engine], ready=True)
                self._changed.notify_all()

    def _engine_ended(self, engine: int, pid: int, status: int | None) -> None:
        words = describe_status(status)
        with self._changed:
            self._ended[pid] = words
            process = self._engines.get(engine)
            was_ready = process is not None and process.ready
            if process is not None and process.pid == pid:
                del self._engines[engine]
            expected = pid in self._expected
            self._changed.notify_all()
        if self._directory is not None:
            forget_group(self._directory, pid)
        if was_ready and not expected:
            self._on_exit(engine, pid, words)

    # -- end --------------------------------------------------------------------------------------------------------

    def stop(self, ask: Callable[[], None] | None = None) -> None:
        """End every process of the cluster and remove its files. Does nothing when it is not running.

        Args:
            ask: Asks the engines to end by themselves; then come SIGTERM and SIGKILL.

        Raises:
            ClusterError: A process did not even end by SIGKILL (it hangs in the kernel); the rest is gone.
        """
        if os.getpid() != self._owner:
            return  # a forked child: these are not its processes
        with self._lock:
            watcher, directory = self._watcher, self._directory
            try:
                pids = [process.pid for process in self.engines.values()]
                self._end(pids, also=self._controller_pid, ask=ask)
            finally:
                self._watcher, self._directory, self._devices = None, None, ()
                self._controller_tries, self._controller_trouble = 0, ""
                with self._changed:
                    self._engines.clear()
                    self._expected.clear()
                    self._ended.clear()
                if watcher is not None:
                    watcher.close()
                if directory is not None:
                    remove_run_directory(directory)
                atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        self.stop()

    def _end(self, engines: Sequence[int], *, also: int | None = None, ask: Callable[[], None] | None = None) -> None:
        """End processes of ours: ask, then SIGTERM, then SIGKILL to their groups; at once if interrupted."""
        pids = [*engines, *([also] if also is not None else [])]
        with self._changed:
            self._expected.update(pids)
        try:
            if ask is not None and engines:
                ask()
                self._wait_for_ends(engines, _ASK_S)
            self._signal(pids, signal.SIGTERM)
            self._wait_for_ends(pids, _ASK_S)
        finally:
            self._signal(pids, signal.SIGKILL)
            self._wait_for_ends(pids, _KILL_S)
        stuck = [pid for pid in pids if pid not in self._ended]
        if stuck:
            raise ClusterError(
                f"Process {stuck[0]} did not end, not even by SIGKILL: it hangs in the operating "
                "system (a driver, a network disk)."
            )

    def _signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        with (
            self._changed
        ):  # the watcher reaps a process after its end is noted, so until then the pid is nobody else's
            for pid in pids:
                if pid not in self._ended and number == signal.SIGKILL:
                    end_group(pid)
                elif pid not in self._ended:
                    end_process(pid, number)

    def _wait_for_ends(self, pids: Iterable[int], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(pid in self._ended for pid in pids), timeout_s)


def _engines(n: int) -> str:
    return f"{n} engine" if n == 1 else f"{n} engines"


def _tail(path: Path, lines: int) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
