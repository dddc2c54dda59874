"""The model of a coordinator's view: the queue, the workers and the servers. Samples in, plain values out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from distnb.notebook.output.wording import human_bytes

if TYPE_CHECKING:
    from distnb.runtime.step_count import Reading
    from distnb.servers.coordinator.status import CoordinatorStatus, WorkerStatus
    from distnb.servers.variables.shard_placement import PlacedShard

__all__ = ["ClosuresModel", "largest", "runs_text", "server_texts"]

_RATE_WINDOW_S = 2.0
_MOST_SHARDS = 10


class ClosuresModel:
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


def runs_text(worker: WorkerStatus) -> str:
    """Return a worker's current closure or state in words."""
    if worker.state == "lost":
        return f"lost: {worker.how}"
    if worker.state == "stuck":
        return "stuck in a closure that was ended"
    return worker.closure or "idle"


def server_texts(shards: Iterable[PlacedShard]) -> dict[int, str]:
    """Return the content of each server in words, by its index: `4 shards, 412 kB`."""
    by_server: dict[int, list[int]] = {}
    for each in shards:
        by_server.setdefault(each.server, []).append(each.nbytes)
    return {
        server: f"{len(sizes)} shard{'s' if len(sizes) > 1 else ''}, {human_bytes(sum(sizes))}"
        for server, sizes in sorted(by_server.items())
    }


def largest(shards: Sequence[PlacedShard], most: int = _MOST_SHARDS) -> list[PlacedShard]:
    """Return the largest shards, in the order of their creation."""
    chosen = sorted(range(len(shards)), key=lambda place: -shards[place].nbytes)[:most]
    return [shards[place] for place in sorted(chosen)]
