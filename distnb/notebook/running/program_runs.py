"""The ends of a session's programs: replies, errors that are raised in the notebook, and failures to debug."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from distnb.errors import EngineDied, NoClusterError, ProgramError
from distnb.notebook.engines import Engines
from distnb.notebook.front_end import FrontEnd
from distnb.notebook.programs.failures import Failure, failing_engine, raise_failure, step_difference
from distnb.notebook.programs.outcome import Outcome
from distnb.topology import Team
from distnb.wire.messages import Apply, ObjectId, PostMortem

__all__ = ["ProgramRuns"]


class ProgramRuns:
    """The programs of a session, one at a time: those of handles are sent here, cells and calls in files of their own.

    Args:
        engines: The session's engines.
        front: Returns the front end that shows the session.
        opened: Opens a packed exception.

    Attributes:
        failure: The failure of the latest cell or call, for `debug`; None if it succeeded.
        unshown: The programs that no cell started (see `inspecting`). Their output is not shown.
    """

    def __init__(self, engines: Engines, front: Callable[[], FrontEnd], opened: Callable[[Any], Any]) -> None:
        self._engines = engines
        self._dispatch = engines.dispatch
        self._front = front
        self._opened = opened
        self._inspecting = threading.local()
        self.failure: Failure | None = None
        self.unshown: set[int] = set()

    def wait(self, outcome: Outcome, team: Team) -> None:
        """Wait for a program's end. Unless it left the process group whole, the next program forms a new one."""
        self._dispatch.wait(outcome)
        if not outcome.left_group_whole:
            self._engines.teams.renew(after=team)

    def raise_failure(self, outcome: Outcome, team: Team, *, called: bool = False, kept: bool = True) -> None:
        """Raise the error or the interrupt that ended a program, if one did.

        Args:
            called: Whether an ordinary cell called the program.
            kept: Whether it was the user's program, which `debug` can open.
        """
        if outcome.ok and not outcome.stopped:
            return
        front = self._front()
        front.catch_up()
        if kept and not (outcome.stuck or outcome.died) and team.size > 1:
            self._report_step_difference(team)
        try:
            raise_failure(outcome, team, callers_lines=front.callers_lines if called else None, opened=self._opened)
        except BaseException as error:
            if self._engines.lost and isinstance(error, EngineDied):
                raise NoClusterError(self._engines.lost) from None
            if kept:
                self.failure = Failure(error, team, self._engine_to_debug(outcome, team))
            raise

    def _engine_to_debug(self, outcome: Outcome, team: Team) -> int | None:
        engine = failing_engine(outcome, team)
        if engine is not None or outcome.died:
            return engine
        asked = self._dispatch.prompts.latest  # the user has ended the program, perhaps at a prompt
        if asked is not None and asked.program == outcome.program and asked.engine in outcome.replies:
            return asked.engine
        return next((each for each in team.engines if each in outcome.replies), None)

    def _report_step_difference(self, team: Team) -> None:
        """Print a notice if a program that ended early left the replicas' variables at different steps."""
        try:
            writes = self.ask(
                team.engines,
                lambda program, team: Apply(program=program, operation="writes", target=(0, ""), team=team),
            )
        except NoClusterError:
            return  # %distnb stop in another place ended the program, and the engines
        if text := step_difference({team.rank_of(engine): each for engine, each in writes.items()}):
            print(text, file=sys.stderr)

    def perform(
        self,
        engines: Sequence[int],
        operation: str,
        target: ObjectId,
        payload: Any = None,
        give_up: Callable[[dict[int, Any]], None] = lambda results: None,
    ) -> dict[int, Any]:
        """Apply an operation to an object on some engines, as handles do to read and change their objects.

        Args:
            engines: The engines, in replica order.
            payload: Further input of the operation.
            give_up: Called if the operation fails, with its results so far by replica, or {} if these are unknown.

        Returns:
            The operation's value by engine.

        Raises:
            BaseException: The operation's own exception; KeyboardInterrupt if the user ended it.
        """
        return self.ask(
            engines,
            lambda program, team: Apply(
                program=program, operation=operation, target=target, team=team, payload=payload
            ),
            give_up,
            called=True,
            unstoppable=operation in ("copying", "divide", "rename", "threads"),
        )

    def ask(
        self,
        engines: Sequence[int],
        message_of: Callable[[int, Team], Any],
        give_up: Callable[[dict[int, Any]], None] = lambda results: None,
        *,
        called: bool = False,
        unstoppable: bool = False,
    ) -> dict[int, Any]:
        """Run a program on some engines, and return the values of its replies by engine.

        Args:
            message_of: Returns the program's message, from its number and team.
            give_up: See `perform`.
            called: Whether the user's code called it.
            unstoppable: Whether the user cannot end it.
        """
        with self._dispatch.turn:
            program = self._dispatch.number()
            if getattr(self._inspecting, "depth", 0):
                self.unshown.add(program)
            team = self._engines.team_of(engines)
            with self._dispatch.interrupts as interrupts:
                try:
                    message = message_of(program, team)
                    outcome = self._dispatch.post(program, team.engines, message, unstoppable=unstoppable)
                    self.wait(outcome, team)
                except BaseException:
                    give_up({})
                    raise
                if not outcome.ok or outcome.interrupted:
                    with interrupts.brief():
                        give_up({} if outcome.stuck else outcome.results(team))
        self.raise_failure(outcome, team, called=called, kept=called)
        return {engine: reply.value for engine, reply in outcome.replies.items()}

    @contextmanager
    def inspecting(self) -> Iterator[None]:
        """Hide the replicas' output while objects are inspected although no cell runs, as by Tab completion."""
        self._inspecting.depth = getattr(self._inspecting, "depth", 0) + 1
        try:
            yield
        finally:
            self._inspecting.depth -= 1

    def debug(self, replica: int | None = None) -> None:
        """Open a debugger's prompt at the error of the latest cell or call, in the frames of one replica.

        Args:
            replica: The replica's number; None for the replica that failed.

        Raises:
            ProgramError: The program or this replica's part of it succeeded, or another program has begun since.
            OptionError: There is no such replica, or the process of the failing replica has ended.
        """
        if self.failure is None:
            raise ProgramError(
                "There is nothing to debug: the latest distributed cell or call succeeded, or none has run. (If a "
                "coordinator's closure fails, only its error is kept.)"
            )
        engine = self.failure.engine_of(replica)
        try:
            found = self.ask((engine,), PostMortem)[engine]
        except KeyboardInterrupt as stop:
            # IPython shows this interrupt as the last error, and %debug must still open the failure.
            self.failure = replace(self.failure, error=stop)
            raise
        if not found:
            raise ProgramError(
                f"Replica {self.failure.team.rank_of(engine)} has nothing to debug: its part of the program succeeded, "
                "or no line of your code failed there."
            )
