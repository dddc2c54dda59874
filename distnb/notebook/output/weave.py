"""Several sequences of steps woven into one: equal steps once, and each replica's own order kept.

What has not been released yet is a partial order: a step comes after whatever each of its replicas did before it.
So a step that two replicas share may still slide behind what only one of them did, whoever was heard first.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Step", "Weave"]

T = TypeVar("T")

_MOST_CANDIDATES = 16
_MOST_VISITED = 500
_FIGURES = -1  # figures have an order of their own, whoever shows them


@dataclass(eq=False)
class Step(Generic[T]):
    """One step of one or several replicas.

    Attributes:
        key: Replicas whose steps have the same key may share one.
        since: When it was first heard of.
        content: What it is.
        level: Grows along every replica's sequence.
    """

    key: tuple[str, str]
    since: float
    replicas: set[int]
    content: T
    level: int = 0
    position: int = 0
    followers: dict[int, Step[T]] = field(default_factory=dict)
    released: bool = False


class Weave(Generic[T]):
    """The steps that were not released yet.

    Args:
        total: Number of replicas.
        hold_s: A step waits at most this long for other replicas to share it.
    """

    def __init__(self, total: int, hold_s: float) -> None:
        self._total = total
        self._hold = hold_s
        self._steps: dict[int, Step[T]] = {}
        self._positions = itertools.count()
        self._last: dict[int, Step[T]] = {}
        self._places: dict[tuple[str, str], list[int]] = {}
        self._joined: dict[tuple[int, tuple[str, str]], int] = {}
        self._floor = 0  # level of the latest released step: nobody's steps fall behind for having been few
        self.active = set(range(total))

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step[T]]:
        return iter(self._steps.values())

    def add(self, key: tuple[str, str], replica: int, content: T, now: float) -> Step[T]:
        """A replica took a step: it joins an equal one of others, or makes a new one."""
        places = self._places.get(key, ())
        start = bisect.bisect_right(places, self._joined.get((replica, key), -1))
        for position in places[start : start + _MOST_CANDIDATES]:
            step = self._steps[position]
            if replica not in step.replicas and self.follow(step, replica):
                self._joined[replica, key] = position
                return step
        step = Step(key, now, {replica}, content, position=next(self._positions))
        self._steps[step.position] = step
        self._places.setdefault(key, []).append(step.position)
        self._joined[replica, key] = step.position
        self.follow(step, replica)
        return step

    def add_fixed(self, key: tuple[str, str], replica: int, content: T, now: float) -> Step[T]:
        """A step that keeps its place among those of its kind, whoever joins it later."""
        step = self.add(key, replica, content, now)
        latest = max((each.level for each in self._last.values()), default=0)
        self.follow(step, _FIGURES)
        self._raise(step, latest + 1)
        return step

    def follow(self, step: Step[T], replica: int) -> bool:
        """Make a step the latest of a replica. False if it comes before what the replica did already."""
        last = self._last.get(replica)
        if step.released or last is step:
            return last is step
        if last is not None and not last.released:
            if step.level <= last.level and self._comes_before(step, last):
                return False
            last.followers[replica] = step
        self._raise(step, max(last.level if last is not None else 0, self._floor) + 1)
        self._last[replica] = step
        if replica >= 0:
            step.replicas.add(replica)
        return True

    def _raise(self, step: Step[T], level: int) -> None:
        waiting = [(step, level)]
        while waiting:
            each, least = waiting.pop()
            if each.level < least:
                each.level = least
                waiting += [(follower, least + 1) for follower in each.followers.values()]

    def _comes_before(self, step: Step[T], other: Step[T]) -> bool:
        """Whether the order of some replicas puts a step before another; True too when that takes long to tell."""
        seen: set[int] = set()
        waiting = [step]
        while waiting:
            each = waiting.pop()
            if each is other or len(seen) > _MOST_VISITED:
                return True
            if each.position not in seen and each.level <= other.level:
                seen.add(each.position)
                waiting += each.followers.values()
        return False

    def release(self, now: float, *, final: bool = False) -> list[Step[T]]:
        """The steps that need not, or must not, wait any longer, in an order that depends on no replica's speed."""
        ordered = sorted(self._steps.values(), key=lambda step: (step.level, min(step.replicas), step.position))
        overdue = [i for i, step in enumerate(ordered) if final or now - step.since >= self._hold]
        count = overdue[-1] + 1 if overdue else 0
        while count < len(ordered) and self.active <= ordered[count].replicas:
            count += 1
        for step in ordered[:count]:
            self._remove(step)
        return ordered[:count]

    def _remove(self, step: Step[T]) -> None:
        step.released = True
        step.followers.clear()
        self._floor = max(self._floor, step.level)
        del self._steps[step.position]
        places = self._places[step.key]
        places.remove(step.position)
        if not places:
            del self._places[step.key]
            for replica in range(self._total):
                self._joined.pop((replica, step.key), None)
