"""Several sequences of steps woven into one: equal steps once, and each replica's own order kept.

The steps that were not released yet stand in one list, in an order that suits every replica. A step that two replicas
share may still slide behind what only one of them did, whoever was heard first.
"""

from __future__ import annotations

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
    """

    key: tuple[str, str]
    since: float
    replicas: set[int]
    content: T


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
        self._hold = hold_s
        self._latest: dict[int, Step[T]] = {}  # of each replica
        self._equal: dict[tuple[str, str], list[Step[T]]] = {}  # by key

    def add(self, key: tuple[str, str], replica: int, content: T, now: float) -> None:
        """A replica took a step: it joins an equal one of others, or makes a new one."""
        equal = self._equal.setdefault(key, [])
        candidates = [step for step in equal if replica not in step.replicas]
        step = next((each for each in candidates[:_MOST_CANDIDATES] if self._slide(each, replica)), None)
        if step is None:
            step = Step(key, now, {replica}, content)
            self.steps.append(step)
            equal.append(step)
        step.replicas.add(replica)
        self._latest[replica] = step

    def _slide(self, step: Step[T], replica: int) -> bool:
        """Move a step, and what its replicas did after it, behind a replica's latest, if no order forbids it."""
        latest = self._latest.get(replica)
        if latest is None:
            return True
        start, end = self.steps.index(step), self.steps.index(latest)
        if start > end:
            return True
        if end - start > _LONGEST_SLIDE:
            return False
        moving, staying, replicas = [], [], set(step.replicas)
        for each in self.steps[start : end + 1]:
            if replicas.isdisjoint(each.replicas):
                staying.append(each)
            else:
                moving.append(each)
                replicas |= each.replicas
        if moving[-1] is latest:
            return False
        self.steps[start : end + 1] = staying + moving
        return True

    def release(self, now: float, *, final: bool = False) -> list[Step[T]]:
        """The steps that need not, or must not, wait any longer, in an order that depends on no replica's speed."""
        levels: dict[int, int] = {}  # of each replica's latest step: they grow along its sequence
        places = {}
        for step in self.steps:
            level = 1 + max(levels.get(replica, 0) for replica in step.replicas)
            levels.update(dict.fromkeys(step.replicas, level))
            places[id(step)] = level, min(step.replicas)
        self.steps.sort(key=lambda step: places[id(step)])
        overdue = [i for i, step in enumerate(self.steps) if final or now - step.since >= self._hold]
        count = overdue[-1] + 1 if overdue else 0
        while count < len(self.steps) and self.active <= self.steps[count].replicas:
            count += 1
        released, self.steps = self.steps[:count], self.steps[count:]
        for step in released:
            self._equal[step.key].remove(step)
            if not self._equal[step.key]:
                del self._equal[step.key]
        waiting = {id(step) for step in self.steps}
        self._latest = {replica: step for replica, step in self._latest.items() if id(step) in waiting}
        return released
