"""Sending programs to a team of engines and collecting their replies, in order, one program at a time."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from distnb.errors import EngineDied, ReplicaStuck
from distnb.notebook.programs.outcome import Outcome, oldest_awaiting
from distnb.notebook.programs.prompts import Prompts
from distnb.notebook.programs.supervision import GiveUpOn
from distnb.notebook.programs.supervisor import Supervisor
from distnb.runtime.interrupts import Interrupts, drain
from distnb.wire.channel import Programs
from distnb.wire.messages import Died, Hello, Reply, Unreadable
from distnb.wire.planned import PlannedReply

__all__ = ["Dispatch"]

_logger = logging.getLogger("distnb.notebook.dispatch")

_LATE_S = 2.0
_POLL_S = 0.02
# The time for which only the last engine's reply is awaited, since the others mostly reply before it. An engine that
# could not read its program reports that in a reply, which must end the others' programs.
_LAST_S = 0.05
_UNREACHED = (
    "could not be reached, since its connection with the notebook has ended (replace it with %distnb restart {engine}),"
)


class Dispatch:
    """The dispatcher of distributed programs. One program runs at a time, and the others wait for their turn.

    Attributes:
        turn: The lock to hold while a program is created, sent and waited for.
        interrupts: The user's interrupts. Enter this context before a program is packed if it must then be sent.
        prompts: The replicas' questions to the user, asked while the notebook waits for a program's end.
    """

    def __init__(self, programs: Programs, supervisor: Supervisor) -> None:
        self._programs = programs
        self._supervisor = supervisor
        self._numbers = itertools.count(1)
        self.latest = 0
        self.turn = threading.RLock()
        self._pending: dict[int, Outcome] = {}
        self._is_logged = False  # whether the latest program's messages are logged
        self.interrupts = Interrupts()
        self.prompts = Prompts(supervisor, self.interrupts)
        programs.watch(supervisor.lost_fd)
        programs.watch(self.interrupts.fd)
        programs.watch(self.prompts.fd)
        self._dead: dict[int, str] = {}
        self._connected: dict[int, Hello] = {}  # by engine, the hello that its main thread has sent

    def number(self) -> int:
        """Return the serial number of the next program."""
        self.latest = next(self._numbers)
        return self.latest

    @property
    def in_use(self) -> bool:
        """True if a program is under way."""
        return bool(self._pending)

    def post(
        self, program: int, engines: tuple[int, ...], message: Any, *, quiet: bool = True, unstoppable: bool = False
    ) -> Outcome:
        """Send a program to its engines. `wait` waits for its end.

        Call this within `interrupts`: if an interrupt stopped the sending half-way, the engines with the message would
        wait for the others.

        Raises:
            EngineDied, ReplicaStuck: An engine cannot run the program, which was not sent to any engine.
        """
        self.require_ready(engines)
        self._is_logged = _logger.isEnabledFor(logging.DEBUG)
        if self._is_logged:
            _logger.debug("program %d, a %s, is sent to engines %s", program, type(message).__name__, engines)
        outcome = self._pending[program] = Outcome(program, engines, quiet=quiet, unstoppable=unstoppable)
        if quiet:
            self._supervisor.quiet[program] = outcome
        else:
            self._supervisor.program_began(program, engines)
        self._handle_losses()
        for engine, status in outcome.died.items():  # the supervisor relies on this for engines that died earlier
            self._supervisor.failed(engine, program, status)
        if unreached := self._programs.send(engines, message):
            self._give_up_unreached(outcome, unreached)
        return outcome

    def _give_up_unreached(self, outcome: Outcome, engines: Collection[int]) -> None:
        """Wait briefly for the deaths of engines that a program could not be sent to, and mark the remaining ones lost.

        Most of these engines have just died, and their deaths are reported in a moment. No report comes for the others.
        """
        until = time.monotonic() + _LATE_S
        while (left := set(engines) - outcome.died.keys()) and time.monotonic() < until:
            self._read(_POLL_S)
        for engine in left:
            _logger.warning("engine %d cannot be reached", engine)
            status = _UNREACHED.format(engine=engine)
            outcome.mark_lost(engine, status)
            self._supervisor.failed(engine, outcome.program, status)

    def wait(self, outcome: Outcome) -> None:
        """Wait for a program's end on each of its engines.

        Call this within `interrupts`: an interrupt ends the program, unless it is unstoppable, and the outcome records
        that.
        """
        if outcome.awaits(outcome.engines[-1]) and not self.interrupts.count:
            self._programs.await_one(outcome.engines[-1], _LAST_S)
        while True:
            if self.interrupts.count and not outcome.unstoppable and self.interrupts.pop():
                self.interrupt()
            if outcome.complete:
                break
            asks = self.prompts.next()
            if asks is not None:
                self.prompts.ask(asks)
            else:
                self._read()
        self._pending.pop(outcome.program, None)
        self._supervisor.quiet.pop(outcome.program, None)

    def interrupt(self) -> bool:
        """End the programs that are under way, from any thread. Return False if there are none.

        A second call ends the handlers that a program runs because of the first.
        """
        # The latest first: an engine that has ended one program must not begin the next, which will also be ended.
        pending = [outcome for outcome in reversed(list(self._pending.values())) if not outcome.unstoppable]
        self.prompts.end([outcome.program for outcome in pending])
        for outcome in pending:
            outcome.interrupted = True
            self._supervisor.interrupt(outcome.program)
        return not all(outcome.complete for outcome in pending)

    def await_connections(self, hellos: Collection[Hello], failed: Callable[[], bool]) -> list[int]:
        """Wait until engines that are connected for control are connected for programs too, or until `failed()`.

        A program would not reach an engine without this connection. Return the engines that are not connected.
        """
        self._programs.meet(hellos)
        while missing := [hello.engine for hello in hellos if not self._has_connected(hello)]:
            if failed():
                break
            self._read(_POLL_S)
        return missing

    def _has_connected(self, hello: Hello) -> bool:
        known = self._connected.get(hello.engine)
        return known is not None and known.pid == hello.pid

    def continue_from(self, program: int) -> None:
        """Assign numbers to programs after those of an earlier notebook."""
        self.latest = program
        self._numbers = itertools.count(program + 1)

    def await_idle(
        self,
        engines: Collection[int],
        programs: Sequence[int],
        idle: Callable[[Hello], None],
        ended: Callable[[], Collection[int]],
    ) -> None:
        """Wait until engines that an earlier notebook used have ended its programs. The user's interrupt ends these.

        Args:
            engines: The engines, which connect for programs when they are idle.
            programs: The numbers of the programs.
            idle: Called with the hello of each engine.
            ended: Returns the engines whose processes have ended.
        """
        missing = set(engines)
        with self.interrupts:
            while missing := missing.difference(ended(), self._supervisor.stuck):
                if self.interrupts.pop():
                    for program in reversed(programs):
                        self._supervisor.interrupt(program)
                asks = self.prompts.next()
                if asks is not None:
                    self.prompts.ask(asks)
                self._programs.meet(())
                self._read(_POLL_S)
                for engine in missing & self._connected.keys():
                    idle(self._connected[engine])
                missing -= self._connected.keys()

    def engine_replaced(self, engine: int) -> None:
        """Note that a new process has replaced this engine's, or that the cluster has this engine no longer."""
        self._handle_losses()  # if no program waited for the old process, its end may not have been read yet
        self._dead.pop(engine, None)

    def close(self) -> None:
        """Free the descriptors that the switchboard does not own."""
        self.interrupts.close()
        self.prompts.close()

    def _read(self, timeout_s: float | None = None) -> None:
        ready = self._programs.wait(timeout_s)
        for fd in (self._supervisor.lost_fd, self.interrupts.fd, self.prompts.fd):
            if fd in ready:
                drain(fd)
                self._handle_losses()
        for engine, message in self._programs.receive(ready):
            self._handle(engine, message)

    def _handle(self, engine: int, message: Reply | PlannedReply | Unreadable | Hello) -> None:
        if isinstance(message, Hello):
            self._connected[engine] = message
            return
        if isinstance(message, Unreadable):  # it replaces the reply to the oldest program that lacks the engine's reply
            outcome = oldest_awaiting(self._pending.values(), engine)
            if outcome is None:
                return
            self._supervisor.failed(engine, outcome.program, f"{message.error.type_name}: {message.error.text}")
            message = Reply(program=outcome.program, status="error", error=message.error)
        outcome = self._pending.get(message.program)
        if outcome is not None:
            if self._is_logged:
                _logger.debug("engine %d replied to program %d: %s", engine, message.program, message.status)
            outcome.receive(engine, message)
            if outcome.quiet and message.status == "ok" and message.program not in self._supervisor.quiet:
                self._supervisor.replied(engine, message.program)  # no event reports its end

    def _handle_losses(self) -> None:
        losses = self._supervisor.lost
        while not losses.empty():
            loss = losses.get()
            if isinstance(loss, Died):
                self._dead[loss.engine] = loss.exit_status
            for outcome in self._pending.values():
                if not outcome.awaits(loss.engine):
                    continue
                if isinstance(loss, Died):
                    outcome.mark_lost(loss.engine, loss.exit_status)
                elif isinstance(loss, GiveUpOn) and loss.program == outcome.program:
                    outcome.mark_lost(loss.engine, None)

    def require_ready(self, engines: Collection[int]) -> None:
        """Raise if one of these engines has ended, or is still busy with a program that was ended."""
        self._handle_losses()
        if not self._dead and not self._supervisor.stuck:
            return
        # On a loaded machine the report of an engine that was ordered to end a program may only be late.
        deadline = time.monotonic() + _LATE_S
        while (busy := self._still_busy(engines)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        dead = sorted(engine for engine in engines if engine in self._dead)
        if dead:
            raise EngineDied(
                f"Engine {dead[0]} has ended ({self._dead[dead[0]]}), and this program needs it. Start a replacement "
                "with %distnb restart --missing; mirrored variables are restored to it from a survivor."
            )
        if busy:
            numbers, s = " ".join(map(str, busy)), "s" if len(busy) > 1 else ""
            raise ReplicaStuck(
                f"Engine{s} {numbers}: still busy with a program that was ended, in code that no signal reaches, or "
                "that catches the exception which ends it (a bare `except:`). Wait (%distnb status), or replace it "
                f"with %distnb restart {numbers}."
            )

    def await_answers(self, engines: Collection[int], limit_s: float) -> None:
        """Wait until these engines have answered or ended, or have been silent for longer than a limit.

        The caller holds `turn`.
        """
        while self._still_busy([each for each in engines if self._supervisor.silent_s(each) < limit_s]):
            time.sleep(_POLL_S)

    def _still_busy(self, engines: Collection[int]) -> list[int]:
        """Read the messages that have arrived, and return the engines that are still busy."""
        self._read(0)
        stuck = self._supervisor.stuck
        return sorted(engine for engine in engines if engine in stuck)
