"""The assignment of closures to workers: a state machine without IO. Events and the time go in, orders come out.

Closures are numbered in the order in which they were scheduled, and start in that order. A closure of a lost worker
keeps its number, so it comes next. A worker has the closure that it runs and the next ones, so it does not wait for a
round trip between them; a worker of short closures has more of them. An idle worker gets the last closure that another
worker has not started.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from distnb.story import StateMachine, transition

__all__ = [
    "Cancel",
    "ClosureQueue",
    "Counts",
    "Interrupt",
    "Order",
    "Reclaim",
    "ReportNoWorker",
    "Send",
    "WorkerState",
]

_SHORT_S, _MOST_SHORT = 0.001, 12  # a worker has so many closures after one that took less than this time
_PATIENCE_S = 0.02  # reclaiming a closure costs a round trip, so one that may start soon is not reclaimed


class Send(NamedTuple):
    """Order to send a closure to a worker."""

    closure: int
    worker: int


class Reclaim(NamedTuple):
    """Order to reclaim a closure that a worker has not started, because another worker is idle."""

    closure: int
    worker: int


class Interrupt(NamedTuple):
    """Order to end a closure that is with a worker."""

    closure: int
    worker: int


class Cancel(NamedTuple):
    """Order to mark a closure as ended without a result."""

    closure: int


class ReportNoWorker(NamedTuple):
    """Order to report that closures wait and there is no worker to run them."""


Order = Send | Reclaim | Interrupt | Cancel | ReportNoWorker

_State = tuple[dict[int, tuple[int, ...]], int, int, int, int]


class Counts(NamedTuple):
    """The numbers of closures by state: waiting, with workers, done, failed and cancelled. `retried` counts the moves
    from a lost worker to another.
    """

    waiting: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0


class WorkerState(NamedTuple):
    """The closure that a worker runs, its start time, and whether the worker is stuck in an abandoned closure."""

    closure: int | None
    began: float
    stuck: bool


@dataclass
class _Worker:
    depth: int  # the number of closures that it may have
    closures: list[int] = field(default_factory=list)  # in the order in which the worker runs them
    began: float = 0.0  # start time of the first one
    reclaiming: int | None = None
    stuck_in: set[int] = field(default_factory=set)  # abandoned closures without a reply so far


class ClosureQueue(StateMachine):
    """The queue of closures, each from `scheduled` until it is done, failed or cancelled.

    Args:
        depth: The largest number of closures that one worker has. Unless it is 1, a worker of short closures has more.

    Attributes:
        done_by: The number of closures that each worker has done, including lost workers.
    """

    log = logging.getLogger("distnb.servers.coordinator.queue")

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self._depth = depth
        self._most = max(depth, _MOST_SHORT) if depth > 1 else 1
        self._waiting: list[int] = []  # a heap
        self._blocked: dict[int, set[int]] = {}  # by closure: the closures whose results it needs
        self._dependents: dict[int, list[int]] = {}
        self._workers: dict[int, _Worker] = {}
        self._large: set[int] = set()
        self._ending: set[int] = set()  # with a worker, and ordered to end
        self._unfinished: set[int] = set()
        self._astray: set[int] = set()  # a process may still run them, though their workers are lost or ordered to end
        self._oldest = 0
        self._latest = -1
        self._scheduled = 0
        self.done_by: Counter[int] = Counter()
        self._done = self._failed = self._cancelled = self._retried = 0
        self._no_worker_reported = False

    # -- events ----------------------------------------------------------------------------------------------------

    @transition
    def scheduled(
        self, closure: int, now: float, after: Collection[int] = (), *, is_large: bool = False
    ) -> list[Order]:
        """Add a closure. It runs once the unfinished closures `after` are done. Numbers must grow.

        A large closure is not among those that a worker of short closures has in addition: they take memory there.
        """
        self._latest = closure
        if is_large:
            self._large.add(closure)
        self._scheduled += 1
        self._unfinished.add(closure)
        if after:
            self._blocked[closure] = set(after)
            for each in self._blocked[closure]:
                self._dependents.setdefault(each, []).append(closure)
            return []
        heapq.heappush(self._waiting, closure)
        return self._assign(now)

    @transition
    def worker_up(self, worker: int, now: float) -> list[Order]:
        """Add a worker: a new one, or a replacement of a lost one."""
        orders = self._lose(worker, now)
        self._workers[worker] = _Worker(self._depth)
        self._no_worker_reported = False
        return orders + self._assign(now)

    @transition
    def worker_lost(self, worker: int, now: float) -> list[Order]:
        """Remove a worker. Other workers run its closures."""
        return self._lose(worker, now)

    def _lose(self, worker: int, now: float) -> list[Order]:
        lost = self._workers.pop(worker, None)
        if lost is None:
            return []
        orders: list[Order] = []
        self._astray.update(lost.closures)
        for closure in lost.closures:
            if closure in self._ending:
                orders += self._cancel(closure)
            else:
                self._retried += 1
                heapq.heappush(self._waiting, closure)
        return orders + self._assign(now)

    @transition
    def ended(self, worker: int, closure: int, how: Literal["done", "failed", "cancelled"], now: float) -> list[Order]:
        """Handle the end of a closure, as its worker reports it. After an error, end all others, too."""
        current = self._workers.get(worker)
        if current is None:
            return []
        if closure not in current.closures:
            current.stuck_in.discard(closure)
            return self._assign(now)
        if closure == current.closures[0]:
            current.depth = self._most if now - current.began < _SHORT_S else self._depth
        self._leave(current, closure, now)
        orders: list[Order] = []
        if how != "done":
            self._astray.add(closure)  # its last message to a server may still be on its way
        if how == "cancelled":
            orders += self._cancel(closure)
        elif how == "failed":
            self._finish(closure)
            self._failed += 1
            orders += self._cancel_all()
        else:
            self._finish(closure)
            self._done += 1
            self.done_by[worker] += 1
            for dependent in self._dependents.pop(closure, ()):
                needed = self._blocked.get(dependent, set())
                needed.discard(closure)
                if not needed and self._blocked.pop(dependent, None) is not None:
                    heapq.heappush(self._waiting, dependent)
        return orders + self._assign(now)

    @transition
    def reclaimed(self, worker: int, closure: int, now: float) -> list[Order]:
        """Handle the return of a closure that a worker has not started."""
        current = self._workers.get(worker)
        if current is None or closure not in current.closures:
            return []
        self._leave(current, closure, now)
        if closure in self._ending:
            return self._cancel(closure) + self._assign(now)
        heapq.heappush(self._waiting, closure)
        return self._assign(now)

    @transition
    def abandoned(self, worker: int, closure: int, now: float) -> list[Order]:
        """Mark a worker that did not follow the order to end a closure. It gets no other closure until it replies."""
        current = self._workers.get(worker)
        if current is None or closure not in current.closures:
            return []
        current.stuck_in.add(closure)
        self._astray.add(closure)
        self._leave(current, closure, now)
        return self._cancel(closure) + self._assign(now)

    @transition
    def cancel(self, now: float) -> list[Order]:
        """Cancel every unfinished closure."""
        return self._cancel_all()

    def _cancel_all(self) -> list[Order]:
        queued = sorted([*self._waiting, *self._blocked])
        self._waiting.clear()
        self._blocked.clear()
        self._dependents.clear()
        orders = [order for closure in queued for order in self._cancel(closure)]
        for worker, current in self._workers.items():
            for closure in reversed(current.closures):  # backwards: the worker must not begin with the next closure
                if closure not in self._ending:
                    self._ending.add(closure)
                    orders.append(Interrupt(closure, worker))
        return orders

    @transition
    def tick(self, now: float) -> list[Order]:
        """Return the orders that are due at this time."""
        return self._assign(now)

    # -- the story -------------------------------------------------------------------------------------------------

    def state(self) -> _State:
        """Return the closures of each worker, and the number of waiting, done, failed and cancelled closures."""
        workers = {worker: (*each.closures,) for worker, each in self._workers.items()}
        return workers, len(self._waiting) + len(self._blocked), self._done, self._failed, self._cancelled

    def in_words(self, state: _State) -> str:
        """Return the state as text."""
        workers, *counts = state
        parts = [f"worker {worker}: {', '.join(map(str, closures)) or 'idle'}" for worker, closures in workers.items()]
        parts += [f"{n} {kind}" for n, kind in zip(counts, ("queued", "done", "failed", "cancelled"), strict=True) if n]
        return f"[{'; '.join(parts) or 'nothing'}]"

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each invariant that does not hold."""
        with_workers = [closure for each in self._workers.values() for closure in each.closures]
        placed = Counter([*self._waiting, *self._blocked, *with_workers])
        if several := [closure for closure, places in placed.items() if places > 1]:
            yield f"closures {several} are in several places: waiting, blocked or with workers"
        if placed.keys() != self._unfinished:
            yield f"closures {sorted(placed.keys() ^ self._unfinished)} are either placed or unfinished, but not both"
        if not self._ending.issubset(with_workers):
            yield f"closures {sorted(self._ending.difference(with_workers))} are ending, but no worker has them"
        if self._scheduled != len(self._unfinished) + self._done + self._failed + self._cancelled:
            yield f"{self._scheduled} closures were scheduled, but {self.counts} does not add up to that"
        if sum(self.done_by.values()) != self._done:
            yield f"workers have done {dict(self.done_by)}, but {self._done} closures are done"
        for closure, needed in self._blocked.items():
            if not needed or not needed <= self._unfinished:
                yield f"closure {closure} is blocked by {sorted(needed)}, which are not all unfinished"
            if any(closure not in self._dependents.get(each, ()) for each in needed):
                yield f"closure {closure} is blocked, and no other closure will unblock it"
        for worker, current in self._workers.items():
            if len(current.closures) > self._most:
                yield f"worker {worker} has {current.closures}, more than {self._most}"
            if current.reclaiming not in (None, *current.closures):
                yield f"closure {current.reclaiming} is being reclaimed from worker {worker}, which does not have it"
            if not current.stuck_in.isdisjoint(current.closures):
                yield f"closures {sorted(current.stuck_in)} were abandoned, but worker {worker} has them"
            depth = self._depth if self._waiting and self._waiting[0] in self._large else current.depth
            if self._waiting and len(current.closures) < depth and not current.stuck_in:
                yield f"worker {worker} has room for a closure, but some wait"

    # -- the current state -----------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        """The numbers of closures of each kind, since the queue was made."""
        running = sum(len(each.closures) for each in self._workers.values())
        return Counts(
            waiting=self.queued,
            running=running,
            done=self._done,
            failed=self._failed,
            cancelled=self._cancelled,
            retried=self._retried,
        )

    @property
    def queued(self) -> int:
        """The number of closures that are not with a worker."""
        return len(self._waiting) + len(self._blocked)

    @property
    def idle(self) -> bool:
        """True if every closure has ended."""
        return not self._unfinished

    @property
    def ending(self) -> bool:
        """True if some closures were ordered to end and have not ended."""
        return bool(self._ending)

    @property
    def oldest(self) -> int:
        """The smallest number of an unfinished closure."""
        while self._oldest <= self._latest and self._oldest not in self._unfinished:
            self._oldest += 1
        return self._oldest

    def astray(self, oldest: int) -> set[int]:
        """Return the ended closures that a process may still run.

        Args:
            oldest: The oldest unfinished closure of all queues. Closures before it are forgotten.
        """
        if not self._astray:
            return self._astray
        self._astray = {closure for closure in self._astray if closure >= oldest}
        return self._astray - self._unfinished

    @property
    def workers(self) -> dict[int, WorkerState]:
        """The state of each worker."""
        return {
            worker: WorkerState(next(iter(each.closures), None), each.began, bool(each.stuck_in))
            for worker, each in self._workers.items()
        }

    def is_reclaiming(self, worker: int, closure: int) -> bool:
        """Return whether a closure was reclaimed from a worker that has not replied yet."""
        current = self._workers.get(worker)
        return current is not None and current.reclaiming == closure

    def has(self, worker: int) -> tuple[int, ...]:
        """Return the closures that are with a worker, the running one first."""
        current = self._workers.get(worker)
        return tuple(current.closures) if current else ()

    def next_deadline(self) -> float | None:
        """Return the time at which `tick` has something to do next."""
        reclaimable = self._reclaimable()
        return min([self._workers[each].began for each in reclaimable]) + _PATIENCE_S if reclaimable else None

    # -- steps -----------------------------------------------------------------------------------------------------

    def _assign(self, now: float) -> list[Order]:
        orders: list[Order] = []
        while self._waiting:
            most = self._depth if self._waiting[0] in self._large else self._most
            worker, least, fewest, is_one_there = -1, None, most, False
            for number, current in self._workers.items():
                if current.stuck_in:
                    continue
                is_one_there = True
                if len(current.closures) < min(fewest, current.depth):
                    worker, least, fewest = number, current, len(current.closures)
            if not is_one_there:
                reported, self._no_worker_reported = self._no_worker_reported, True
                return orders if reported else [*orders, ReportNoWorker()]
            if least is None:
                return orders
            closure = heapq.heappop(self._waiting)
            if not least.closures:
                least.began = now
            least.closures.append(closure)
            orders.append(Send(closure, worker))
        for worker in self._reclaimable():
            current = self._workers[worker]
            if now >= current.began + _PATIENCE_S:
                current.reclaiming = current.closures[-1]
                orders.append(Reclaim(current.closures[-1], worker))
        return orders

    def _reclaimable(self) -> list[int]:
        """Return the workers from which to reclaim a closure, at most as many as there are idle workers."""
        if self._waiting or self._depth == 1:
            return []
        idle, ready = 0, []
        for worker, current in self._workers.items():
            if current.reclaiming is not None:
                idle -= 1  # its closure is for an idle worker
            elif len(current.closures) > 1:
                ready.append(worker)
            if not current.closures and not current.stuck_in:
                idle += 1
        if idle <= 0 or not ready:
            return []
        return [each for each in ready[:idle] if self._workers[each].closures[-1] not in self._ending]

    def _leave(self, current: _Worker, closure: int, now: float) -> None:
        if current.closures[0] == closure:
            current.began = now
        current.closures.remove(closure)
        if current.reclaiming == closure:
            current.reclaiming = None

    def _finish(self, closure: int) -> None:
        self._unfinished.discard(closure)
        self._ending.discard(closure)
        if self._large:
            self._large.discard(closure)

    def _cancel(self, closure: int) -> list[Order]:
        """Cancel a closure, and the closures that need its result."""
        self._finish(closure)
        self._cancelled += 1
        orders: list[Order] = [Cancel(closure)]
        for dependent in self._dependents.pop(closure, ()):
            if self._blocked.pop(dependent, None) is not None:
                orders += self._cancel(dependent)
        return orders
