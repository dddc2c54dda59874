"""When a distributed program must end: a state machine without IO. Events and the time go in, orders come out.

One replica that fails ends the program on all. A replica that does not follow the order within a second is
declared stuck, so that the prompt comes back; it stays known as busy until it reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["EndProgram", "GiveUpOn", "Order", "Supervision"]

_PATIENCE_S = 1.0


@dataclass(frozen=True)
class EndProgram:
    """Order an engine to end a program."""

    engine: int
    program: int
    reason: str
    interrupted: bool


@dataclass(frozen=True)
class GiveUpOn:
    """Wait no longer for an engine's reply to a program."""

    engine: int
    program: int


Order = EndProgram | GiveUpOn


@dataclass
class _Program:
    waiting: set[int]
    deadline: float | None = None


class Supervision:
    """Follows every program that is under way.

    Attributes:
        stuck: Engines that did not follow an order to end, each with the program that it still runs.
    """

    def __init__(self) -> None:
        self._programs: dict[int, _Program] = {}
        self.stuck: dict[int, int] = {}

    def began(self, program: int, engines: Iterable[int]) -> None:
        """A program was sent to these engines."""
        self._programs[program] = _Program(set(engines))

    def ended(self, engine: int, program: int, ok: bool, summary: str, now: float) -> list[Order]:
        """An engine reports the end of a program."""
        if self.stuck.get(engine) == program:
            del self.stuck[engine]
        current = self._programs.get(program)
        if current is None:
            return []
        current.waiting.discard(engine)
        orders = [] if ok else self._end(program, f"replica on engine {engine} failed: {summary}", False, now)
        self._forget_finished(program)
        return orders

    def died(self, engine: int, now: float) -> list[Order]:
        """An engine's process is gone."""
        self.stuck.pop(engine, None)
        orders: list[Order] = []
        for number, program in list(self._programs.items()):
            if engine in program.waiting:
                program.waiting.discard(engine)
                orders += self._end(number, f"engine {engine} died", False, now)
                self._forget_finished(number)
        return orders

    def interrupted(self, program: int, now: float) -> list[Order]:
        """The user asks for the end of a program."""
        return self._end(program, "interrupted", True, now)

    def _end(self, number: int, reason: str, interrupted: bool, now: float) -> list[Order]:
        program = self._programs.get(number)
        if program is None or program.deadline is not None:
            return []
        program.deadline = now + _PATIENCE_S
        return [
            EndProgram(engine=engine, program=number, reason=reason, interrupted=interrupted)
            for engine in sorted(program.waiting)
        ]

    def tick(self, now: float) -> list[Order]:
        """Time has passed: whom to give up on."""
        orders: list[Order] = []
        for number, program in list(self._programs.items()):
            if program.deadline is not None and now >= program.deadline:
                for engine in sorted(program.waiting):
                    self.stuck[engine] = number
                    orders.append(GiveUpOn(engine, number))
                program.waiting.clear()
                self._forget_finished(number)
        return orders

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        return min(
            (program.deadline for program in self._programs.values() if program.deadline is not None), default=None
        )

    def waiting_for(self, program: int) -> frozenset[int]:
        """Engines whose report on a program is still awaited."""
        current = self._programs.get(program)
        return frozenset(current.waiting) if current else frozenset()

    def _forget_finished(self, number: int) -> None:
        if not self._programs[number].waiting:
            del self._programs[number]
