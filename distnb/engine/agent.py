"""The agent, which receives programs from the notebook, runs them on the engine's main thread, and replies."""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import zmq
from tornado.ioloop import IOLoop

from distnb import strategies
from distnb.accelerators import torch_device
from distnb.cluster.process_environment import PRELOAD_VARIABLE
from distnb.collectives.group.groups import groups
from distnb.compat.ipython_internals import redirect_errors
from distnb.engine import launched_processes, unattended
from distnb.engine.absence import absence_of
from distnb.engine.control import Control
from distnb.engine.debugging import debugger, error_reports
from distnb.engine.debugging.console import Console
from distnb.engine.debugging.kept import KeptFailure
from distnb.engine.executor import Executor
from distnb.engine.guard import Guard
from distnb.engine.namespace import object_operations
from distnb.engine.namespace.engine_namespace import EngineNamespace
from distnb.engine.namespace.engine_objects import ObjectsOfTeams
from distnb.engine.output import progress_bars, telemetry, widget_comms
from distnb.engine.output.streams import ReplicaDisplayPublisher, ReplicaStream, pipe_descriptor
from distnb.engine.profiling import Profile
from distnb.engine.program_kinds import ProgramKind
from distnb.engine.started_threads import note_work_of_pools, threads_awaited
from distnb.engine.users_loop import UsersLoop
from distnb.engine.warming import warm_up_when_idle
from distnb.errors import CollectiveError, ProgramAborted
from distnb.features import require
from distnb.input import dataset as datasets
from distnb.input.sources import workers
from distnb.objects.code import spawned_processes
from distnb.objects.packing import Packed
from distnb.runtime import spmd, step_count
from distnb.runtime.inspection import inspecting
from distnb.runtime.program_ends import program_ended
from distnb.runtime.this_process import this_process
from distnb.topology import Device, Team
from distnb.values import DistributedValues
from distnb.values.structure import select
from distnb.wire import unix_socket
from distnb.wire.channel import Link, ProgramLink
from distnb.wire.control_channel import ControlLink
from distnb.wire.described_values import Result
from distnb.wire.messages import (
    Apply,
    CallFunction,
    EngineState,
    ErrorReport,
    Hello,
    PostMortem,
    ProgramEnded,
    Reply,
    RunCell,
    Unreadable,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.cluster.connection import Connection

__all__ = ["Agent", "install"]

_logger = logging.getLogger("distnb.engine")

_DRAWING_S = 0.7  # the time that each of several failed replicas has to report its error
_DRAWING_CAUSE_S = 0.9  # just below the time that the notebook waits for a program that it has ordered to end
_DESCRIBING_S = 1.0  # the time to describe the effects of a program that was ordered to end; the notebook waits as long
_LINGER_MS = 1  # the next small call often follows at once, and a pass through the event loop costs as much as the call


class Agent:
    """The server of programs on the engine's main thread. It runs them one at a time and in order.

    All programs share one namespace, the user namespace of the engine's IPython shell.

    Attributes:
        kinds: The kind of program by class of message. A feature adds its own: see `program_kinds`.
        notices: The handlers of messages that are not programs and get no reply, by class of message.
        suspensions: Functions to call before each program that is not a feature's own.
        connection, engine, device: The cluster, and this engine's number and device in it.
        namespace: This side of the namespace that the engine shares with the notebook.
    """

    def __init__(self, shell: InteractiveShell, connection: Connection, engine: int, device: Device) -> None:
        self._shell = shell
        self.connection = connection
        self.engine = engine
        self.device = device
        self._process: spmd.SpmdProcess  # set by the first program
        self._guard = Guard()
        workers.raise_worker_errors_only_while(lambda: self._guard.running)
        self._failure: KeptFailure | None = None
        self._who, self._size = "", 1  # this replica's name in the latest program, and the number of its replicas
        place = str(torch_device(device))
        self._objects = ObjectsOfTeams(shell.user_ns, "cpu" if place.startswith("cpu") else place)
        self.namespace = EngineNamespace(shell.user_ns, self._objects, engine=engine)
        context: zmq.Context[Any] = zmq.Context()
        keys: dict[str, Any] = {
            "server_public": connection.server_public.encode(),
            "client_public": connection.client_public.encode(),
            "client_secret": connection.client_secret.encode(),
        }
        self._programs: ProgramLink
        if connection.listener:
            self._programs = unix_socket.connect(connection.listener, engine)
        else:
            self._programs = Link(context, engine, connection.program_url, **keys)
        self._links = [self._programs]
        self._loop = IOLoop.current()
        self._has_returned = False  # whether a notebook is there to which this thread has not sent its hello
        self._latest: Any = None  # the latest program of a team: its message
        self._latest_error: ErrorReport | None = None  # only if the engine stays
        self._absence = absence_of(
            connection, lambda: self._hello(returning=True), lambda: self._loop.add_callback(self._reconnect)
        )
        pipes = {}
        logs = {}
        streams: tuple[tuple[int, Literal["stdout", "stderr"]], ...] = ((1, "stdout"), (2, "stderr"))
        for descriptor, name in streams:
            reading, logs[name], forward = pipe_descriptor(engine, descriptor, name, self._running, self._emit)
            pipes[reading] = forward
        self._telemetry = telemetry.Telemetry()
        self._console = Console(engine, self._guard, self._running, self._emit)
        self._control = Control(
            engine,
            Path(connection.directory),
            lambda: ControlLink(context, engine, connection.control_url, **keys, monitored=self._absence.is_followed),
            self._guard,
            self._console,
            absence=self._absence,
            free_collectives=groups.abort,
            hold_limits=groups.hold_limits,
            sample=self._telemetry.sample,
            memory=telemetry.memory,
            pipes=pipes,
        )
        self._serving = self._listening = False
        self._served = time.monotonic()
        self._users_loop = UsersLoop()
        self._executor = Executor(engine, shell, self._control, self._users_loop)
        self.kinds: dict[type, ProgramKind] = {
            RunCell: ProgramKind(run=self._run_cell, replica=self.replica_in, drops_failure=True),
            CallFunction: ProgramKind(run=self._call, replica=self.replica_in, drops_failure=True),
            Apply: ProgramKind(run=self._apply, replica=self.replica_in, measured=False),
            PostMortem: ProgramKind(run=self._post_mortem, replica=self._failed_replica, measured=False),
        }
        self.notices: dict[type, Callable[[Any], None]] = {}
        self.suspensions: list[Callable[[], None]] = []
        self._absence.add_programs(self)
        self._adapt_shell(logs)
        note_work_of_pools()
        this_process.note_names = self.namespace.note_names
        this_process.live_sink = self._control.live
        groups.when_failed = self._control.end_program

    def serve(self) -> None:
        """Begin to serve on the running event loop of this thread, and send `Hello`."""
        hello = self._hello()
        self._leave = signal.signal(signal.SIGTERM, self._terminate)
        self._control.emit(hello, urgent=True)  # first: the notebook drops what comes before
        self._control.start()
        _logger.info("engine %d serves on %s", self.engine, self.device)
        self._programs.send(hello)
        self._listen()
        self._loop.add_callback(self._serve_programs)
        # The objects of torch and IPython are never garbage, so later collections need not visit them.
        gc.freeze()
        if os.environ.get(PRELOAD_VARIABLE) != "":
            warm_up_when_idle(lambda: 0.0 if self._serving else time.monotonic() - self._served)

    def _hello(self, *, returning: bool = False) -> Hello:
        """Return this engine's introduction, to its first notebook or to a later one."""
        state = None
        if returning:
            latest, team = (self._latest.program, self._latest.team) if self._latest is not None else (0, None)
            process = this_process.replica
            state = EngineState(
                program=latest,
                engines=team.engines if team is not None else (),
                unseen=self._absence.unseen,
                kept=self._absence.kept,
                running=self._control.running is not None,
                serial=self._objects.serial,
                generation=team.generation if team is not None else 0,
                teams=self._objects.keys,
                strategies=() if process is None else tuple(strategy.spec for strategy in process.strategies),
                error=self._latest_error,
            )
        return Hello(self.engine, os.getpid(), socket.gethostname(), state)

    def _reconnect(self) -> None:
        """Connect to another notebook for programs, once the programs of the last one have ended."""
        self._has_returned = True
        if self._serving:
            return  # the program's end calls this again
        self._has_returned = False
        if self.connection.listener:
            self._ignore()
            self._programs.close()
            try:
                connected = unix_socket.connect(self.connection.listener, self.engine)
            except OSError:  # that notebook has ended, too
                _logger.info("the notebook cannot be reached for programs")
                return
            self._links = [connected, *(link for link in self._links if link is not self._programs)]
            self._programs = connected
            self._listen()
        self._programs.send(self._hello(returning=True))

    def _running(self) -> tuple[int, int] | None:
        return self._control.running

    def _emit(self, event: Any, *, urgent: bool = False) -> None:
        self._control.emit(event, urgent=urgent)

    # -- programs --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        # The event loop watches the descriptor itself. A ZMQStream's bookkeeping costs as much as a small program.
        for link in self._links:
            self._loop.add_handler(link.fileno(), self._serve_programs, self._loop.READ)
        self._listening = True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM, which a scheduler (Slurm's scancel) may send in the middle of a program.

        While a program runs, the process dies of the signal. If the handler left the program as `exit()` does, this
        replica's part would count as finished, and the other replicas would report collectives that do not match.
        """
        if self._serving:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif callable(self._leave):
            self._leave(number, frame)

    def _serve_programs(self, *event: Any) -> None:
        """Run every program that has arrived.

        A descriptor of ZeroMQ signals only messages that arrive after the socket was last found empty. The loop
        therefore ends with an attempt to receive that finds it empty.
        """
        if self._serving:  # the user's code runs the event loop; the loop below reads the message after that program
            self._ignore()
            return
        self._serving = True
        latest = None
        try:
            while True:
                for link in self._by_turns(latest):
                    try:
                        message = link.receive(_LINGER_MS if link is latest else 0)
                    except Exception as error:  # noqa: BLE001  # the notebook waits for a reply, whatever the error
                        link.send(Unreadable(error_reports.report(error)))
                        break
                    if message is not None:
                        latest = link
                        if (handle := self.notices.get(type(message))) is not None:
                            handle(message)
                        else:
                            kind = self._kind_of(message)
                            if self._failure is not None and kind.drops_failure:
                                # Releasing a failed cell's objects may take seconds: a DataLoader waits for workers.
                                self._guard.release(self._forget_failure)
                            link.send(self.perform(message))
                            if self._failure is not None and not self._failure.text:
                                self._guard.release(self._failure.limit if kind.keeps_failure else self._forget_failure)
                        break
                else:
                    return
        except BaseException:
            self._loop.add_callback(self._serve_programs)  # more may wait, and no event announces them
            raise
        finally:
            self._serving, self._served = False, time.monotonic()
            if any(link.ended for link in self._links):
                _logger.info("a connection for programs has ended")
                self._ignore()
                self._links = [link for link in self._links if not link.ended]
            if not self._listening and not self._programs.ended:
                self._listen()
            if self._has_returned:
                self._reconnect()

    def _by_turns(self, latest: ProgramLink | None) -> list[ProgramLink]:
        """Return the links in the order to poll them: the latest program's link last, since the poll waits there."""
        if latest is None or len(self._links) == 1:
            return self._links
        return [*(link for link in self._links if link is not latest), latest]

    def _ignore(self) -> None:
        if self._listening:
            for link in self._links:
                self._loop.remove_handler(link.fileno())
            self._listening = False

    def _kind_of(self, message: Any) -> ProgramKind:
        """Return the kind of a program. Install the feature that adds it first if necessary."""
        if type(message) not in self.kinds:
            require("programs", type(message).__module__)(self)
        return self.kinds[type(message)]

    def receive_from(self, link: ProgramLink) -> None:
        """Receive programs from one more link."""
        self._ignore()  # all links are watched again after the running program
        self._links = [*self._links, link]

    def stop_receiving(self, link: ProgramLink) -> None:
        """Stop receiving programs from a link that is about to be closed."""
        self._ignore()
        self._links = [each for each in self._links if each is not link]

    def _forget_failure(self) -> None:
        self._failure = None

    def perform(self, message: Any) -> Reply:
        """Run one program to its end, and return the reply. It never raises."""
        kind = self._kind_of(message)
        replica = kind.replica(message)
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("program %d began: %s, replica %d", message.program, type(message).__name__, replica)
        self._latest = message
        step_count.watch_optimizers()
        datasets.program_began()
        self._console.refusal = kind.refusal
        self._control.program_began(message.program, replica, self._size, measured=kind.measured)
        began = time.monotonic()
        outer = self._users_loop.enter()
        try:
            reply = kind.run(message, replica)
        except BaseException as error:  # noqa: BLE001  # whatever user code raises is reported, and the engine lives on
            reply = self.failed(message.program, error)
        finally:
            self._users_loop.leave(outer)
        _logger.debug("program %d ended: %s", message.program, reply.status)
        if self._absence.is_followed:
            self._latest_error = reply.error
        program_ended()
        debugger.stop_stepping()
        self._console.leave()
        self._console.stopped_in = None
        if reply.status == "ok" and not isinstance(message, RunCell):
            # The reply itself reports a call that succeeded. Waking both control threads would double the call's cost.
            self._control.program_ended(None)
            return reply
        reply = reply._replace(seconds=time.monotonic() - began)
        summary = f"{reply.error.type_name}: {reply.error.text}" if reply.error else ""
        # The error is in no local variable: its traceback leads to this frame, and the cycle would keep all objects of
        # the program alive.
        where = ""
        if self._failure is not None and reply.status != "ok":
            where = telemetry.where_it_failed(self._failure.error)
        self._control.program_ended(
            ProgramEnded(engine=self.engine, program=message.program, status=reply.status, summary=summary, where=where)
        )
        return reply

    def _failed_replica(self, message: PostMortem) -> int:
        self._suspend_features()
        return self._failure.replica if self._failure is not None else 0

    def _suspend_features(self) -> None:
        for suspend in self.suspensions:
            suspend()

    def replica_in(self, message: Any) -> int:
        """Return this engine's replica number in a program of a team."""
        self._suspend_features()
        replica: int = message.team.rank_of(self.engine)
        self._who, self._size = f"replica {replica} ({message.team.devices[replica]})", message.team.size
        return replica

    def failed(self, program: int, error: BaseException, value: Any = None, *, alone: bool = False) -> Reply:
        """Return the reply of a program that raised. With `alone` the error is not packed with the namespace."""
        datasets.program_failed()
        cause, reason = groups.take_cause()
        # Report the cause instead of its consequence: a wait in C++ that was ended only raises a RuntimeError.
        if cause is not None and cause is not error and not self._guard.interrupted:
            in_c = type(error) is RuntimeError and isinstance(cause, CollectiveError)
            if in_c or self._guard.aborted or isinstance(error, ProgramAborted):
                if not in_c:
                    cause.add_note(reason)
                error = cause.with_traceback(cause.__traceback__ or error.__traceback__)
        self._keep(error)
        report = None
        if error is cause or not self._guard.aborted:
            try:
                report = self._report(program, error, None if alone else self.namespace.pack_error)
            except (KeyboardInterrupt, ProgramAborted):
                pass  # the error's __str__ is user code, too, and the order ended it
        if report is None or self._guard.interrupted:
            return Reply(program=program, status="interrupted" if self._guard.interrupted else "aborted", value=value)
        return Reply(program=program, status="error", error=report, value=value)

    def _report(
        self, program: int, error: BaseException, pack: Callable[[BaseException], Packed] | None
    ) -> ErrorReport:
        """Describe the error of a program. `pack` is the namespace's; closures, which do not use it, pass None."""
        draw = partial(error_reports.report, error, pack)
        if self._guard.aborted:
            return self._guard.call_last(draw, _DRAWING_CAUSE_S)
        return self._guard.call(program, draw, _DRAWING_S)

    def _keep(self, error: BaseException) -> None:
        """Keep the frames of a failed program for a debugger."""
        running, stopped = self._running(), self._console.stopped_in
        frames = stopped[1] if stopped is not None and stopped[0] is error else None
        self._failure = KeptFailure(
            who=self._who, replica=running[1] if running is not None else 0, error=error, stopped_in=frames
        )

    def guarded(self, program: int, body: Callable[[], Any]) -> Any:
        """Run a part of a program so that the notebook can end it."""
        return self._guard.call(program, body)

    def join(self, team: Team, replica: int, *, nothing_new: bool = False) -> None:
        """Become a replica of a team, in its process group. For `nothing_new` see `spmd.enter`."""
        group = groups.join(team, replica, self.device, supervised=True)
        self._process = spmd.enter(team, replica, self.device, group, nothing_new=nothing_new)

    def _run_cell(self, message: RunCell, replica: int) -> Reply:
        program, mark = message.program, None
        profile = Profile() if message.profiled else None
        self._telemetry.detailed = message.detailed
        failed: BaseException | None = None
        caught = False
        there = set(multiprocessing.active_children())

        def body() -> None:
            nonlocal mark
            self.join(message.team, replica)
            self.namespace.open(message.snapshot, replica)
            mark = self.namespace.begin(message.source)
            groups.program_began(program)
            if message.only is None or replica in message.only:
                strategy = strategies.resolve(message.strategy)
                scope = strategy.scope() if message.in_scope else nullcontext()
                with threads_awaited(), strategy.cell(), scope, profile or nullcontext():
                    self._executor.run(message.source, message.filename, message.function)
                    self.namespace.refuse_placeholders(mark)
            self._shell.events.trigger("post_execute")  # figures that were drawn are shown now
            self._completed()

        try:
            self._guard.call(program, body)
            caught = self._guard.caught
        except BaseException as error:  # noqa: BLE001  # whatever user code raises is reported, and the engine lives on
            failed = error
            if self._guard.interrupted:
                # Workers do not receive the interrupt, and a DataLoader waits five seconds for each that is at work.
                workers.end_processes(set(multiprocessing.active_children()) - there)
            groups.program_failed()
        results, interrupt = None, None
        if mark is not None:
            results, interrupt = self._described(program, partial(self.namespace.finish, mark))
        failed = interrupt or failed
        trace = profile.trace() if profile is not None and not self._guard.aborted else None
        try:
            if failed is None:
                changed = self._process.changed_by_hand()
                return Reply(program=program, status="ok", value=results, changed=changed, profile=trace, caught=caught)
            return self.failed(program, failed, results)._replace(profile=trace)
        finally:
            failed = interrupt = None  # its traceback holds this frame: a cycle would keep all objects of the cell

    def _described(
        self, program: int, describe: Callable[[], Result | None]
    ) -> tuple[Result | None, KeyboardInterrupt | None]:
        """Describe the effects of a program. Return them, and the user's interrupt if one ended the description.

        The description pickles the user's objects, so it runs user code, which may take any time.
        """
        if self._guard.aborted:  # by an interrupt, or by another replica's failure
            try:
                return self._guard.call_last(describe, _DESCRIBING_S), None
            except (KeyboardInterrupt, ProgramAborted):
                return None, None
        try:
            return self._guard.call(program, describe, math.inf), None
        except KeyboardInterrupt as interrupt:
            return None, interrupt

    def _call(self, message: CallFunction, replica: int) -> Reply:
        def body() -> Any:
            args, kwargs = self.namespace.open_call(message.snapshot, replica)
            strategy = strategies.resolve(message.strategy)
            with threads_awaited():
                if message.method:
                    with self._process.agreement.left_to_caller():
                        result = getattr(strategy, message.method)(*args, **kwargs)
                else:
                    function, *rest = select(args, replica)
                    result = function(*rest)
            return self.namespace.close_call(result)

        return self.run_together(
            message.program, message.team, replica, body, nothing_new=message.snapshot.binds_nothing
        )

    def _apply(self, message: Apply, replica: int) -> Reply:
        def body() -> Any:
            with threads_awaited():
                return object_operations.carry_out(self.namespace, message)

        if message.operation in object_operations.QUIET:
            return Reply(program=message.program, status="ok", value=self._guard.call(message.program, body))
        return self.run_together(message.program, message.team, replica, body)

    def run_together(
        self, program: int, team: Team, replica: int, body: Callable[[], Any], *, nothing_new: bool = False
    ) -> Reply:
        """Run a function that may communicate with the rest of the team.

        Args:
            nothing_new: See `spmd.enter`.
        """
        before = step_count.steps

        def joined() -> Any:
            self.join(team, replica, nothing_new=nothing_new)
            groups.program_began(program)
            value = body()
            self._completed()
            return value

        try:
            value = self._guard.call(program, joined)
        except BaseException as error:  # noqa: BLE001  # its effects until then are reported, as of a cell
            groups.program_failed()
            results, _ = self._described(program, self.namespace.abandon_call)
            return self.failed(program, error, results)
        caught = self._guard.caught
        return Reply(program=program, status="ok", value=value, steps=step_count.steps - before, caught=caught)

    def _completed(self) -> None:
        """End a program without an error. If it caught the user's interrupt, its collectives have been ended."""
        if self._guard.caught:
            groups.program_failed()
        else:
            groups.program_completed()

    # -- the debugger ----------------------------------------------------------------------------------------------

    def _stop(self, frame: FrameType, header: str | None, commands: Iterable[str]) -> None:
        """Handle a breakpoint in the user's code."""
        debugger.at_breakpoint(self._console, self._who, self._size, frame, header, commands)

    def _post_mortem(self, message: PostMortem, replica: int) -> Reply:
        kept = self._failure
        traceback = kept.traceback if kept is not None else None
        if kept is None or traceback is None:
            return Reply(program=message.program, status="ok", value=False)
        self._console.write(f"{kept.who[:1].upper()}{kept.who[1:]} as it ended. {kept.text} q leaves.\n")
        show_figures = partial(self._shell.events.trigger, "post_execute")
        try:
            self._guard.call(
                message.program, lambda: debugger.post_mortem(self._console, kept.who, traceback, show_figures)
            )
            return Reply(program=message.program, status="ok", value=True)
        except BaseException as error:  # noqa: BLE001  # whatever user code raises is reported, and the engine lives on
            reply = self.failed(message.program, error)
            self._failure = kept
            return reply

    # -- the shell of the engine -----------------------------------------------------------------------------------

    def _write_error(self, text: str) -> bool:
        """Write an error that the shell shows during a program (`ipywidgets.Output` does so). Return False outside."""
        if self._running() is not None:
            sys.stderr.write(text)
        return self._running() is not None

    def _adapt_shell(self, logs: Mapping[Literal["stdout", "stderr"], int]) -> None:
        """Redirect output, displays and prompts of cells to the notebook."""
        progress_bars.install()
        widget_comms.install(self.engine, self._control, self._shell)
        # IPython sets `sys.ps1`, by which libraries recognise an interactive session. Some then start processes of
        # their own.
        vars(sys).pop("ps1", None)
        engine, control = self.engine, self._control
        sys.stdout = ReplicaStream(engine, "stdout", control, logs["stdout"], 1, sys.stdout)
        sys.stderr = ReplicaStream(engine, "stderr", control, logs["stderr"], 2, sys.stderr)
        self._shell.display_pub = ReplicaDisplayPublisher(engine, control, self._shell.display_pub, parent=self._shell)
        redirect_errors(self._shell, self._write_error)
        formatter = self._shell.display_formatter
        assert formatter is not None
        formatter.mimebundle_formatter.for_type(DistributedValues, inspecting.displayed)
        formatter.formatters["text/html"].for_type(DistributedValues, lambda value: None)  # the notebook draws them
        this_process.publish = self._shell.display_pub.publish
        unattended.install(self._shell, self._console, self._stop)
        launched_processes.install()
        spawned_processes.install()


def install(shell: InteractiveShell, connection: Connection, engine: int, device: Device) -> Agent:
    """Make this process an engine of distnb. Call it once, on the main thread, when its event loop exists."""
    agent = Agent(shell, connection, engine, device)
    agent.serve()
    return agent
