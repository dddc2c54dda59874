"""Several sequences of steps woven into one: equal steps once, and each replica's own order kept."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Weave", "WovenStep"]

T = TypeVar("T")


@dataclass(eq=False)
class WovenStep(Generic[T]):
    """One step of one or several replicas; of the latter, `since` is when it was first heard of."""

    key: tuple[str, str]
    content: T
    since: float
    replicas: set[int]


class Weave(Generic[T]):
    """The steps that were not released yet. Replicas whose steps have the same key may share one.

    Args:
        total: Number of replicas.
        hold_s: A step waits at most this long for other replicas to share it.

    Attributes:
        active: Replicas that may still take steps.
    """

    def __init__(self, total: int, hold_s: float) -> None:
        self.active = set(range(total))
        self._hold = hold_s
        self._queues: dict[int, deque[WovenStep[T]]] = {replica: deque() for replica in range(total)}

    @property
    def empty(self) -> bool:
        """Whether all steps were released."""
        return not any(self._queues.values())

    def add(self, key: tuple[str, str], replica: int, content: T, now: float) -> None:
        """A replica took a step."""
        self._queues[replica].append(WovenStep(key, content, now, {replica}))

    def release(self, now: float, *, final: bool = False) -> list[WovenStep[T]]:
        """The steps that need not, or must not, wait any longer, in an order that depends on no replica's speed."""
        woven = self._woven()
        overdue = [place for place, step in enumerate(woven) if final or now - step.since >= self._hold]
        count = overdue[-1] + 1 if overdue else 0
        while count < len(woven) and self.active <= woven[count].replicas:
            count += 1
        for step in woven[:count]:
            for replica in step.replicas:
                self._queues[replica].popleft()
        return woven[:count]

    def _woven(self) -> list[WovenStep[T]]:
        """All steps in an order that suits every replica: none is taken while another replica will come to it, too."""
        queues = {replica: deque(queue) for replica, queue in self._queues.items() if queue}
        left = {replica: Counter(step.key for step in queue) for replica, queue in queues.items()}
        holders = Counter(key for keys in left.values() for key in keys)  # replicas that have, or will come to, a step
        heads: dict[tuple[str, str], set[int]] = defaultdict(set)  # who has come to it
        for replica, queue in queues.items():
            heads[queue[0].key].add(replica)
        woven = []
        while queues:
            here = (queue[0].key for queue in queues.values())
            # Where each waits for another, replicas took the same steps in different orders.
            key = next((key for key in here if len(heads[key]) == holders[key]), next(iter(queues.values()))[0].key)
            who = heads.pop(key)
            steps = [queues[replica].popleft() for replica in sorted(who)]
            woven.append(WovenStep(key, steps[0].content, min(step.since for step in steps), who))
            for replica in who:
                left[replica][key] -= 1
                holders[key] -= not left[replica][key]
                if queues[replica]:
                    heads[queues[replica][0].key].add(replica)
                else:
                    del queues[replica]
        return woven
