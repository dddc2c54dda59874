"""The coordinator's channel to the workers, and the thread that reads it.

Closures are sent by the thread that schedules them, or by this thread after a reply. Each closure is a program of one
worker. The supervisor follows it, so that it can be ended, and its output is shown like that of any program.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from distnb.errors import MessageError, ServerLost, StartError
from distnb.notebook.front_end import FrontEnd
from distnb.notebook.programs.failures import reported
from distnb.notebook.programs.outcome import Outcome, oldest_awaiting
from distnb.notebook.programs.supervision import GiveUpOn
from distnb.notebook.session_part import Ask, SessionPart
from distnb.runtime.interrupts import drain
from distnb.servers.closure_messages import AssignTask, RunClosure, ServersReplaced
from distnb.servers.coordinator.link import (
    ClosureAbandoned,
    ClosureEnded,
    ClosureReclaimed,
    Event,
    LinkClosed,
    ServerGone,
    ServerUp,
    UserInterrupted,
    WorkerLost,
    WorkerUp,
)
from distnb.servers.notebook.closures_drawing import runs_text, server_texts
from distnb.servers.notebook.coordinator_watch import CoordinatorWatch
from distnb.servers.variables.here import servers_here
from distnb.topology import PS, WORKER, Task
from distnb.wire.messages import Died, ErrorReport, Hello, Output, ProgramReclaimed, Reply, Unreadable

if TYPE_CHECKING:
    from distnb.notebook.engines import Engines
    from distnb.servers.client import ServerConnections
    from distnb.servers.coordinator.coordinator import ClusterCoordinator

__all__ = ["ClosureChannel"]

_logger = logging.getLogger("distnb.servers.notebook")

_MEETING_S = 30.0
_COORDINATOR = 0  # the number of this process at the parameter servers; engine e has the number e + 1


class ClosureChannel(SessionPart):
    """The session's part that implements `coordinator.link.ClusterLink` on its engines.

    Attributes:
        workers: The indices of the worker tasks.
        replicas_per_worker: The number of engines of each worker.
        closed: Whether the cluster was stopped.
    """

    def __init__(
        self, engines: Engines, ask: Ask, front: Callable[[], FrontEnd], open_error: Callable[[Any], Any]
    ) -> None:
        super().__init__(engines, ask, front, open_error)
        self._tasks = engines.tasks or {engine: Task(WORKER, engine) for engine in engines.ids}
        self._engines_of: dict[int, tuple[int, ...]] = {}  # by worker, in replica order
        self.workers = self._note_workers()
        self.replicas_per_worker = len(self._engines_of[self.workers[0]])
        self.closed = False
        self._supervisor = engines.supervisor
        self._peers, self._url = engines.open_peers()
        self._addresses: dict[int, Any] = {}
        self._client: ServerConnections | None = None
        # Only the thread changes the following, but any thread may add a program that it sends.
        self._under_way: dict[int, Outcome] = {}  # by program
        self._up: dict[int, int] = {}  # the pid of each connected engine
        self._listeners: list[tuple[Callable[[Event | None], None], Callable[[], float | None]]] = []
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._peers.watch(self._wake_fd)
        self._unsubscribe = self._supervisor.events.subscribe(self._handle_event)
        self._thread = threading.Thread(target=self._serve, name="distnb-closures", daemon=True)
        self._thread.start()

    def _note_workers(self) -> tuple[int, ...]:
        """Note the engines of each worker that the cluster has, and return the workers."""
        found: dict[int, tuple[int, ...]] = {}
        for engine, task in sorted(self._tasks.items()):
            if task.job == WORKER:
                found[task.index] = (*found.get(task.index, ()), engine)
        self._engines_of = found
        return tuple(sorted(found))

    # -- the assignment of tasks -----------------------------------------------------------------------------------

    def enlist(self, engines: Iterable[int]) -> None:
        """Send tasks to engines that have just started. The caller holds the session's turn."""
        self.workers = self._note_workers()
        engines = [engine for engine in engines if engine in self._tasks]
        servers = [engine for engine in engines if self._tasks[engine].job == PS]
        # All replicas of a worker start over together, because the new one lacks the state of the others.
        indices = sorted({self._tasks[engine].index for engine in engines if self._tasks[engine].job == WORKER})
        groups = [self._engines_of[index] for index in indices]
        workers = [engine for group in groups if set(group) <= set(self._engines.left) for engine in group]
        if servers:
            for engine, address in self._ask(servers, self._task_message).items():
                self._accept_server(self._tasks[engine].index, address)
            # The other workers receive the new addresses before the closures that need them.
            others = [engine for engine in self._up if engine in self._engines.left and engine not in workers]
            self._run(partial(self._peers.send, others, ServersReplaced(dict(self._addresses))))
        if workers:
            self._run(lambda: [self._up.pop(engine, None) for engine in workers])
            self._ask(workers, self._task_message)
            self._await_hellos(workers)
        for engine in servers:
            self._run(partial(self._report, ServerUp(self._tasks[engine].index)))

    def _task_message(self, program: int, team: Any) -> AssignTask:
        listener = self._peers.listener
        path = listener.path if listener is not None else ""
        spread = bool(self._engines.hosts())
        return AssignTask(
            program=program,
            team=team,
            tasks=self._tasks,
            listener=path,
            url=self._url,
            servers=dict(self._addresses),
            spread=spread,
        )

    def _accept_server(self, server: int, address: Any) -> None:
        from distnb.servers.client import ServerConnections

        known = self._addresses
        self._addresses = {**known, server: address}
        if self._client is None:
            self._client = ServerConnections({server: address}, _COORDINATOR, self._engines.keys)
        else:
            self._client.replace(server, address)

    def _await_hellos(self, engines: Sequence[int]) -> None:
        """Wait until workers have sent their hello on the new channel."""
        hellos = [self._supervisor.hellos[engine] for engine in engines]

        self._run(self._peers.accept)
        deadline = time.monotonic() + _MEETING_S
        while missing := [hello for hello in hellos if self._up.get(hello.engine) != hello.pid]:
            if all(hello.engine not in self._engines.left for hello in missing):
                return  # these engines ended meanwhile
            if time.monotonic() > deadline:
                raise StartError(
                    f"Engine {missing[0].engine} did not open its channel for closures in {_MEETING_S:.0f} s. "
                    f"Restart it: %distnb restart {missing[0].engine}."
                )
            time.sleep(0.001)

    def leave(self, engines: Iterable[int], how: str) -> None:
        """Release engines that are about to be replaced or removed. Other workers run their closures."""
        for engine in engines:
            if engine in self._tasks:
                self._run(partial(self._lose, engine, how))

    def forget(self, engines: Iterable[int]) -> None:
        """Forget workers that were removed."""
        self.workers = self._note_workers()

    # -- ClusterLink -----------------------------------------------------------------------------------------------

    @property
    def servers(self) -> ServerConnections:
        """The connections of this process to the parameter servers."""
        if self._client is None:
            from distnb.errors import NoClusterError

            raise NoClusterError(
                "The cluster has no parameter servers. Start a cluster with servers: %distnb stop, then %distnb start "
                "--workers 2 --ps 1, or distnb.start(workers=2, ps=1)."
            )
        return self._client

    def number(self) -> int:
        """Return the serial number of the next program."""
        return self._engines.dispatch.number()

    def send(self, worker: int, message: RunClosure) -> None:
        """Send a closure, from any thread."""
        engines, program = self._engines_of[worker], message.program
        if len(engines) > 1:
            message = message._replace(team=self._engines.team_of(engines))
        outcome = self._under_way[program] = Outcome(program, engines, team=message.team)
        if len(engines) == 1:
            self._supervisor.quiet[program] = outcome
        else:
            self._supervisor.program_began(program, engines)
        try:
            if all(map(self._peers.is_near, engines)):
                self._peers.send(engines, message)  # if an engine has ended, its pidfd reports that
            else:
                self._do(partial(self._peers.send, engines, message))
        except BaseException:
            del self._under_way[program]
            for engine in engines:
                self._note_end(engine, program)
            raise

    def reclaim(self, worker: int, program: int) -> None:
        """Ask the worker to return a program that it has not begun."""
        self._supervisor.reclaim(self._engines_of[worker][0], program)

    def interrupt(self, program: int) -> None:
        """End a program."""
        self._supervisor.interrupt(program)

    def error(self, report: ErrorReport, worker: int, closure: str) -> BaseException:
        """Return the exception that a worker has reported."""
        device = self._engines.cluster.engines[self._engines_of[worker][0]].device
        who = f"orker {worker} ({device}), in {closure},"
        lines = self._front().callers_lines
        return reported(report, f"W{who}", f"w{who}", callers_lines=lines, opened=self._open_error)

    def watch(self, coordinator: ClusterCoordinator) -> None:
        """Show the progress of a coordinator."""
        self._front().watch(coordinator, CoordinatorWatch)

    def catch_up(self) -> None:
        """Show the workers' output so far."""
        if self._is_shown():
            self._front().catch_up()
        elif not self.closed:
            self._supervisor.await_flush(self._up, 1.0)

    def subscribe(self, listener: Callable[[Event | None], None], deadline: Callable[[], float | None]) -> None:
        """Report the workers that are up to a listener, and then all events."""

        def begin() -> None:
            for worker in self.workers:
                if self._is_up(worker):
                    listener(WorkerUp(worker))
            self._listeners.append((listener, deadline))

        self._run(begin)

    # -- SessionPart -------------------------------------------------------------------------------------------------

    def user_interrupts(self) -> bool:
        """End all closures that are under way at the user's request. Return False if there are none."""
        busy = bool(self._under_way)
        self._run(partial(self._report, UserInterrupted()))
        return busy

    def work(self) -> dict[str, tuple[str, str]]:
        """Return the work of each worker and the content of each parameter server as texts, by task."""
        from distnb.servers.coordinator.coordinator import running_coordinators

        found: dict[str, tuple[str, str]] = {}
        for coordinator in running_coordinators():
            for each in coordinator.status().workers:
                seconds = f" for {each.seconds:.1f} s" if each.state == "running" else ""
                runs = [f"{runs_text(each)}{seconds}"] if each.state != "idle" else []
                found[str(Task(WORKER, each.worker))] = (", ".join([*runs, f"{each.done:,} done"]), "")
        if found and servers_here.access is not None:
            with contextlib.suppress(ServerLost):
                for server, text in server_texts(servers_here.access.requests.placement()).items():
                    found[str(Task(PS, server))] = ("", text)
        return found

    def close(self) -> None:
        """Close the channel when the cluster is stopped."""
        if self.closed:
            return
        self.closed = True
        self._unsubscribe()
        self._do(partial(self._report, LinkClosed()))
        self._jobs.put(None)
        os.eventfd_write(self._wake_fd, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        self._peers.close()
        os.close(self._wake_fd)
        if self._client is not None:
            self._client.close()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _do(self, job: Callable[[], object]) -> None:
        """Run a job on the thread."""
        self._jobs.put(job)
        os.eventfd_write(self._wake_fd, 1)

    def _run(self, job: Callable[[], object]) -> None:
        """Run a job on the thread, and wait for its end."""
        if threading.current_thread() is self._thread:
            job()
            return
        done, failed = threading.Event(), []

        def run() -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
                failed.append(error)
            done.set()

        self._do(run)
        done.wait()
        if failed:
            raise failed[0]

    def _serve(self) -> None:
        while True:
            readable = self._peers.wait(self._patience_s())
            if self._wake_fd in readable:
                drain(self._wake_fd)
                while not self._jobs.empty():
                    job = self._jobs.get()
                    if job is None:
                        return
                    self._guarded(job)
            received = False
            for engine, message in self._peers.receive(readable):
                received = True
                self._guarded(self._handle, engine, message)
            if not received:
                self._report(None)

    def _guarded(self, job: Callable[..., object], *args: Any) -> None:
        try:
            job(*args)
        except Exception:
            _logger.exception("a job of the thread failed")
            traceback.print_exc()  # a defect in distnb; the thread must go on, since others wait for it

    def _patience_s(self) -> float | None:
        deadlines = [each for _, deadline in self._listeners if (each := deadline()) is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _report(self, event: Event | None) -> None:
        for listener, _ in tuple(self._listeners):
            self._guarded(listener, event)

    def _handle(self, engine: int, message: Any) -> None:
        if engine not in self._tasks:
            return  # it was removed
        worker = self._tasks[engine].index
        if isinstance(message, Hello):
            _logger.info("engine %d of worker %d has connected: process %d", engine, worker, message.pid)
            self._up[engine] = message.pid
            if self._is_up(worker):
                self._report(WorkerUp(worker))
            return
        if isinstance(message, Unreadable | MessageError):
            # It replaces the reply to the oldest program, since engines reply in order.
            outcome = oldest_awaiting(list(self._under_way.values()), engine)
            if outcome is None:
                return
            if isinstance(message, MessageError):
                text = str(message)
                report = ErrorReport(
                    pickled=None, type_name="distnb.errors.MessageError", text=text, traceback=(text,), rendered=(text,)
                )
            else:
                report = message.error
            message = Reply(program=outcome.program, status="error", error=report)
            # The worker's other replicas have begun, and would wait for this one.
            self._supervisor.failed(engine, outcome.program, f"{report.type_name}: {report.text}")
        else:
            self._note_end(engine, message.program)
        outcome = self._under_way.get(message.program)
        if outcome is not None:  # otherwise its worker was lost
            outcome.receive(engine, message)
            self._advance(worker, outcome)

    def _note_end(self, engine: int, program: int) -> None:
        """Have the supervisor follow a program no longer on an engine."""
        if self._supervisor.quiet.pop(program, None) is None:
            self._supervisor.replied(engine, program)

    def _give_up(self, engine: int, program: int) -> None:
        outcome = self._under_way.get(program)
        if outcome is not None and outcome.awaits(engine):
            outcome.mark_lost(engine, None)
            self._advance(self._tasks[engine].index, outcome)

    def _advance(self, worker: int, outcome: Outcome) -> None:
        """Report a closure once every engine has replied, or has been given up on."""
        if not outcome.complete:
            return
        if outcome.stuck:  # their replies may still arrive, so the closure stays under way
            failed = next((reply for reply in outcome.replies.values() if reply.status == "error"), None)
            self._report(ClosureAbandoned(worker, outcome.program, failed))
            return
        del self._under_way[outcome.program]
        if outcome.team is not None and not outcome.left_group_whole:
            self._engines.teams.renew(after=outcome.team)
        self._report(ClosureEnded(worker, *outcome.decisive()))

    def _is_up(self, worker: int) -> bool:
        return all(engine in self._up for engine in self._engines_of[worker])

    def _lose(self, engine: int, how: str) -> None:
        task = self._tasks[engine]
        _logger.info("%s (engine %d) is lost: it %s", task, engine, how)
        if task.job == PS:
            if self._client is not None:
                self._client.lost(task.index, how)
            self._report(ServerGone(task.index, how))
            return
        for message in self._peers.part(engine):
            self._handle(engine, message)
        was_up = self._is_up(task.index)
        if self._up.pop(engine, None) is None:
            return
        for program in [each for each, outcome in tuple(self._under_way.items()) if engine in outcome.engines]:
            del self._under_way[program]
            self._note_end(engine, program)
        if was_up:
            self._report(WorkerLost(task.index, how))

    # -- the supervisor's thread -------------------------------------------------------------------------------------

    def _handle_event(self, event: Any) -> None:
        if isinstance(event, Output):
            if not self._is_shown() and event.engine in self._up:
                stream = sys.stdout if event.stream == "stdout" else sys.stderr
                stream.write(event.text)
                stream.flush()
        elif isinstance(event, Died):
            self._do(partial(self._remove_dead, event))
        elif isinstance(event, GiveUpOn):
            self._do(partial(self._give_up, event.engine, event.program))
        elif isinstance(event, ProgramReclaimed):
            self._do(partial(self._report_reclaimed, event))

    def _remove_dead(self, event: Died) -> None:
        pid = self._up.get(event.engine)
        if event.engine in self._tasks and pid in (None, event.pid):  # a replacement may be up already
            self._lose(event.engine, event.exit_status)

    def _report_reclaimed(self, event: ProgramReclaimed) -> None:
        if self._under_way.pop(event.program, None) is not None and event.engine in self._tasks:
            self._note_end(event.engine, event.program)
            self._report(ClosureReclaimed(self._tasks[event.engine].index, event.program))

    def _is_shown(self) -> bool:
        """Return whether a front end shows the replicas' output. A plain script has no front end."""
        return self._front() != FrontEnd()
