"""The model of a coordinator's view: the queue, the workers and the servers. Samples in, plain values out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from distnb.servers.notebook.closures_drawing import runs_text, server_texts, shards_html, workers_html
from distnb.servers.notebook.queue_picture import queue_picture
from distnb.views.watch import Work
from distnb.views.wording import duration

if TYPE_CHECKING:
    from distnb.runtime.step_count import Reading
    from distnb.servers.coordinator.status import CoordinatorStatus
    from distnb.servers.variables.shard_placement import PlacedShard
    from distnb.views.live_model import LiveModel

__all__ = ["ClosuresModel"]

_RATE_WINDOW_S = 2.0


class ClosuresModel(Work):
    """The closures of one cell.

    Args:
        before: The coordinator's status when the cell first used it. Closures that had ended by then are not counted.

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
        """Apply a sample."""
        self.status = status
        self._history.append((now, status.done))
        self._first = self._first or self._history[0]
        while len(self._history) > 2 and self._history[1][0] < now - _RATE_WINDOW_S:
            self._history.popleft()

    def place(self, shards: tuple[PlacedShard, ...]) -> None:
        """Apply the servers' report of their shards."""
        self._shards = shards

    @property
    def shards(self) -> list[PlacedShard]:
        """The shards in the latest report, without those of lost servers."""
        return [each for each in self._shards if each.server not in self.status.lost_servers]

    def servers(self) -> list[str]:
        """Return a text for each server: `ps 0: 4 shards, 412 kB`."""
        texts = {**server_texts(self.shards), **dict.fromkeys(self.status.lost_servers, "lost")}
        return [f"ps {server}: {text}" for server, text in sorted(texts.items())]

    @property
    def workers(self) -> int:
        return len(self.status.workers)

    @property
    def replicas_per_worker(self) -> int:
        return self.status.replicas_per_worker

    @property
    def under_way(self) -> bool:
        """True while some closures have not ended."""
        return self.status.waiting + self.status.running > 0

    @property
    def failed(self) -> bool:
        """True if a closure of this cell failed, or a server was lost: the other closures were then cancelled."""
        return bool(self.counts()["failed"] or self.status.lost_servers)

    @property
    def steps(self) -> int:
        """The optimizer steps of this cell's closures, on all workers."""
        return self.status.steps - self._before.steps

    def counts(self) -> dict[str, int]:
        """Return the number of closures of each kind. Ended and retried closures are those of this cell."""
        ended = ("done", "failed", "cancelled", "retried")
        since = {name: getattr(self.status, name) - getattr(self._before, name) for name in ended}
        return {**since, "running": self.status.running, "waiting": self.status.waiting}

    def done_by(self, worker: int) -> int:
        """Return the number of closures that a worker has done in this cell."""
        done, before = (
            sum(each.done for each in status.workers if each.worker == worker) for status in (self.status, self._before)
        )
        return done - before

    def closures_per_second(self) -> float:
        """Return the rate over the last two seconds, or over the whole cell once all closures have ended."""
        if len(self._history) < 2 or self._first is None:
            return 0.0
        then, before = self._history[0] if self.under_way else self._first
        now, done = self._history[-1]
        return (done - before) / (now - then) if now > then else 0.0

    @property
    def reading(self) -> Reading | None:
        """The progress of a loop over epochs that schedules closures in this cell."""
        return self.status.reading if self.status.reading != self._before.reading else None

    def seconds_left(self) -> float | None:
        """Return the seconds until the queue is empty at the recent rate, or None if that is unknown.

        It is unknown for a loop over epochs, which schedules only as much as the workers can use at a time.
        """
        rate = self.closures_per_second()
        if not self.status.waiting or not rate or self.reading is not None:
            return None
        return (self.status.waiting + self.status.running) / rate

    def queue_text(self) -> str:
        """Return the queue in words: `790 done · 6 running · 1,204 waiting · 2 retried`."""
        order = ("done", "failed", "cancelled", "running", "waiting", "retried")
        counts = self.counts()
        return " · ".join(f"{counts[name]:,} {name}" for name in order if counts[name])

    def staleness_text(self) -> str:
        """Return the number of updates that the latest steps had missed, in words; "" if there are no steps."""
        if not self.steps:
            return ""
        return f"staleness {self.status.mean_staleness:.1f} (max {self.status.max_staleness})"

    # -- drawing -------------------------------------------------------------------------------------------------------

    def facts(self, *, ended: bool) -> list[str]:
        rate = self.closures_per_second()
        if not rate:
            return []
        facts = [f"{rate:,.0f} closures/s" if rate >= 100 else f"{rate:.1f} closures/s"]
        left = None if ended else self.seconds_left()
        return facts if left is None else [*facts, f"{duration(left)} left of the queue"]

    def lines(self) -> list[str]:
        queue = " · ".join(filter(None, [self.queue_text(), self.staleness_text()]))
        workers = [
            f"worker {each.worker}: {self.done_by(each.worker):,} done, {runs_text(each)}"
            for each in self.status.workers
        ]
        return [f"closures: {queue}", *workers, *self.servers()]

    def tables(self, model: LiveModel) -> list[str]:
        return [workers_html(model, self), *([shards_html(self)] if self.servers() else [])]

    def picture(self) -> str:
        return queue_picture(self.counts(), self.staleness_text())

    def picture_text(self) -> str:
        return self.queue_text()
