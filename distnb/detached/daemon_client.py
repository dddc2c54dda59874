"""A notebook's or a terminal's end of the connection to the daemon of a detached cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Pipe
from multiprocessing.connection import Connection as PipeEnd
from typing import Any

from distnb import __version__
from distnb.cluster.engine_owner import ClusterFacts, EngineOwner, EngineProcess, OnLost, OnProgress
from distnb.cluster.engine_plan import Planner
from distnb.cluster.local.open_files import raise_file_limit
from distnb.cluster.process_environment import PYTHON_MODULE, import_environment
from distnb.cluster.start_options import StartOptions
from distnb.detached import registry
from distnb.detached.daemon import DaemonOptions
from distnb.detached.protocol import (
    DaemonAnswer,
    DaemonProgress,
    DaemonRequest,
    Ending,
    Exited,
    Taken,
)
from distnb.detached.saved_names import SavedNames
from distnb.errors import ClusterError, NoClusterError, StartError
from distnb.wire.channel import Addresses

__all__ = ["DaemonClient", "connect", "rows", "start", "stop_detached"]

_logger = logging.getLogger("distnb.detached")


class DaemonClient(EngineOwner):
    """The owner of a detached cluster's engines, as the notebook sees it: the daemon carries out all orders.

    The cluster is lost when another notebook takes it over, or when it ends and this notebook did not ask for that.

    Args:
        daemon: The path of the daemon's socket, or a connection to the daemon.

    Raises:
        NoClusterError: The daemon has ended.
    """

    def __init__(self, daemon: str | PipeEnd[Any, Any]) -> None:
        super().__init__()
        try:
            self._pipe = Client(daemon, "AF_UNIX") if isinstance(daemon, str) else daemon
        except OSError as error:
            raise NoClusterError(f"The daemon of this detached cluster has ended ({error}).") from error
        self._name = ""
        self._saved = SavedNames()
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._waiting: dict[int, _Pending] = {}
        self._why = "its daemon has ended"
        self._closed = False
        self._losing = threading.Lock()  # guards the two below
        self._on_lost: OnLost | None = None
        self._lost: tuple[str, str] | None = None  # the arguments of `_on_lost`
        threading.Thread(target=self._receive, name="distnb-daemon", daemon=True).start()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _send(self, name: str, *arguments: Any, on_progress: OnProgress = lambda text: None) -> _Pending:
        pending = _Pending(on_progress)
        number = next(self._numbers)
        self._waiting[number] = pending
        try:
            with self._sending:
                self._pipe.send(DaemonRequest(number, name, arguments))
        except (OSError, TypeError):  # the second: closed by another thread meanwhile
            pending.put(DaemonAnswer(number, error=NoClusterError(self._end)))
        return pending

    def order(self, name: str, *arguments: Any, on_progress: OnProgress = lambda text: None) -> Any:
        """Have the daemon carry out an order, and return its value."""
        return self._send(name, *arguments, on_progress=on_progress).result()

    def connect(self, who: str, *, take: bool = False) -> None:
        """Become the cluster's notebook. The notebook that starts it is connected.

        Args:
            who: The notebook's name, for others that try to connect.
            take: Whether to take the cluster over from another notebook.

        Raises:
            ClusterError: Another notebook is connected.
        """
        self._set_facts(self.order("connect", who, __version__, take))

    def plan(self, on_progress: OnProgress) -> None:
        """Have the daemon choose the engines' devices."""
        self._set_facts(self.order("plan", on_progress=on_progress))

    def _set_facts(self, facts: ClusterFacts) -> None:
        self.facts, self._name = facts, f" {facts.name!r}"
        raise_file_limit(len(facts.engines))  # the daemon raises its own

    def start(
        self,
        addresses: Addresses,
        *,
        on_progress: OnProgress = lambda text: None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the engines, and return when all of them are ready. `meanwhile` runs in this thread."""
        pending = self._send("start", addresses, on_progress=on_progress)
        meanwhile()
        pending.result()

    def engine_ready(self, engine: int) -> None:
        """Record that the agent of an engine serves programs."""
        self._send("engine_ready", engine)

    def stop(self) -> None:
        """End every process of the cluster, and the daemon, whose end is the answer."""
        self._closed = True
        with contextlib.suppress(NoClusterError):
            self.order("stop")
        self.close()

    def close(self) -> None:
        """Disconnect. The engines stay."""
        self._closed = True
        # The thread reads, so closing the descriptor alone would not end the connection.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    # -- the notebook ------------------------------------------------------------------------------------------------

    def when_lost(self, handle: OnLost) -> None:
        """Call a function, in a thread of its own, when the cluster is lost, or now if it is lost already."""
        with self._losing:
            self._on_lost, lost = handle, self._lost
        if lost is not None:
            threading.Thread(target=handle, args=lost, name="distnb-lost", daemon=True).start()

    def note_names(self, user_ns: Mapping[str, Any], program: int) -> None:
        """Save the names that are bound to engine objects, for the next notebook."""
        names = SavedNames.of(user_ns, program)
        if names != self._saved:
            try:
                names.save(self.directory)
            except FileNotFoundError:
                if self.directory.exists():
                    raise
                return  # the cluster has ended, which the next program reports
            self._saved = names

    # -- the thread --------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError, TypeError, ValueError):  # the last two: closed by another thread meanwhile
                self._pipe.close()
                break
            match message:
                case DaemonProgress(number):
                    self._waiting[number].put(message)
                case DaemonAnswer(number):
                    self._update(message.engines)
                    self._waiting.pop(number).put(message)
                case Exited(engine, pid, status):
                    self._update(message.engines)
                    self.on_exit(engine, pid, status)
                case Taken(by, name):
                    self._lose(
                        f"was taken over by {by}",
                        f"{by} has taken over the detached cluster {name!r}. Take it back with %distnb connect {name} "
                        "--take, or start other engines with %distnb start.",
                    )
                case Ending(why):
                    self._why = why
        if not self._closed:
            self._lose(f"was ended: {self._why}", self._end)
        for number in list(self._waiting):
            self._waiting.pop(number).put(DaemonAnswer(number, error=NoClusterError(self._end)))

    @property
    def _end(self) -> str:
        """The reason of the connection's end, with its cure."""
        if self._lost is not None:
            return self._lost[1]
        return (
            f"The detached cluster{self._name} has ended: {self._why}. Start another one with %distnb start --detach."
        )

    def _update(self, engines: Mapping[int, EngineProcess]) -> None:
        if self._lost is None:
            self._engines = dict(engines)

    def _lose(self, status: str, reason: str) -> None:
        """Handle the loss of the cluster, the first time: none of its engines exists for this notebook from now on."""
        with self._losing:
            if self._lost is not None:
                return
            self._lost, handle = (status, reason), self._on_lost
            self._engines = {
                engine: process if process.ended else dataclasses.replace(process, ended=status)
                for engine, process in self._engines.items()
            }
        _logger.warning("%s", reason)
        if handle is not None:
            threading.Thread(target=handle, args=(status, reason), name="distnb-lost", daemon=True).start()


class _Pending:
    """A request under way. The thread that waits for the result calls `on_progress`."""

    def __init__(self, on_progress: Callable[[str], None]) -> None:
        self._on_progress = on_progress
        self._messages: queue.SimpleQueue[DaemonProgress | DaemonAnswer] = queue.SimpleQueue()

    def put(self, message: DaemonProgress | DaemonAnswer) -> None:
        self._messages.put(message)

    def result(self) -> Any:
        while isinstance(message := self._messages.get(), DaemonProgress):
            self._on_progress(message.text)
        if message.error is not None:
            raise message.error
        return message.value


def start(options: StartOptions, planner: Planner, on_progress: OnProgress) -> DaemonClient:
    """Start the daemon of a new detached cluster, have it plan the cluster, and return a connection to it.

    Raises:
        OptionError: The cluster's name is invalid or taken.
        StartError: The daemon did not start, or the machines do not have what was requested.
    """
    without_resolver = dataclasses.replace(options, on=None)
    client = _start_daemon(DaemonOptions(who=_notebook_name(), options=without_resolver, planner=planner))
    try:
        client.plan(on_progress)
    except BaseException:
        client.stop()
        raise
    return client


def connect(name: str, *, take: bool) -> DaemonClient:
    """Connect to the daemon of a detached cluster as its notebook.

    Raises:
        NoClusterError: There is no such cluster on this machine.
        ClusterError: Another notebook is connected.
    """
    client = DaemonClient(registry.find(name).socket)
    try:
        client.connect(_notebook_name(), take=take)
    except BaseException:
        client.close()
        raise
    return client


def _start_daemon(given: DaemonOptions) -> DaemonClient:
    ours, theirs = Pipe()
    with theirs, _daemon_process(theirs.fileno()) as process:
        theirs.close()
        assert process.stderr is not None
        try:
            ours.send(given)
            error = ours.recv()
        except (EOFError, OSError):
            error = StartError(f"The daemon of the cluster did not start:\n{process.stderr.read().decode()}")
        except BaseException:
            ours.close()  # before the process is waited for, which waits for the options
            raise
    if error is not None:
        ours.close()
        raise error
    return DaemonClient(ours)


def _daemon_process(connection: int) -> subprocess.Popen[bytes]:
    """Start the process that forks the daemon, and ends then. The daemon inherits the connection."""
    return subprocess.Popen(
        [*PYTHON_MODULE, "distnb.detached.daemon", str(connection)],
        env={**os.environ, **import_environment()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[connection],
        start_new_session=True,
    )


def rows() -> list[tuple[str, ...]]:
    """Return a row of `distnb list` for each of the user's detached clusters on this machine, the oldest first."""
    found = []
    for entry in registry.entries():
        if entry.is_here:
            with contextlib.suppress(NoClusterError, ClusterError):  # it has ended meanwhile
                client = DaemonClient(entry.socket)
                found.append(client.order("row"))
                client.close()
    return found


def stop_detached(name: str) -> None:
    """End a detached cluster.

    Raises:
        NoClusterError: There is no cluster of this name on this machine.
    """
    DaemonClient(registry.find(name).socket).stop()


def _notebook_name() -> str:
    """Return a name of this process for the users of other notebooks."""
    notebook = os.environ.get("JPY_SESSION_NAME", "")
    kind = os.path.basename(notebook) if notebook else ("a notebook" if "ipykernel" in sys.modules else "a program")
    return f"{kind} (process {os.getpid()} in {os.getcwd()})"
