"""The state machine, without IO, that decides when a distributed program must end.

A replica that fails ends the program on all replicas. A replica that does not follow the order to end within a second
is declared stuck, so that the prompt returns. It counts as busy until it reports.

Example, of two engines that run program 7::

    began(7, (0, 1))         waiting: 0, 1
    ended(1, 7, False, …)    waiting: 0       orders EndProgram(0, 7)
    tick, a second later     stuck: 0         orders GiveUpOn(0, 7)
    ended(0, 7, …)           (nothing left)

After the user's stop, a replica that runs the program's own handlers has 30 seconds instead; a second stop ends them::

    interrupted(8)           waiting: 0, 1    orders EndProgram(0, 8), EndProgram(1, 8)
    cleans_up(0, 8)          waiting: 0, 1
    ended(1, 8, …)           waiting: 0
    interrupted(8)           waiting: 0       orders EndProgram(0, 8)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from distnb.story import StateMachine, transition

__all__ = ["EndProgram", "GiveUpOn", "Order", "Supervision"]

_PATIENCE_S = 1.0
# The time for a program's `except KeyboardInterrupt` or `finally` after the user's stop. The engine ends it after 30 s.
_CLEANING_S = 30.0 + _PATIENCE_S
# Signals that arrive within this time are one press of the stop button: a double click, or a signal sent again.
_ONE_PRESS_S = 0.5


@dataclass(frozen=True)
class EndProgram:
    """An order to an engine to end a program."""

    engine: int
    program: int
    reason: str
    interrupted: bool


@dataclass(frozen=True)
class GiveUpOn:
    """An order to stop waiting for an engine's reply to a program."""

    engine: int
    program: int


Order = EndProgram | GiveUpOn

_SHOWN = 8  # the number of programs, the oldest, that the story names. Hundreds are under way if calls are pipelined.
_SHOWN_ENGINES = 16  # the number of engines that the story names of each: every engine's report is a transition

_State = tuple[dict[int, tuple[tuple[int, ...], int]], int, dict[int, int], tuple[int, ...]]


@dataclass
class _Program:
    engines: frozenset[int]
    waiting: set[int]
    dead_before: frozenset[int]  # engines that died before the program was sent: their loss is reported by `ended`
    pressed: float = -math.inf  # the time of the user's latest stop
    deadlines: dict[int, float] = field(default_factory=dict)  # by engine, once it is ordered to end the program


class Supervision(StateMachine):
    """The state of every program that is under way.

    Attributes:
        stuck: The engines that did not follow an order to end, each with the program that it still runs.
    """

    log = logging.getLogger("distnb.notebook.supervision")

    def __init__(self) -> None:
        super().__init__()
        self._programs: dict[int, _Program] = {}
        self._dead: set[int] = set()
        self.stuck: dict[int, int] = {}

    def state(self) -> _State:
        """Return the state in brief.

        Returns:
            Some engines that have not reported and the number of all of them, by program, for the oldest programs; the
            number of other programs; the program of each stuck engine; and the dead engines.
        """
        oldest = {
            number: ((*islice(program.waiting, _SHOWN_ENGINES),), len(program.waiting))
            for number, program in islice(self._programs.items(), _SHOWN)
        }
        return oldest, len(self._programs) - len(oldest), self.stuck.copy(), (*self._dead,)

    def in_words(self, state: _State) -> str:
        """Return a state of `state()` as text."""
        waiting, others, stuck, dead = state
        parts = [_program_in_words(number, *engines) for number, engines in waiting.items()]
        parts += [f"{others} more programs"] if others else []
        parts += [f"engine {engine} stuck in {program}" for engine, program in stuck.items()]
        parts += [f"engine {engine} dead" for engine in dead]
        return f"[{'; '.join(parts) or 'idle'}]"

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each invariant that does not hold."""
        for number, program in self._programs.items():
            if not program.waiting:
                yield f"program {number} is followed, but no engine runs it"
            if unknown := program.waiting - program.engines:
                yield f"program {number} waits for {sorted(unknown)}, to which it was not sent"
            if dead := program.waiting & self._dead - program.dead_before:
                yield f"program {number} waits for {sorted(dead)}, which died"
        for engine, number in self.stuck.items():
            if number in self._programs and engine in self._programs[number].waiting:
                yield f"engine {engine} is stuck in program {number}, which is still waited for"

    @transition
    def began(self, program: int, engines: Iterable[int], now: float) -> list[Order]:
        """Follow a program that is about to be sent to these engines."""
        to = frozenset(engines)
        self._programs[program] = _Program(to, set(to), to & self._dead)
        return []

    @transition
    def ended(self, engine: int, program: int, ok: bool, summary: str, now: float) -> list[Order]:
        """Handle an engine's report that a program ended."""
        if self.stuck.get(engine) == program:
            del self.stuck[engine]
        current = self._programs.get(program)
        if current is None:
            return []
        current.waiting.discard(engine)
        orders = [] if ok else self._end(program, f"replica on engine {engine} failed: {summary}", False, now)
        self._forget_finished(program)
        return orders

    @transition
    def died(self, engine: int, now: float) -> list[Order]:
        """Handle the end of an engine's process."""
        self._dead.add(engine)
        self.stuck.pop(engine, None)
        orders: list[Order] = []
        for number, program in list(self._programs.items()):
            if engine in program.waiting:
                program.waiting.discard(engine)
                orders += self._end(number, f"engine {engine} died", False, now)
                self._forget_finished(number)
        return orders

    @transition
    def lost(self, now: float) -> list[Order]:
        """Handle the loss of all engines to another notebook, where their programs go on: nothing is ended."""
        self._programs.clear()
        self.stuck.clear()
        return []

    @transition
    def joined(self, engine: int, now: float) -> list[Order]:
        """Handle the start of an engine's process, the first or one that replaces another."""
        self._dead.discard(engine)
        return []

    @transition
    def replaced(self, engine: int, now: float) -> list[Order]:
        """Forget the program in which an engine is stuck, since its process is about to be replaced."""
        self.stuck.pop(engine, None)
        return []

    @transition
    def interrupted(self, program: int, now: float) -> list[Order]:
        """Handle the user's request to end a program. The second one ends the user's handlers, too."""
        current = self._programs.get(program)
        if current is None:
            return []
        before, current.pressed = current.pressed, now
        if before == -math.inf:
            return self._end(program, "interrupted", True, now)
        return self._order_end(program, "interrupted", True, now) if now - before >= _ONE_PRESS_S else []

    @transition
    def cleans_up(self, engine: int, program: int, now: float) -> list[Order]:
        """Handle an engine's report that it runs the program's handlers after the user's stop."""
        if program in self._programs:
            for each in self._programs.values():  # the engine begins the others' parts when it has ended this one's
                if engine in each.waiting & each.deadlines.keys():
                    each.deadlines[engine] = now + _CLEANING_S
        return []

    def _end(self, number: int, reason: str, interrupted: bool, now: float) -> list[Order]:
        program = self._programs.get(number)
        if program is None or program.deadlines:
            return []
        return self._order_end(number, reason, interrupted, now)

    def _order_end(self, number: int, reason: str, interrupted: bool, now: float) -> list[Order]:
        program = self._programs[number]
        program.deadlines = dict.fromkeys(program.waiting, now + _PATIENCE_S)
        return [
            EndProgram(engine=engine, program=number, reason=reason, interrupted=interrupted)
            for engine in sorted(program.waiting)
        ]

    @transition
    def tick(self, now: float) -> list[Order]:
        """Give up on the engines whose deadline has passed."""
        orders: list[Order] = []
        for number, program in list(self._programs.items()):
            late = [engine for engine in sorted(program.waiting) if now >= program.deadlines.get(engine, math.inf)]
            for engine in late:
                self.stuck[engine] = number
                orders.append(GiveUpOn(engine, number))
                program.waiting.discard(engine)
            if late:
                self._forget_finished(number)
        return orders

    def next_deadline(self) -> float | None:
        """Return the time at which `tick` is due, or None."""
        deadlines = [
            program.deadlines[engine]
            for program in self._programs.values()
            for engine in program.waiting & program.deadlines.keys()
        ]
        return min(deadlines, default=None)

    def waiting_for(self, program: int) -> frozenset[int]:
        """Return the engines that have not reported on a program."""
        current = self._programs.get(program)
        return frozenset(current.waiting) if current else frozenset()

    def follows(self, program: int) -> bool:
        """Return whether an engine has not reported on a program."""
        return program in self._programs

    def _forget_finished(self, number: int) -> None:
        if not self._programs[number].waiting:
            del self._programs[number]


def _program_in_words(number: int, engines: tuple[int, ...], count: int) -> str:
    more = f" and {count - len(engines)} more engines" if count > len(engines) else ""
    return f"program {number} on {', '.join(map(str, engines))}{more}"
