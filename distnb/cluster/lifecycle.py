"""The engines that this process owns, from their start to their end."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from distnb.cluster.connection import Connection, connection_path, make_keys
from distnb.cluster.engine_owner import ClusterFacts, EngineOwner, EngineProcess, OnProgress
from distnb.cluster.engine_plan import EnginePlan, Placed
from distnb.cluster.heartbeat_listener import HeartbeatListener
from distnb.cluster.local.launcher import EngineOrder, Launcher, PlacedEngine
from distnb.cluster.local.open_files import raise_file_limit
from distnb.cluster.local.processes import Processes
from distnb.cluster.rendezvous_store import RendezvousStore
from distnb.errors import ClusterError, NoClusterError, StartError
from distnb.wire.channel import Addresses

__all__ = ["Cluster"]

_logger = logging.getLogger("distnb.cluster")

_START_TIMEOUT_S = 180.0


class Cluster(EngineOwner):
    """The engines that this process owns, with a watcher thread that handles the end of an engine at once.

    This process is the notebook, or the daemon of a detached cluster. Start a cluster only once. Any thread may call
    the methods.

    Args:
        plan: The engines. It is closed with the cluster.
        processes: The supervisor of the processes, with their private directory. It is closed with the cluster.
        agent: The module whose `install(shell, connection, engine, device)` makes an engine of a process.

    Raises:
        StartError: This process cannot listen for engines of other machines.
    """

    def __init__(self, plan: EnginePlan, processes: Processes, *, agent: str = "distnb.engine.agent") -> None:
        super().__init__()
        self._plan, self._processes, self._agent = plan, processes, agent
        self._launcher: Launcher | None = None
        self._store: RendezvousStore | None = None
        self._heartbeats: HeartbeatListener | None = None
        self._passing: set[int] = set()  # engines that end with the notebook: they have not joined yet, or leave
        self._lock = threading.RLock()  # one start, stop or restart at a time
        self._stopping = self._has_controller = False
        self._owner = os.getpid()
        self._is_closed = False
        self._opened = ExitStack()  # closed after the processes and the plan
        try:
            self.facts = self._listen()
        except BaseException:
            self.stop()
            raise

    def _listen(self) -> ClusterFacts:
        """Listen for engines of other machines, if there are any, and return the facts about the cluster."""
        plan, keys, address = self._plan, make_keys(), self._plan.address or None
        store, ports = None, None
        if address is not None:
            self._store = RendezvousStore(host=address)
            self._opened.callback(self._store.close)
            store = self._store.host, self._store.port
            self._heartbeats = HeartbeatListener(address, keys)
            self._opened.callback(self._heartbeats.close)
            reserved = [self._opened.enter_context(_reserve_port(address)) for _ in range(2)]
            ports = (reserved[0].getsockname()[1], reserved[1].getsockname()[1])
        return ClusterFacts(
            directory=self.directory,
            engines=plan.engines,
            keys=keys,
            address=address,
            ports=ports,
            store=store,
            notices=plan.notices,
            packages=plan.packages,
            folders=plan.folders,
            data_limit_nbytes=plan.options.data_limit_nbytes,
        )

    @property
    def directory(self) -> Path:
        """The cluster's private directory with secrets and logs."""
        return self._processes.directory

    # -- start ------------------------------------------------------------------------------------------------------

    def start(
        self,
        addresses: Addresses,
        *,
        on_progress: OnProgress = lambda text: None,
        meanwhile: Callable[[], object] = lambda: None,
        timeout_s: float = _START_TIMEOUT_S,
    ) -> None:
        """Start the engines and return when all of them are ready. `meanwhile` runs in this thread while they start."""
        with self._lock:
            atexit.register(self.stop)
            try:
                if self._stopping:
                    raise NoClusterError("This cluster was stopped. Start another one with %distnb start.")
                (self.directory / "log").mkdir(exist_ok=True)  # the notebook may log already
                keys, options = self.facts.keys, self._plan.options
                connection = Connection(
                    **addresses._asdict(),
                    server_public=keys.server_public,
                    client_public=keys.client_public,
                    client_secret=keys.client_secret,
                    notebook_pid=os.getpid(),
                    heartbeat_url=self._heartbeats.url if self._heartbeats is not None else "",
                    on_disconnect=(options.on_disconnect or "continue") if options.detach else "",
                )
                connection.write(self.directory)
                launcher = self._launcher = self._plan.launcher(connection)
                engines = tuple(launcher.places)
                on_progress(_starting(self.facts.engines))
                self._launch(engines)
                if self._store is not None:
                    self._store.serve()
                meanwhile()
                self._wait_until_ready(engines, on_progress, timeout_s)
            except BaseException:
                self.stop()
                raise

    # -- orders -----------------------------------------------------------------------------------------------------

    def order(self, name: str, *arguments: Any, on_progress: OnProgress = lambda text: None) -> Any:
        """Carry out an order by the private method of its name."""
        words = {"on_progress": on_progress} if name in ("restart", "place_further", "add") else {}
        return getattr(self, f"_{name}")(*arguments, **words)

    def _restart(self, engines: Sequence[int], on_progress: OnProgress) -> None:
        with self._lock:
            self._end(engines)
            try:
                self._start_again(engines, on_progress)
            except BaseException:
                self._end(engines)
                raise

    def _place_further(self, there: Sequence[PlacedEngine], count: int, on_progress: OnProgress) -> Placed:
        return self._plan.place_further(there, count, on_progress)

    def _add(self, placed: Sequence[PlacedEngine], on_progress: OnProgress) -> None:
        engines = tuple(each.engine for each in placed)
        with self._lock:
            self._running.places.update(zip(engines, placed, strict=True))
            self._passing.update(engines)
            try:
                on_progress(_starting(placed))
                self._start_again(engines, on_progress)
            except BaseException:
                self.remove(engines)
                raise

    def _joined(self) -> None:
        self._passing.clear()

    def _leave(self, engines: Sequence[int]) -> None:
        self._passing.update(engines)

    def _remove(self, engines: Sequence[int]) -> None:
        with self._lock:
            try:
                self._end(engines)
            finally:
                for engine in engines:
                    self._engines.pop(engine, None)
                    self._running.remove(engine)
                self._passing.difference_update(engines)

    def end_passing(self) -> None:
        """End the engines that a notebook was adding or removing when it ended, also while another thread does so."""
        if passing := tuple(self._passing):
            _logger.info("engines %s are ended, because their notebook ended while it added or removed them", passing)
            self._end(passing)  # `add`, which holds the lock, fails then
            with self._lock:
                self.remove(tuple(self._passing))  # those that it has not removed itself

    def _end_engines(self) -> None:
        with self._lock:
            self._end([*self._engines])

    def _notice_ends(self) -> None:
        if self._launcher is not None:
            running = [process for process in self._engines.values() if not process.ended]
            self._launcher.notice_ends({process.engine: process.pid for process in running}, self._processes)

    def _start_controller(self) -> None:
        with self._lock:
            if not self._running.has_controller:
                raise ClusterError(
                    "ipyparallel.Client does not reach engines on other machines. Run code there in %%distribute cells."
                )
            if not self._has_controller:
                # Few notebooks have such a client, and the controller's processes take 50 MB.
                from distnb.cluster.local.controller import start_controller

                start_controller(self._processes)
                self._has_controller = True

    @property
    def _running(self) -> Launcher:
        if self._launcher is None:
            raise NoClusterError("There is no running cluster whose engines could be changed. Start one first.")
        return self._launcher

    def _start_again(self, engines: Sequence[int], on_progress: OnProgress) -> None:
        self._running.prepare(engines, on_progress)
        self._launch(engines)
        self._wait_until_ready(engines, on_progress, _START_TIMEOUT_S)

    def _launch(self, engines: Sequence[int]) -> None:
        raise_file_limit(len({*self._engines, *engines}))
        launcher = self._running
        orders = [
            EngineOrder(
                engine=engine, device=launcher.places[engine].device, log=self._log_path(engine), agent=self._agent
            )
            for engine in engines
        ]
        with self._processes.changed:
            try:
                launcher.launch(orders, self._processes, self._engine_launched, self._engine_ended)
            except OSError as error:
                which = f"engine{'s' if len(orders) > 1 else ''} {', '.join(map(str, engines))}"
                raise StartError(
                    f"The process of {which} could not be started: {error}. Free memory or processes, and try again."
                ) from error

    def _wait_until_ready(self, engines: Sequence[int], on_progress: OnProgress, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        ready = -1

        def has_progressed() -> bool:
            now = [self._engines[engine] for engine in engines]
            ended = self._stopping or any(process.ended for process in now)
            return ended or sum(process.ready for process in now) != ready

        while ready < len(engines):
            with self._processes.changed:
                progressed = self._processes.changed.wait_for(has_progressed, deadline - time.monotonic())
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
        place = self._running.places[engine]
        _logger.info("engine %d (%s) is process %d", engine, place.device, pid)
        self._engines[engine] = EngineProcess(**vars(place), pid=pid)

    def engine_ready(self, engine: int) -> None:
        """Record that the agent of an engine serves programs. Any thread may call this."""
        _logger.info("engine %d is ready", engine)
        with self._processes.changed:
            if engine in self._engines:
                self._engines[engine] = replace(self._engines[engine], ready=True)
                self._processes.changed.notify_all()

    def _engine_ended(self, engine: int, pid: int, words: str, expected: bool) -> None:
        with self._processes.changed:
            process = self._engines.get(engine)
            if process is None or process.pid != pid:
                return
            _logger.info("engine %d %s", engine, words)
            self._engines[engine] = replace(process, ended=words)
            self._processes.changed.notify_all()
        if not expected:
            self.on_exit(engine, pid, words)

    # -- end --------------------------------------------------------------------------------------------------------

    def _end(self, engines: Iterable[int]) -> None:
        launcher = self._running
        with self._processes.changed:  # no engine gets a new process meanwhile
            pids = {engine: self._engines[engine].pid for engine in engines if engine in self._engines}
            launcher.expect_end(pids, self._processes)
        launcher.end(pids, self._processes)

    def stop(self) -> None:
        """End every process of the cluster, and free all its resources. A second call does nothing."""
        if os.getpid() != self._owner:
            return  # a forked child: these are not its processes
        self._stopping = True  # a start that is under way in another thread, and holds the lock, fails
        with self._processes.changed:
            self._processes.changed.notify_all()
        with self._lock:
            atexit.unregister(self.stop)
            if self._is_closed:
                return
            self._is_closed = True
            with self._opened:
                self._opened.callback(self._processes.close)
                self._opened.callback(self._plan.close)
                connection_path(self.directory).unlink(missing_ok=True)
                if self._launcher is not None:
                    self._end([*self._engines])
                    self._launcher = None


def _reserve_port(host: str) -> socket.socket:
    """Reserve a port, at which the notebook listens. The socket is bound to it, and never listens."""
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def _starting(placed: Collection[PlacedEngine]) -> str:
    return f"starting {_engines(len(placed))} on {', '.join(str(each.device) for each in placed)}"


def _engines(n: int) -> str:
    return f"{n} engine" if n == 1 else f"{n} engines"
