"""`python -m distnb.cluster.detached.daemon`: the process that owns a detached cluster in the notebook's place.

It starts the engines, is the process with which they end, and keeps what must outlive a notebook: the transport to
other machines, the private directory, the keys, the rendezvous store and the ports. Programs and events do not pass
through it. A notebook binds the sockets to which the engines connect, and the engines connect again when another
notebook binds them:

    notebook ◀── programs, control ──▶ engines
        │                                 ▲
        └── requests ──▶ daemon ── starts, ends, watches

One notebook at a time is connected. It holds its connection to the daemon's socket open, so the daemon learns of the
notebook's end at once. The daemon ends with its cluster: at a request, at the time limit, or by SIGTERM.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import pickle
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
from distnb.cluster.connection import Connection, make_keys
from distnb.cluster.detached import registry
from distnb.cluster.detached.protocol import (
    SOCKET_NAME,
    ClusterSummary,
    DaemonAnswer,
    DaemonProgress,
    DaemonRequest,
    DetachedCluster,
    Ending,
    Exited,
    Taken,
)
from distnb.cluster.lifecycle import Cluster, EngineProcess
from distnb.cluster.local.processes import Processes
from distnb.cluster.remote.further_engines import PlacedEngine, place_further
from distnb.cluster.remote.heartbeat import HeartbeatListener
from distnb.cluster.remote.host_plan import HostPlan, make_plan
from distnb.cluster.remote.hosts import HostOptions
from distnb.cluster.rendezvous_store import RendezvousStore
from distnb.cluster.start_options import DETACHED_HOURS, StartOptions
from distnb.errors import ClusterError, DistnbError, NoClusterError
from distnb.process_log import open_log
from distnb.topology import Device
from distnb.wire.channel import CONTROL_NAME, PROGRAMS_NAME

__all__ = ["Daemon", "DaemonOptions", "main"]

_logger = logging.getLogger("distnb.cluster.detached")

_RELEASING_S = 15.0
_LONGEST_WAIT_S = 86400.0


@dataclass(frozen=True)
class DaemonOptions:
    """The options of a detached cluster.

    Attributes:
        options: The options of the start, without the resolver, which `machines` replaces.
        machines: The machines of the engines; None for this one.
    """

    options: StartOptions
    machines: HostOptions | None


class Daemon:
    """The owner of a detached cluster. Each connection, and each of its requests, has a thread.

    Raises:
        OptionError: The name is invalid or taken.
    """

    def __init__(self, options: DaemonOptions) -> None:
        self._options = options
        self._processes = Processes()
        self._directory = self._processes.directory
        self._began = time.time()
        self._hours = DETACHED_HOURS if options.options.hours is None else options.options.hours
        self._ends = self._began + self._hours * 3600 if math.isfinite(self._hours) else None
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._holder: _Client | None = None
        self._joining: set[int] = set()  # further engines that have no copy yet of what the others have
        self._plan: HostPlan | None = None
        self._cluster: Cluster | None = None
        self._facts: DetachedCluster | None = None
        self._store: RendezvousStore | None = None
        self._heartbeats: HeartbeatListener | None = None
        self._reserved: list[socket.socket] = []
        self._end = threading.Event()
        self._why = ""
        self._keys = make_keys()
        path = str(self._directory / SOCKET_NAME)
        try:
            self._listener = Listener(path, "AF_UNIX", backlog=16)
            self.entry = registry.Entry(
                name=options.options.name or registry.free_name(),
                host=socket.gethostname(),
                pid=os.getpid(),
                socket=path,
                started=self._began,
            )
            registry.add(self.entry)
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

    def serve(self) -> None:
        """Serve until the cluster is to end, and end it."""
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        threading.Thread(target=self._accept, name="distnb-accept", daemon=True).start()
        while not self._end.wait(self._seconds_left()):
            if self._seconds_left() <= 0:
                self._finish(f"it reached its time limit of {self._hours:g} hours")
        self._close()

    def _seconds_left(self) -> float:
        return min(self._ends - time.time(), _LONGEST_WAIT_S) if self._ends is not None else _LONGEST_WAIT_S

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._finish("its daemon received SIGTERM")

    def _finish(self, why: str) -> None:
        self._why = self._why or why
        self._end.set()

    def _close(self) -> None:
        _logger.info("the cluster ends: %s", self._why)
        registry.remove(self.entry)
        if self._holder is not None:
            self._holder.send(Ending(self._why))
        self._listener.close()
        if self._cluster is not None:
            self._cluster.stop()
        self._processes.close()
        if self._plan is not None:
            self._plan.close()
        if self._store is not None:
            self._store.close()
        if self._heartbeats is not None:
            self._heartbeats.close()
        for reserved in self._reserved:
            reserved.close()

    # -- clients -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._end.is_set():
            try:
                client = _Client(self._listener.accept())
            except OSError:  # the listener is closed, or the client has gone
                continue
            threading.Thread(target=self._serve, args=(client,), name="distnb-client", daemon=True).start()

    def _serve(self, client: _Client) -> None:
        """Receive a client's requests until it has gone."""
        while (request := client.receive()) is not None:
            threading.Thread(target=self._answer, args=(client, request), name="distnb-request", daemon=True).start()
        client.close()
        self._release(client)

    def _release(self, client: _Client) -> None:
        if self._holder is not client:
            return
        self._end_joining()
        with self._free:
            self._holder = None
            self._free.notify_all()
        _logger.info("%s has disconnected", client.who)
        if self._cluster is None or not self._cluster.engines:
            self._finish("the notebook ended before the engines had started")

    def _end_joining(self) -> None:
        """End the engines that a notebook was adding when it ended. The cluster keeps its earlier size."""
        if self._joining and self._cluster is not None:
            _logger.info("engines %s are ended, because their notebook ended before they had joined", self._joining)
            self._cluster.give_up(tuple(self._joining))
            self._joining.clear()

    def _answer(self, client: _Client, request: DaemonRequest) -> None:
        value, error = None, None
        _logger.debug("request %s", request.name)
        try:
            value = getattr(self, f"_on_{request.name}")(client, request.number, *request.arguments)
        except Exception as raised:  # noqa: BLE001  # the client raises it
            _logger.info("request %s failed: %s", request.name, raised)
            error = raised if isinstance(raised, DistnbError) else ClusterError(traceback.format_exc())
        client.send(DaemonAnswer(request.number, value, error, self._engines))
        if request.name == "stop":
            self._finish(f"{client.who or 'a terminal'} stopped it")

    @property
    def _engines(self) -> dict[int, EngineProcess]:
        return {} if self._cluster is None else self._cluster.engines

    # -- requests: `_on_NAME(client, number, …)` ---------------------------------------------------------------------

    def _on_connect(self, client: _Client, number: int, who: str, version: str, take: bool) -> DetachedCluster | None:
        """Connect a notebook. Return the facts about the cluster, or None if it is to be started."""
        if version != __version__:
            raise ClusterError(
                f"The cluster {self.entry.name!r} was started by distnb {__version__}, and this is distnb {version}. "
                f"Connect with the same version; or end the cluster (distnb stop {self.entry.name})."
            )
        with self._free:
            holder = self._holder
            if holder is not None:
                if not take:
                    raise ClusterError(
                        f"The cluster {self.entry.name!r} is used by {holder.who}, and only one notebook at a time can "
                        "be connected. Disconnect there (%distnb disconnect), or take it over here (%distnb connect "
                        f"{self.entry.name} --take)."
                    )
                holder.send(Taken(who))
                if not self._free.wait_for(lambda: self._holder is not holder, _RELEASING_S):
                    raise ClusterError(
                        f"{holder.who} does not release the cluster {self.entry.name!r}: it does not answer, "
                        "perhaps in native code. Restart that kernel, and connect again."
                    )
            self._holder = client
            client.who = who
        _logger.info("%s has connected", who)
        if self._facts is not None and self._cluster is not None:
            engines = self._cluster.engines
            hosts = {engine: host for engine in engines if (host := self._cluster.host(engine))}
            self._facts = dataclasses.replace(self._facts, engines=len(engines), hosts=hosts)
        return self._facts

    def _on_plan(self, client: _Client, number: int) -> DetachedCluster:
        """Choose the engines' devices, and return the facts that the notebook needs before it listens for them."""
        options = self._options.options
        plan = self._plan = make_plan(options, self._options.machines, client.progress(number))
        remote = bool(plan.hosts)
        if remote:
            self._store = RendezvousStore(host=plan.address)
            self._heartbeats = HeartbeatListener(plan.address, self._keys)
        self._facts = DetachedCluster(
            name=self.entry.name,
            directory=self._directory,
            engines=len(plan.devices),
            hosts=dict(enumerate(plan.hosts)),
            notices=plan.notices,
            keys=self._keys,
            address=plan.address,
            ports=(self._reserve(plan.address), self._reserve(plan.address)) if remote else None,
            store=(self._store.host, self._store.port) if self._store is not None else None,
            data_limit_nbytes=options.data_limit_nbytes,
            packages=plan.packages,
            sync=options.sync,
        )
        return self._facts

    def _reserve(self, host: str) -> int:
        """Reserve a port, at which the notebook listens. The socket here is bound to it, and never listens."""
        reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._reserved.append(reserved)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
        return int(reserved.getsockname()[1])

    def _on_start(self, client: _Client, number: int) -> None:
        """Start the engines. The notebook listens for them already."""
        plan, facts = self._plan, self._facts
        assert plan is not None
        assert facts is not None
        host = f"[{facts.address}]" if ":" in facts.address else facts.address
        program_url, control_url, listener = "", f"ipc://{self._directory / CONTROL_NAME}", ""
        if facts.ports is None:
            listener = str(self._directory / PROGRAMS_NAME)
        else:
            program_url, control_url = (f"tcp://{host}:{port}" for port in facts.ports)
        connection = Connection(
            program_url=program_url,
            control_url=control_url,
            server_public=self._keys.server_public,
            client_public=self._keys.client_public,
            client_secret=self._keys.client_secret,
            notebook_pid=os.getpid(),
            listener=listener,
            heartbeat_url=self._heartbeats.url if self._heartbeats is not None else "",
            on_disconnect=self._options.options.on_disconnect or "continue",
        )
        self._cluster = Cluster(
            plan.devices,
            connection,
            on_exit=self._exited,
            launcher=plan.launcher(connection),
            processes=self._processes,
        )
        serve = self._store.serve if self._store is not None else lambda: None
        self._cluster.start(on_progress=client.progress(number), meanwhile=serve)

    def _exited(self, engine: int, pid: int, status: str) -> None:
        holder = self._holder
        if holder is not None:
            holder.send(Exited(engine, pid, status, self._engines))

    def _running(self) -> Cluster:
        if self._cluster is None:
            raise NoClusterError("The engines of this cluster have not been started.")
        return self._cluster

    def _on_engine_ready(self, client: _Client, number: int, engine: int) -> None:
        if self._cluster is not None:
            self._cluster.engine_ready(engine)

    def _on_engines(self, client: _Client, number: int) -> None:
        """Do nothing: every answer contains the engines."""

    def _on_restart(self, client: _Client, number: int, engines: tuple[int, ...]) -> None:
        self._running().restart(engines, on_progress=client.progress(number))

    def _on_place_further(
        self, client: _Client, number: int, there: list[PlacedEngine], count: int
    ) -> tuple[list[PlacedEngine], tuple[str, ...]]:
        assert self._plan is not None
        return place_further(self._plan, there, count, client.progress(number))

    def _on_add(self, client: _Client, number: int, devices: dict[int, Device], hosts: dict[int, str]) -> None:
        progress = client.progress(number)

        def report(text: str) -> None:
            if client.is_closed:
                raise ClusterError("The notebook has ended.")
            progress(text)

        self._joining.update(devices)
        self._running().add(devices, hosts, on_progress=report)

    def _on_joined(self, client: _Client, number: int) -> None:
        """Keep the further engines from here on, also if the notebook ends."""
        self._joining.clear()

    def _on_remove(self, client: _Client, number: int, engines: tuple[int, ...]) -> None:
        self._running().remove(engines)
        self._joining.difference_update(engines)

    def _on_notice_ends(self, client: _Client, number: int) -> None:
        self._running().notice_ends()

    def _on_stop(self, client: _Client, number: int) -> None:
        """End the cluster, and then this process."""
        registry.remove(self.entry)
        if self._cluster is not None:
            self._cluster.stop()

    def _on_summary(self, client: _Client, number: int) -> ClusterSummary:
        engines = self._engines.values()
        holder = self._holder
        cluster = self._cluster
        hosts = {} if cluster is None else {host: None for engine in self._engines if (host := cluster.host(engine))}
        return ClusterSummary(
            name=self.entry.name,
            engines=len(engines),
            ended=sum(bool(process.ended) for process in engines),
            devices=", ".join(str(process.device) for process in engines),
            hosts=", ".join(hosts),
            started=self._began,
            ends=self._ends,
            used_by="" if holder is None else holder.who,
            rss_nbytes=None if hosts else sum(_rss_nbytes(process.pid) for process in engines if not process.ended),
        )


class _Client:
    """A connection of a notebook or of a terminal. `who` names a connected notebook."""

    def __init__(self, pipe: Pipe[Any, Any]) -> None:
        self.who = ""
        self.is_closed = False
        self._pipe = pipe
        self._sending = threading.Lock()

    def receive(self) -> DaemonRequest | None:
        """Return the next request, or None when the client has gone."""
        try:
            found: DaemonRequest = self._pipe.recv()
        except (EOFError, OSError):
            return None
        except Exception:  # another version of distnb may send anything
            _logger.exception("a client's request cannot be read")
            return None
        return found

    def close(self) -> None:
        """Close the connection."""
        self.is_closed = True
        self._pipe.close()

    def send(self, message: Any) -> None:
        """Send a message. Do nothing if the client has gone."""
        with self._sending, suppress(OSError):
            try:
                self._pipe.send(message)
            except (pickle.PicklingError, TypeError, AttributeError):  # an error with an attribute that cannot be sent
                self._pipe.send(message._replace(error=ClusterError(str(message.error))))

    def progress(self, number: int) -> Callable[[str], None]:
        """Return a function that sends lines about the progress of a request."""
        return lambda text: self.send(DaemonProgress(number, text))


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
    """Read the options from standard input, answer with a line of JSON, and serve."""
    given: DaemonOptions = pickle.load(sys.stdin.buffer)
    answer = os.fdopen(os.dup(1), "w")
    if os.fork():  # the notebook waits for this process, and the daemon is nobody's child
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        daemon = Daemon(given)
        log = daemon.open_log()
    except BaseException as error:  # noqa: BLE001  # the notebook raises it
        text = str(error) if isinstance(error, DistnbError) else traceback.format_exc()
        print(json.dumps({"error": text, "kind": type(error).__name__}), file=answer, flush=True)
        os._exit(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print(json.dumps({"socket": daemon.entry.socket}), file=answer, flush=True)
    answer.close()
    daemon.serve()
    os._exit(0)  # the threads of clients may wait


if __name__ == "__main__":
    main()
