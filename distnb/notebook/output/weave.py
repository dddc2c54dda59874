"""Several sequences of steps woven into one: equal steps once, and each replica's own order kept.

The steps that were not released yet stand in one list, in an order that suits every replica. A step that two replicas
share may still slide behind what only one of them did, whoever was heard first.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Step", "Weave"]

T = TypeVar("T")

_MOST_CANDIDATES = 16
_LONGEST_SLIDE = 500


@dataclass(eq=False)
class Step(Generic[T]):
    """One step of one or several replicas.

    Attributes:
        key: Replicas whose steps have the same key may share one.
        since: When it was first heard of.
        replicas: Whose it is.
        content: What it is.
        number: Counts the steps, in the order in which they were made.
        place: Its index among the steps that were not released.
        last: It comes after all that is known when it is made, and before the next such step.
        released: It has been shown.
    """

    key: tuple[str, str]
    since: float
    replicas: set[int]
    content: T
    number: int
    place: int
    last: bool = False
    released: bool = False

    @property
    def orders(self) -> set[int]:
        """The sequences that it belongs to: its replicas', and that of all steps that are `last`."""
        return self.replicas | {-1} if self.last else self.replicas


class Weave(Generic[T]):
    """The steps that were not released yet.

    Args:
        total: Number of replicas.
        hold_s: A step waits at most this long for other replicas to share it.

    Attributes:
        steps: They, in an order that suits every replica.
        active: Replicas that may still take steps.
    """

    def __init__(self, total: int, hold_s: float) -> None:
        self.steps: list[Step[T]] = []
        self.active = set(range(total))
        self._total = total
        self._hold = hold_s
        self._count = 0
        self._latest: dict[int, Step[T]] = {}  # of each replica
        self._equal: dict[tuple[str, str], list[Step[T]]] = {}  # by key
        self._joined: dict[tuple[int, tuple[str, str]], int] = {}  # by replica and key: the latest step's number

    def add(self, key: tuple[str, str], replica: int, content: T, now: float, *, last: bool = False) -> Step[T]:
        """A replica took a step: it joins an equal one of others, or makes a new one."""
        equal = self._equal.setdefault(key, [])
        start = bisect.bisect_right(equal, self._joined.get((replica, key), 0), key=lambda step: step.number)
        for step in equal[start : start + _MOST_CANDIDATES]:
            if self.join(step, replica):
                self._joined[replica, key] = step.number
                return step
        self._count += 1
        step = Step(key, now, {replica}, content, self._count, len(self.steps), last)
        self.steps.append(step)
        equal.append(step)
        self._joined[replica, key] = step.number
        self._latest[replica] = step
        return step

    def join(self, step: Step[T], replica: int) -> bool:
        """Make a step a replica's latest one, too. False if it was released, or comes before what the replica did."""
        latest = self._latest.get(replica)
        if step.released or replica in step.replicas or not self._slide(step, latest):
            return False
        step.replicas.add(replica)
        self._latest[replica] = step
        return True

    def _slide(self, step: Step[T], latest: Step[T] | None) -> bool:
        """Move a step, and what its replicas did after it, behind another one, if nobody's order forbids that."""
        if latest is None:
            return True
        steps = self.steps
        start, end = step.place, latest.place
        if start > end:
            return True
        if end - start > _LONGEST_SLIDE:
            return False
        moving, staying, orders = [], [], set[int]()
        for each in steps[start : end + 1]:
            if each is step or not orders.isdisjoint(each.orders):
                moving.append(each)
                orders |= each.orders
            else:
                staying.append(each)
        if moving[-1] is latest:
            return False
        steps[start : end + 1] = staying + moving
        self._number(start, end + 1)
        return True

    def release(self, now: float, *, final: bool = False) -> list[Step[T]]:
        """The steps that need not, or must not, wait any longer, in an order that depends on no replica's speed."""
        levels: dict[int, int] = {}  # of each replica's latest step: they grow along its sequence
        highest = 0
        placed = []
        for step in self.steps:
            level = 1 + (highest if step.last else max(levels.get(each, 0) for each in step.replicas))
            highest = max(highest, level)
            levels.update(dict.fromkeys(step.replicas, level))
            placed.append((level, min(step.replicas), step.number, step))
        ordered = [step for *_, step in sorted(placed)]
        overdue = [i for i, step in enumerate(ordered) if final or now - step.since >= self._hold]
        count = overdue[-1] + 1 if overdue else 0
        while count < len(ordered) and self.active <= ordered[count].replicas:
            count += 1
        self.steps = ordered[count:]
        self._number(0, len(self.steps))
        for step in ordered[:count]:
            self._forget(step)
        return ordered[:count]

    def _number(self, start: int, end: int) -> None:
        for place in range(start, end):
            self.steps[place].place = place

    def _forget(self, step: Step[T]) -> None:
        step.released = True
        for replica in step.replicas:
            if self._latest.get(replica) is step:
                del self._latest[replica]
        equal = self._equal[step.key]
        equal.remove(step)
        if not equal:
            del self._equal[step.key]
            for replica in range(self._total):
                self._joined.pop((replica, step.key), None)
