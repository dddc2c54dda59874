"""What the live view shows of a coordinator, as data: the queue, the workers, the servers. Samples in, values out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from distnb.notebook.output.wording import human_bytes

if TYPE_CHECKING:
    from distnb.coordinator.status import CoordinatorStatus, WorkerStatus
    from distnb.runtime.servers.shard_placement import PlacedShard
    from distnb.runtime.step_count import Reading

__all__ = ["ClosuresModel", "largest", "runs_text", "server_texts"]

_RATE_WINDOW_S = 2.0
_MOST_SHARDS = 10


class ClosuresModel:
    """The closures of one cell, and what becomes of them.

    Args:
        before: How the coordinator was when the cell first used it: what had ended by then is not this cell's.

    Attributes:
        status: The latest sample.
    """

    def __init__(self, before: CoordinatorStatus) -> None:
        self.status = before
        self._shards: tuple[PlacedShard, ...] = ()
        self._before = before
        self._history: deque[tuple[float, int]] = deque(maxlen=64)  # seconds, closures that were done
        self._first: tuple[float, int] | None = None

    def feed(self, status: CoordinatorStatus, now: float) -> None:
        """Take a sample."""
        self.status = status
        self._history.append((now, status.done))
        self._first = self._first or self._history[0]
        while len(self._history) > 2 and self._history[1][0] < now - _RATE_WINDOW_S:
            self._history.popleft()

    def place(self, shards: tuple[PlacedShard, ...]) -> None:
        """The servers told what they hold."""
        self._shards = shards

    @property
    def shards(self) -> list[PlacedShard]:
        """What the servers held when they were last asked; those that are lost hold nothing."""
        return [each for each in self._shards if each.server not in self.status.lost_servers]

    def servers(self) -> list[str]:
        """A text for each server: `ps 0: 4 shards, 412 kB`."""
        texts = {**server_texts(self.shards), **dict.fromkeys(self.status.lost_servers, "lost")}
        return [f"ps {server}: {text}" for server, text in sorted(texts.items())]

    @property
    def under_way(self) -> bool:
        """Whether some closures had not ended."""
        return self.status.waiting + self.status.running > 0

    @property
    def steps(self) -> int:
        """Optimizer steps of this cell's closures, on all workers."""
        return self.status.steps - self._before.steps

    def counts(self) -> dict[str, int]:
        """How many closures there are of each kind; those that have ended, and moves, of this cell."""
        ended = ("done", "failed", "cancelled", "retried")
        since = {name: getattr(self.status, name) - getattr(self._before, name) for name in ended}
        return {**since, "running": self.status.running, "waiting": self.status.waiting}

    def done_by(self, worker: int) -> int:
        """How many closures a worker has done in this cell."""
        done, before = (
            sum(each.done for each in status.workers if each.worker == worker) for status in (self.status, self._before)
        )
        return done - before

    def closures_per_second(self) -> float:
        """Over the last two seconds; once all have ended, over all."""
        if len(self._history) < 2 or self._first is None:
            return 0.0
        then, before = self._history[0] if self.under_way else self._first
        now, done = self._history[-1]
        return (done - before) / (now - then) if now > then else 0.0

    @property
    def reading(self) -> Reading | None:
        """How far a loop over epochs has come that schedules in this cell."""
        return self.status.reading if self.status.reading != self._before.reading else None

    def seconds_left(self) -> float | None:
        """How long it takes until the queue is empty, at the rate of the last seconds; None where that is not known.

        A loop over epochs schedules no more than workers have use for, and its queue tells nothing.
        """
        rate = self.closures_per_second()
        if not self.status.waiting or not rate or self.reading is not None:
            return None
        return (self.status.waiting + self.status.running) / rate

    def queue_text(self) -> str:
        """The queue in words: `790 done · 6 running · 1,204 waiting · 2 retried`."""
        order = ("done", "failed", "cancelled", "running", "waiting", "retried")
        counts = self.counts()
        return " · ".join(f"{counts[name]:,} {name}" for name in order if counts[name])

    def staleness_text(self) -> str:
        """How many updates the latest steps had missed; nothing where there was none."""
        if not self.steps:
            return ""
        return f"staleness {self.status.mean_staleness:.1f} (max {self.status.max_staleness})"


def runs_text(worker: WorkerStatus) -> str:
    """What a worker runs, in words."""
    if worker.state == "lost":
        return f"lost: {worker.how}"
    if worker.state == "stuck":
        return "stuck in one that was ended"
    return worker.closure or "idle"


def server_texts(shards: Iterable[PlacedShard]) -> dict[int, str]:
    """What each server holds, in words, by its index: `4 shards, 412 kB`."""
    by_server: dict[int, list[int]] = {}
    for each in shards:
        by_server.setdefault(each.server, []).append(each.nbytes)
    return {
        server: f"{len(sizes)} shard{'s' if len(sizes) > 1 else ''}, {human_bytes(sum(sizes))}"
        for server, sizes in sorted(by_server.items())
    }


def largest(shards: Sequence[PlacedShard], most: int = _MOST_SHARDS) -> list[PlacedShard]:
    """The shards that take most memory, in the order in which they were made."""
    chosen = sorted(range(len(shards)), key=lambda place: -shards[place].nbytes)[:most]
    return [shards[place] for place in sorted(chosen)]
