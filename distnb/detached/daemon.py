"""`python -m distnb.detached.daemon`: the process that owns a detached cluster in the notebook's place.

It has the same `Cluster` as a notebook whose engines end with it, and answers requests by the cluster's methods. So it
keeps what must outlive a notebook: the engines, the transport to other machines, the private directory, the keys, the
rendezvous store and the ports. Programs and events do not pass through it. A notebook binds the sockets to which the
engines connect, and the engines connect again when another notebook binds them:

    notebook ◀── programs, control ──▶ engines
        │                                 ▲
        └── requests ──▶ daemon ── starts, ends, watches

One notebook at a time is connected (`distnb.detached.ownership`). It holds its connection to the daemon open, so the
daemon learns of the notebook's end at once. The connection of the notebook that starts the daemon is a socket pair,
which exists before the daemon does: whenever that notebook ends before the engines have started, so does the daemon.
The daemon ends with its cluster: at a request, at the time limit, or by SIGTERM.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import Listener
from types import FrameType
from typing import Any

import psutil

from distnb import __version__
from distnb.cluster.engine_owner import ClusterFacts, EngineProcess
from distnb.cluster.engine_plan import Planner
from distnb.cluster.lifecycle import Cluster
from distnb.cluster.local.processes import Processes
from distnb.cluster.start_options import DETACHED_HOURS, StartOptions
from distnb.detached import registry
from distnb.detached.client_connection import ClientConnection
from distnb.detached.ownership import EndCluster, Grant, Order, Ownership, Refuse, Release
from distnb.detached.protocol import (
    SOCKET_NAME,
    DaemonAnswer,
    DaemonProgress,
    DaemonRequest,
    Ending,
    Exited,
    Taken,
)
from distnb.errors import ClusterError, DistnbError, NoClusterError, StartError
from distnb.process_log import open_log
from distnb.views.wording import duration

__all__ = ["Daemon", "DaemonOptions", "main"]

_logger = logging.getLogger("distnb.detached")

_LONGEST_WAIT_S = 86400.0
_PAUSE_S = 0.05
_STARTER = 0  # the number of the client that starts the cluster

_REFUSALS = {
    "starting": "{by} is still starting the cluster {name!r}. Connect when it has started.",
    "owned": (
        "The cluster {name!r} is used by {by}, and only one notebook at a time can be connected. Disconnect there "
        "(%distnb disconnect), or take it over here (%distnb connect {name} --take)."
    ),
    "silent": (
        "{by} does not release the cluster {name!r}: it does not answer, perhaps in native code. It will release it as "
        "soon as it can; connect again then, or restart that kernel."
    ),
    "taken": "{by} has taken over the cluster {name!r} first. Repeat %distnb connect {name} --take to get it.",
    "ended": "The cluster {name!r} has ended: {by}.",
}


@dataclass(frozen=True)
class DaemonOptions:
    """The options of a detached cluster.

    Attributes:
        who: The name of the notebook that starts it.
        options: The options of the start, without `on`, which `planner` replaces.
        planner: The function that plans the engines.
    """

    who: str
    options: StartOptions
    planner: Planner


class Daemon:
    """The owner of a detached cluster's processes. Each connection, and each of its requests, has a thread.

    Raises:
        OptionError: The name is invalid or taken.
    """

    def __init__(self, options: DaemonOptions) -> None:
        self._options = options
        self._processes = Processes()
        self._directory = self._processes.directory
        self._began = time.time()
        hours = DETACHED_HOURS if options.options.hours is None else options.options.hours
        self._ends = self._began + hours * 3600 if math.isfinite(hours) else None
        self._ownership = Ownership(_STARTER, options.who, self._ends, f"it reached its time limit of {hours:g} hours")
        self._numbers = itertools.count(_STARTER)
        self._clients: dict[int, ClientConnection] = {}
        self._changed = threading.Condition()  # guards the three above, and reports each of their events
        self._cluster: Cluster | None = None
        path = str(self._directory / SOCKET_NAME)
        try:
            self._listener = Listener(path, "AF_UNIX", backlog=16)
            self.entry = registry.add(
                registry.Entry(
                    name=options.options.name or "",
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    socket=path,
                    started=self._began,
                )
            )
        except BaseException:
            self._processes.close()
            raise

    def open_log(self) -> int:
        """Open distnb's log, and return the descriptor of a file for this process's own output."""
        folder = self._directory / "log"
        folder.mkdir(exist_ok=True)
        open_log(self._directory, "daemon")
        return os.open(folder / "daemon-output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    # -- the life of the daemon --------------------------------------------------------------------------------------

    def serve(self, starter: Pipe[Any, Any]) -> None:
        """Serve until the cluster is to end, and end it. `starter` is the connection to the cluster's first owner."""
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._serve_in_thread(starter)
        threading.Thread(target=self._accept, name="distnb-accept", daemon=True).start()
        with self._changed:
            while not self._ownership.ended:
                self._changed.wait(self._seconds_left())
                self._advance(lambda now: self._ownership.tick(now=now))
        self._close()

    def _seconds_left(self) -> float:
        deadline = self._ownership.deadline
        return _LONGEST_WAIT_S if deadline is None else min(max(0.0, deadline - time.time()), _LONGEST_WAIT_S)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        # This thread may be in the middle of a transition.
        threading.Thread(target=self._stop, args=("its daemon received SIGTERM",), daemon=True).start()

    def _stop(self, why: str) -> None:
        self._advance(lambda now: self._ownership.stopped(why, now=now))

    def _advance(self, event: Callable[[float], list[Order]]) -> None:
        """Report an event to the state machine, and follow its orders."""
        with self._changed:
            for order in event(time.time()):
                self._follow(order)
            self._changed.notify_all()

    def _follow(self, order: Order) -> None:
        """Follow an order, without waiting for anything."""
        match order:
            case Grant(client):
                _logger.info("%s has connected", self._ownership.who)
                self._send(
                    client, DaemonAnswer(self._clients[client].asked, self._current_facts(), None, self._engines)
                )
            case Refuse(client, cause, by):
                error = ClusterError(_REFUSALS[cause].format(name=self.entry.name, by=by))
                self._send(client, DaemonAnswer(self._clients[client].asked, None, error, self._engines))
            case Release(client, by):
                self._send(client, Taken(by, self.entry.name))
            case EndCluster(why):
                _logger.info("the cluster ends: %s", why)
                if self._ownership.owner is not None:
                    self._send(self._ownership.owner, Ending(why))

    def _send(self, client: int, message: Any) -> None:
        if client in self._clients:
            self._clients[client].send(message)

    def _close(self) -> None:
        registry.remove(self.entry)
        self._listener.close()
        if self._cluster is not None:
            self._cluster.stop()
        self._processes.close()
        for client in list(self._clients.values()):
            client.close()

    # -- clients -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._ownership.ended:
            try:
                self._serve_in_thread(self._listener.accept())
            except (OSError, RuntimeError):  # the listener is closed, the client has gone, or this process has no room
                time.sleep(_PAUSE_S)

    def _serve_in_thread(self, pipe: Pipe[Any, Any]) -> None:
        client = ClientConnection(next(self._numbers), pipe)
        with self._changed:
            self._clients[client.number] = client
        threading.Thread(target=self._serve, args=(client,), name="distnb-client", daemon=True).start()

    def _serve(self, client: ClientConnection) -> None:
        """Handle a client's requests until it has gone."""
        try:
            while (request := client.receive()) is not None:
                self._handle(client, request)
            if self._cluster is not None and self._ownership.owner == client.number:
                self._cluster.end_passing()  # before the next notebook is connected
        except Exception:
            _logger.exception("client %d is given up", client.number)
        finally:
            with self._changed:
                del self._clients[client.number]
                self._advance(lambda now: self._ownership.left(client.number, now=now))
            client.close()

    def _handle(self, client: ClientConnection, request: DaemonRequest) -> None:
        _logger.debug("client %d: request %s", client.number, request.name)
        if request.name == "connect":
            self._connect(client, request)
        elif request.name == "stop":  # its answer is the end of the connection
            self._stop(f"it was stopped by {client.who or f'`distnb stop {self.entry.name}` in a terminal'}")
        else:
            arguments = client, request
            threading.Thread(target=self._answer, args=arguments, name="distnb-request", daemon=True).start()

    def _connect(self, client: ClientConnection, request: DaemonRequest) -> None:
        """Handle the request to become the cluster's notebook, which the order to grant or to refuse it answers."""
        client.who, version, take = request.arguments
        client.asked = request.number
        if version != __version__:
            error = ClusterError(
                f"The cluster {self.entry.name!r} was started by distnb {__version__}, and this is distnb {version}. "
                f"Connect with the same version; or end the cluster (distnb stop {self.entry.name})."
            )
            client.send(DaemonAnswer(request.number, None, error))
        else:
            self._advance(lambda now: self._ownership.connected(client.number, client.who, take, now=now))

    def _current_facts(self) -> ClusterFacts | None:
        if self._cluster is None:
            return None
        engines = tuple(self._engines.values()) or self._cluster.facts.engines
        return dataclasses.replace(self._cluster.facts, name=self.entry.name, engines=engines)

    def _answer(self, client: ClientConnection, request: DaemonRequest) -> None:
        value, error = None, None
        try:
            if request.name == "row":
                value = self._row()
            else:
                self._check(client)
                value = self._carry_out(client, request)
        except Exception as raised:  # noqa: BLE001  # the client raises it
            _logger.info("request %s failed: %s", request.name, raised)
            error = raised if isinstance(raised, DistnbError) else ClusterError(traceback.format_exc())
        client.send(DaemonAnswer(request.number, value, error, self._engines))

    def _check(self, client: ClientConnection) -> None:
        """Raise if a client is not the owner, or has gone."""
        self._check_running()
        if self._ownership.owner != client.number or client.gone:
            raise ClusterError(f"This notebook is not connected to the cluster {self.entry.name!r} any more.")

    def _check_running(self) -> None:
        if self._ownership.ended:
            raise NoClusterError(_REFUSALS["ended"].format(name=self.entry.name, by=self._ownership.ended))

    def _carry_out(self, client: ClientConnection, request: DaemonRequest) -> Any:
        """Plan or start the cluster, or have it carry out an order."""
        name, arguments = request.name, request.arguments

        def report(text: str) -> None:
            """Send a line about the progress. Raise if the cluster has ended, or if engines were added for nobody."""
            self._check_running()
            if name == "add":
                self._check(client)
            client.send(DaemonProgress(request.number, text))

        if name == "plan":
            return self._plan(report)
        if self._cluster is None:
            raise NoClusterError("The engines of this cluster have not been started.")
        if name == "start":
            self._cluster.start(*arguments, on_progress=report)
            self._advance(lambda now: self._ownership.started(now=now))
            return None
        if name == "engine_ready":
            return self._cluster.engine_ready(*arguments)
        return self._cluster.order(name, *arguments, on_progress=report)

    def _plan(self, on_progress: Callable[[str], None]) -> ClusterFacts | None:
        """Choose the engines' devices, and return the facts that the notebook needs before it listens for them."""
        plan = self._options.planner(self._options.options, self._processes, on_progress)
        self._cluster = Cluster(plan, self._processes)
        self._cluster.on_exit = self._exited
        return self._current_facts()

    def _exited(self, engine: int, pid: int, status: str) -> None:
        with self._changed:
            if self._ownership.owner is not None:
                self._send(self._ownership.owner, Exited(engine, pid, status, self._engines))

    @property
    def _engines(self) -> dict[int, EngineProcess]:
        return {} if self._cluster is None else self._cluster.engines

    def _row(self) -> tuple[str, ...]:
        """Return the cluster's row of `distnb list`."""
        engines, now = self._engines.values(), time.time()
        hosts = dict.fromkeys(each.host for each in engines if each.host)
        ended = sum(bool(process.ended) for process in engines)
        running = [] if hosts else [process.pid for process in engines if not process.ended]
        devices = ", ".join(str(process.device) for process in engines)
        return (
            self.entry.name,
            f"{len(engines)} on {devices}{f' ({ended} ended)' if ended else ''}",
            ", ".join(hosts) or "this one",
            "not known" if hosts else f"{sum(map(_rss_nbytes, running)) / 1e9:.1f} GB",
            duration(now - self._began),
            "no limit" if self._ends is None else duration(max(0.0, self._ends - now)),
            self._ownership.who or "nobody",
        )


def _rss_nbytes(pid: int) -> int:
    """Return the memory of a process and of its descendants."""
    total = 0
    with suppress(psutil.Error):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def main() -> None:
    """Receive the options from the starter's connection, answer with None or an error, and serve."""
    starter: Pipe[Any, Any] = Pipe(int(sys.argv[1]))
    os.set_inheritable(starter.fileno(), False)
    given: DaemonOptions = starter.recv()
    if os.fork():  # the notebook waits for this process, and the daemon is nobody's child
        os._exit(0)
    try:
        daemon = Daemon(given)
        log = daemon.open_log()
    except BaseException as error:  # noqa: BLE001  # the notebook raises it
        starter.send(error if isinstance(error, DistnbError) else StartError(traceback.format_exc()))
        os._exit(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with suppress(OSError):  # the notebook has ended
        starter.send(None)
    try:
        daemon.serve(starter)
    except BaseException:
        _logger.exception("the daemon failed, and its guardian ends what is left")
    os._exit(0)  # the threads of clients may wait


if __name__ == "__main__":
    main()
