"""Several sequences of steps woven into one, with equal steps once and each replica's own order kept.

Example. Replica 0 takes steps a, b, d and replica 1 takes a, c, d. Woven: a (both), b (0), c (1), d (both). Step d
follows b and c, because a replica that shares it has them first.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Weave", "WovenStep"]

T = TypeVar("T")


@dataclass(eq=False)
class WovenStep(Generic[T]):
    """A step of one or several replicas. `since` is the time at which the first of these took it."""

    key: tuple[str, str]
    content: T
    since: float
    replicas: set[int]


class Weave(Generic[T]):
    """The steps that have not been released yet. Replicas whose steps have the same key may share one.

    Args:
        total: The number of replicas.
        hold_s: The time for which a step waits for other replicas to share it, once a step has waited in vain.
        first_s: This time for the first step, and the longest time. If a replica takes a step that has been released
            without it, further steps wait for twice its delay.

    Attributes:
        active: The replicas that may still take steps.
    """

    def __init__(self, total: int, hold_s: float, first_s: float) -> None:
        self.active = set(range(total))
        self._hold, self._least, self._most = first_s, hold_s, first_s
        self._missed: dict[tuple[str, str], tuple[float, set[int]]] = {}  # steps that some replicas have not taken
        self._queues: dict[int, deque[WovenStep[T]]] = {replica: deque() for replica in range(total)}

    @property
    def empty(self) -> bool:
        """True if all steps have been released."""
        return not any(self._queues.values())

    def add(self, key: tuple[str, str], replica: int, content: T, now: float) -> None:
        """Add a step that a replica took."""
        since, without = self._missed.get(key, (0.0, ()))
        if replica in without:
            self._hold = min(max(self._hold, 2 * (now - since)), self._most)
        self._queues[replica].append(WovenStep(key=key, content=content, since=now, replicas={replica}))

    def release(self, now: float, *, final: bool = False) -> list[WovenStep[T]]:
        """Release and return the steps that are complete or overdue. Their order does not depend on replicas' speed."""
        woven = self._woven()
        overdue = [place for place, step in enumerate(woven) if final or now - step.since >= self._hold]
        count = overdue[-1] + 1 if overdue else 0
        if count and not final:
            self._hold = self._least
            self._missed = {step.key: (step.since, self.active - step.replicas) for step in woven[:count]}
        while count < len(woven) and self.active <= woven[count].replicas:
            count += 1
        for step in woven[:count]:
            for replica in step.replicas:
                self._queues[replica].popleft()
        return woven[:count]

    def _woven(self) -> list[WovenStep[T]]:
        """Return all steps in an order in which each step follows all steps that precede it on any replica."""
        queues = {replica: deque(queue) for replica, queue in self._queues.items() if queue}
        left = {replica: Counter(step.key for step in queue) for replica, queue in queues.items()}
        holders = Counter(key for keys in left.values() for key in keys)  # how many replicas have each step left
        heads: dict[tuple[str, str], set[int]] = defaultdict(set)  # the replicas whose next step it is
        for replica, queue in queues.items():
            heads[queue[0].key].add(replica)
        woven = []
        while queues:
            here = (queue[0].key for queue in queues.values())
            # If no step is next for all its holders, replicas took equal steps in different orders. Any step will do.
            key = next((key for key in here if len(heads[key]) == holders[key]), next(iter(queues.values()))[0].key)
            replicas = heads.pop(key)
            steps = [queues[replica].popleft() for replica in sorted(replicas)]
            since = min(step.since for step in steps)
            woven.append(WovenStep(key=key, content=steps[0].content, since=since, replicas=replicas))
            for replica in replicas:
                left[replica][key] -= 1
                holders[key] -= not left[replica][key]
                if queues[replica]:
                    heads[queues[replica][0].key].add(replica)
                else:
                    del queues[replica]
        return woven
