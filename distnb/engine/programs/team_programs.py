"""The programs of a team: cells, calls of a strategy's methods, and operations on objects."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from distnb import strategies
from distnb.collectives.group.memberships import memberships
from distnb.engine.guard import Guard
from distnb.engine.namespace import object_operations
from distnb.engine.namespace.engine_namespace import EngineNamespace
from distnb.engine.output.telemetry import Telemetry
from distnb.engine.programs.executor import Executor
from distnb.engine.programs.failed_programs import FailedPrograms
from distnb.engine.programs.profiling import Profile
from distnb.engine.programs.started_threads import threads_awaited
from distnb.errors import ProgramAborted
from distnb.input.sources import workers
from distnb.runtime import spmd, step_count
from distnb.strategies.base import Strategy
from distnb.topology import Device, Team
from distnb.values.structure import select
from distnb.wire.described_values import Result
from distnb.wire.messages import Apply, CallFunction, Reply, RunCell

__all__ = ["TeamPrograms"]

_DESCRIBING_S = 1.0  # the time to describe the effects of a program that was ordered to end; the notebook waits as long


class TeamPrograms:
    """The programs that this engine runs as a replica of a team.

    Args:
        device: The engine's device.
        namespace: The engine's namespace.
        guard: The guard, under which all user code runs.
        failures: Reports a program that raised.
        executor: Runs the text of cells.
        samples: The telemetry, which is detailed in some cells.
        show_figures: Shows the figures that a cell has drawn.
    """

    def __init__(
        self,
        device: Device,
        namespace: EngineNamespace,
        guard: Guard,
        failures: FailedPrograms,
        executor: Executor,
        samples: Telemetry,
        show_figures: Callable[[], None],
    ) -> None:
        self._device = device
        self._namespace = namespace
        self._guard = guard
        self._failures = failures
        self._executor = executor
        self._telemetry = samples
        self._show_figures = show_figures
        self._process: spmd.SpmdProcess  # set by the first program

    def join(self, team: Team, replica: int, *, nothing_new: bool = False, keeps_stream: bool = False) -> None:
        """Become a replica of a team, in its process group. For the options see `spmd.enter`."""
        group = memberships.join(team, replica, self._device, supervised=True)
        self._process = spmd.enter(
            team, replica, self._device, group, nothing_new=nothing_new, keeps_stream=keeps_stream
        )

    def run_cell(self, message: RunCell, replica: int) -> Reply:
        """Run a cell, and describe its effects whether it fails or not."""
        program, mark = message.program, None
        profile = Profile() if message.profiled else None
        self._telemetry.detailed = message.detailed
        failed: BaseException | None = None
        caught = False
        there = set(multiprocessing.active_children())

        def body() -> None:
            nonlocal mark
            self.join(message.team, replica)
            self._namespace.open(message.snapshot, replica)
            mark = self._namespace.begin(message.source)
            memberships.program_began(program)
            if message.only is None or replica in message.only:
                strategy = strategies.resolve(message.strategy)
                scope = strategy.scope() if message.in_scope else nullcontext()
                with threads_awaited(), strategy.cell(), scope, profile or nullcontext():
                    self._executor.run(message.source, message.filename, message.function)
                    self._namespace.refuse_placeholders(mark)
            self._show_figures()
            self._completed()

        try:
            self._guard.call(program, body)
            caught = self._guard.caught
        except BaseException as error:  # noqa: BLE001  # whatever user code raises is reported, and the engine lives on
            failed = error
            if self._guard.interrupted:
                # Workers do not receive the interrupt, and a DataLoader waits five seconds for each that is at work.
                workers.end_processes(set(multiprocessing.active_children()) - there)
            memberships.program_failed()
        results, interrupt = None, None
        if mark is not None:
            results, interrupt = self._described(program, partial(self._namespace.finish, mark))
        failed = interrupt or failed
        trace = profile.trace() if profile is not None and not self._guard.aborted else None
        try:
            if failed is None:
                changed = self._process.changed_by_hand()
                return Reply(program=program, status="ok", value=results, changed=changed, profile=trace, caught=caught)
            return self._failures.reply(program, failed, results)._replace(profile=trace)
        finally:
            failed = interrupt = None  # its traceback holds this frame: a cycle would keep all objects of the cell

    def call(self, message: CallFunction, replica: int) -> Reply:
        """Call a method of a strategy."""

        def body() -> Any:
            args, kwargs = self._namespace.open_call(message.snapshot, replica)
            strategy = strategies.resolve(message.strategy)
            with threads_awaited():
                if message.method:
                    self._process.agreement.is_left_to_caller = True  # until the next program
                    result = getattr(strategy, message.method)(*args, **kwargs)
                else:
                    function, *rest = select(args, replica)
                    result = function(*rest)
            return self._namespace.close_call(result)

        return self.run_together(
            message.program, message.team, replica, body, nothing_new=message.snapshot.binds_nothing
        )

    def run(self, strategy: Strategy, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `strategy.run` in the program of a team that has called it before."""
        self._process.agreement.is_left_to_caller = True  # until the next program
        if type(strategy).run is Strategy.run:
            return self._process.runtime_of(strategy).run(fn, args, kwargs, None)
        return strategy.run(fn, args, kwargs)

    def apply(self, message: Apply, replica: int) -> Reply:
        """Apply an operation to an object."""

        def body() -> Any:
            with threads_awaited():
                return object_operations.carry_out(self._namespace, message)

        if message.operation in object_operations.QUIET:
            return Reply(program=message.program, status="ok", value=self._guard.call(message.program, body))
        return self.run_together(message.program, message.team, replica, body)

    def run_together(
        self,
        program: int,
        team: Team,
        replica: int,
        body: Callable[[], Any],
        *,
        nothing_new: bool = False,
        keeps_stream: bool = False,
    ) -> Reply:
        """Run a function that may communicate with the rest of the team. For the options see `spmd.enter`."""
        before = step_count.steps

        def joined() -> Any:
            self.join(team, replica, nothing_new=nothing_new, keeps_stream=keeps_stream)
            memberships.program_began(program)
            value = body()
            self._completed()
            return value

        try:
            value = self._guard.call(program, joined)
        except BaseException as error:  # noqa: BLE001  # its effects until then are reported, as of a cell
            memberships.program_failed()
            results, _ = self._described(program, self._namespace.abandon_call)
            return self._failures.reply(program, error, results)
        caught = self._guard.caught
        return Reply(program=program, status="ok", value=value, steps=step_count.steps - before, caught=caught)

    def _completed(self) -> None:
        """End a program without an error. If it caught the user's interrupt, its collectives have been ended."""
        if self._guard.caught:
            memberships.program_failed()
        else:
            memberships.program_completed()

    def _described(
        self, program: int, describe: Callable[[], Result | None]
    ) -> tuple[Result | None, KeyboardInterrupt | None]:
        """Describe the effects of a program. Return them, and the user's interrupt if one ended the description.

        The description pickles the user's objects, so it runs user code, which may take any time.
        """
        if self._guard.aborted:  # by an interrupt, or by another replica's failure
            self._namespace.leave_contexts()
            try:
                return self._guard.call_last(describe, _DESCRIBING_S), None
            except (KeyboardInterrupt, ProgramAborted):
                return None, None
        try:
            return self._guard.call(program, describe, math.inf), None
        except KeyboardInterrupt as interrupt:
            return None, interrupt
