"""The agent: the composition of an engine, which runs the notebook's programs on its main thread."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import zmq

from distnb.accelerators import torch_device
from distnb.collectives.group.memberships import memberships
from distnb.engine import adapted_shell
from distnb.engine.absence import absence_of
from distnb.engine.control import Control
from distnb.engine.debugging import debugger
from distnb.engine.debugging.console import Console
from distnb.engine.guard import Guard
from distnb.engine.namespace.engine_namespace import EngineNamespace
from distnb.engine.namespace.engine_objects import ObjectsOfTeams
from distnb.engine.output import telemetry
from distnb.engine.output.streams import pipe_descriptor
from distnb.engine.plans.planned_calls import PlannedCalls
from distnb.engine.program_loop import ProgramLoop
from distnb.engine.programs.executor import Executor
from distnb.engine.programs.failed_programs import FailedPrograms
from distnb.engine.programs.program_kinds import ProgramKind
from distnb.engine.programs.started_threads import note_work_of_pools
from distnb.engine.programs.team_programs import TeamPrograms
from distnb.engine.programs.users_loop import UsersLoop
from distnb.features import require
from distnb.input import dataset as datasets
from distnb.input.sources import workers
from distnb.runtime import step_count
from distnb.runtime.program_ends import program_ended
from distnb.runtime.randomness import streams
from distnb.runtime.this_process import this_process
from distnb.topology import Device, Team
from distnb.wire import unix_socket
from distnb.wire.channel import Link, ProgramLink
from distnb.wire.control_channel import ControlLink
from distnb.wire.messages import (
    Apply,
    CallFunction,
    EngineState,
    ErrorReport,
    Hello,
    PostMortem,
    ProgramEnded,
    RunCell,
)
from distnb.wire.planned import PlannedCall, PlannedReply

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.cluster.connection import Connection

__all__ = ["Agent", "install"]

_logger = logging.getLogger("distnb.engine")


class Agent:
    """The parts of an engine, and the beginning and end of each program.

    All programs share one namespace, the user namespace of the engine's IPython shell.

    Attributes:
        kinds: The kind of program by class of message. A feature adds its own: see `program_kinds`.
        notices: The handlers of messages that are not programs and get no reply, by class of message.
        suspensions: Functions to call before each program that is not a feature's own.
        connection, engine, device: The cluster, and this engine's number and device in it.
        namespace: This side of the namespace that the engine shares with the notebook.
        guard: The guard of the main thread, under which programs run.
        failures: The failure of the latest program.
        programs: The programs of teams.
        loop: The loop that receives programs.
    """

    def __init__(self, shell: InteractiveShell, connection: Connection, engine: int, device: Device) -> None:
        self.connection = connection
        self.engine = engine
        self.device = device
        self.guard = Guard()
        workers.raise_worker_errors_only_while(lambda: self.guard.running)
        self._size = 1  # the number of replicas of the latest program
        self._latest, self._team = 0, Team((), (), 0, "", 0)  # the latest program, and its team
        self._runs_before = 0  # the number of calls of `run` before it
        self._latest_error: ErrorReport | None = None  # only if the engine stays
        place = str(torch_device(device))
        self._objects = ObjectsOfTeams(shell.user_ns, "cpu" if place.startswith("cpu") else place)
        self.namespace = EngineNamespace(shell.user_ns, self._objects, engine=engine)
        context: zmq.Context[Any] = zmq.Context()
        keys: dict[str, Any] = {
            "server_public": connection.server_public.encode(),
            "client_public": connection.client_public.encode(),
            "client_secret": connection.client_secret.encode(),
        }
        link: ProgramLink
        if connection.listener:
            link = unix_socket.connect(connection.listener, engine)
        else:
            link = Link(context, engine, connection.program_url, **keys)
        returning = partial(self._hello, returning=True)
        self.loop = ProgramLoop(engine, connection.listener, link, self._handle, returning)
        self._absence = absence_of(connection, returning, self.loop.await_notebook)
        pipes = {}
        logs = {}
        streams: tuple[tuple[int, Literal["stdout", "stderr"]], ...] = ((1, "stdout"), (2, "stderr"))
        for descriptor, name in streams:
            reading, logs[name], forward = pipe_descriptor(engine, descriptor, name, self._running, self._emit)
            pipes[reading] = forward
        samples = telemetry.Telemetry()
        self._console = Console(engine, self.guard, self._running, self._emit)
        self._control = Control(
            engine,
            Path(connection.directory),
            lambda: ControlLink(context, engine, connection.control_url, **keys, monitored=self._absence.is_followed),
            self.guard,
            self._console,
            absence=self._absence,
            free_collectives=memberships.abort,
            hold_limits=memberships.hold_limits,
            sample=samples.sample,
            memory=telemetry.memory,
            pipes=pipes,
        )
        self._users_loop = UsersLoop()
        show_figures = partial(shell.events.trigger, "post_execute")
        self.failures = FailedPrograms(
            self.guard, self._console, self._running, self.namespace.pack_error, show_figures
        )
        executor = Executor(engine, shell, self._control, self._users_loop)
        self.programs = TeamPrograms(device, self.namespace, self.guard, self.failures, executor, samples, show_figures)
        plans = PlannedCalls(self.programs, self.namespace)
        self.kinds: dict[type, ProgramKind] = {
            RunCell: ProgramKind(run=self.programs.run_cell, replica=self.replica_in, drops_failure=True),
            CallFunction: ProgramKind(run=plans.first, replica=self.replica_in, drops_failure=True),
            PlannedCall: ProgramKind(
                run=plans.repeat, replica=lambda call: self.replica_in(plans.message(call)), drops_failure=True
            ),
            Apply: ProgramKind(
                run=self.programs.apply,
                replica=self.replica_in,
                measured=lambda message: message.operation == "call",  # `model.fit(...)`; others only read
            ),
            PostMortem: ProgramKind(
                run=self.failures.post_mortem, replica=self._failed_replica, measured=lambda message: False
            ),
        }
        self.notices: dict[type, Callable[[Any], None]] = {}
        self.suspensions: list[Callable[[], None]] = []
        self._absence.add_programs(self)
        adapted_shell.adapt(shell, engine, self._control, self._console, logs, self._stop)
        note_work_of_pools()
        this_process.note_names = self.namespace.note_names
        this_process.live_sink = self._control.live
        memberships.when_failed = self._control.end_program

    def serve(self) -> None:
        """Begin to serve on the running event loop of this thread, and send `Hello`."""
        hello = self._hello()
        self._control.emit(hello, urgent=True)  # first: the notebook drops what comes before
        self._control.start()
        _logger.info("engine %d serves on %s", self.engine, self.device)
        self.loop.begin(hello)
        # The objects of torch and IPython are never garbage, so later collections need not visit them.
        gc.freeze()

    def _hello(self, *, returning: bool = False) -> Hello:
        """Return this engine's introduction, to its first notebook or to a later one."""
        state = None
        if returning:
            process = this_process.replica
            state = EngineState(
                program=self._latest,
                engines=self._team.engines,
                unseen=self._absence.unseen,
                kept=self._absence.kept,
                running=self._control.running is not None,
                serial=self._objects.serial,
                generation=self._team.generation,
                teams=self._objects.keys,
                renamings=self._objects.renamings,
                incomplete=self._objects.incomplete,
                ran=streams.runs > self._runs_before,
                strategies=() if process is None else tuple(strategy.spec for strategy in process.strategies),
                error=self._latest_error,
            )
        return Hello(self.engine, os.getpid(), socket.gethostname(), state)

    def _running(self) -> tuple[int, int] | None:
        return self._control.running

    def _emit(self, event: Any, *, urgent: bool = False) -> None:
        self._control.emit(event, urgent=urgent)

    def _stop(self, frame: FrameType, header: str | None, commands: Iterable[str]) -> None:
        """Handle a breakpoint in the user's code."""
        debugger.at_breakpoint(self._console, self.failures.who, self._size, frame, header, commands)

    # -- programs --------------------------------------------------------------------------------------------------

    def _handle(self, link: ProgramLink, message: Any) -> None:
        if (notice := self.notices.get(type(message))) is not None:
            notice(message)
            return
        kind = self.kinds.get(type(message)) or self._kind_of(message)
        self.failures.make_room(kind)
        self._perform(link, message, kind)
        self.failures.limit(kind)

    def _kind_of(self, message: Any) -> ProgramKind:
        """Return the kind of a program. Install the feature that adds it first if necessary."""
        if type(message) not in self.kinds:
            require("programs", type(message).__module__)(self)
        return self.kinds[type(message)]

    def _perform(self, link: ProgramLink, message: Any, kind: ProgramKind) -> None:
        """Run one program to its end, and send the reply. It never raises."""
        if not isinstance(message, PlannedCall):
            streams.reset()  # a planned call leaves the replica's own stream in use
        replica = kind.replica(message)
        is_logged = _logger.isEnabledFor(logging.DEBUG)
        if is_logged:
            _logger.debug("program %d began: %s, replica %d", message.program, type(message).__name__, replica)
        self._latest, self._runs_before = message.program, streams.runs
        step_count.watch_optimizers()
        datasets.program_began()
        self._console.refusal = kind.refusal
        self._control.program_began(message.program, replica, self._size, measured=kind.measured(message))
        began = time.monotonic()
        outer = self._users_loop.enter()
        try:
            reply = kind.run(message, replica)
        except BaseException as error:  # noqa: BLE001  # whatever user code raises is reported, and the engine lives on
            reply = self.failures.reply(message.program, error)
        finally:
            self._users_loop.leave(outer)
        if is_logged:
            _logger.debug("program %d ended: %s", message.program, reply.status)
        if self._absence.is_followed:
            self._latest_error = reply.error
        program_ended()
        debugger.stop_stepping()
        self._console.leave()
        self._console.stopped_in = None
        if isinstance(reply, PlannedReply) or (reply.status == "ok" and not isinstance(message, RunCell)):
            # The reply itself reports a call that succeeded. Waking both control threads would double the call's cost.
            link.send(reply)  # before the measurements: the notebook goes on at once
            self._control.program_ended(None)
            return
        reply = reply._replace(seconds=time.monotonic() - began)
        summary = f"{reply.error.type_name}: {reply.error.text}" if reply.error else ""
        # The error is in no local variable: its traceback leads to this frame, and the cycle would keep all objects of
        # the program alive.
        where = self.failures.where if reply.status != "ok" else ""
        self._control.program_ended(
            ProgramEnded(engine=self.engine, program=message.program, status=reply.status, summary=summary, where=where)
        )
        link.send(reply)

    def _failed_replica(self, message: PostMortem) -> int:
        self._suspend_features()
        self._team = message.team
        return self.failures.replica

    def _suspend_features(self) -> None:
        for suspend in self.suspensions:
            suspend()

    def replica_in(self, message: Any) -> int:
        """Return this engine's replica number in a program of a team."""
        self._suspend_features()
        team, replica = message.team, message.team.rank_of(self.engine)
        if team is not self._team:
            self._team = team
            self.failures.who, self._size = f"replica {replica} ({team.devices[replica]})", team.size
        return int(replica)


def install(shell: InteractiveShell, connection: Connection, engine: int, device: Device) -> Agent:
    """Make this process an engine of distnb. Call it once, on the main thread, when its event loop exists."""
    agent = Agent(shell, connection, engine, device)
    agent.serve()
    return agent
