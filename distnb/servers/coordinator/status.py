"""A snapshot of the state of a coordinator and its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from distnb.runtime.step_count import Reading

__all__ = ["CoordinatorStatus", "WorkerState", "WorkerStatus"]

WorkerState = Literal["idle", "running", "stuck", "lost"]


@dataclass(frozen=True)
class WorkerStatus:
    """The state of one worker.

    Attributes:
        worker: The index of the worker.
        state: The worker's state. "stuck": it was ordered to end a closure, and did not.
        closure, seconds: The name of the function that it runs, and the time since the start, as far as known here.
        done: The number of closures that it has done, including those of lost processes.
        how: The reason why it was lost.
    """

    worker: int
    state: WorkerState
    closure: str = ""
    seconds: float = 0.0
    done: int = 0
    how: str = ""


@dataclass(frozen=True)
class CoordinatorStatus:
    """The numbers of closures of each kind, and the states of the workers.

    Attributes:
        waiting: Closures that are not with a worker.
        running: Closures that are with a worker: the running one, and the next.
        done, failed, cancelled: Closures that ended well, by an error, or without a result.
        retried: The number of moves of a closure from a lost worker to another.
        workers: The states of the workers.
        mean_staleness, max_staleness: The numbers of updates that the gradients of the latest optimizer steps missed.
        lost_servers: The parameter servers that are lost.
        steps: The number of optimizer steps of closures that ended well.
        replicas_per_worker: The number of replicas of each worker. Worker *w* has the replicas from *w* times this on.
        reading: The progress of a loop over epochs, such as Keras's, that schedules the closures; None if there is
            none.
    """

    waiting: int
    running: int
    done: int
    failed: int
    cancelled: int
    retried: int
    workers: tuple[WorkerStatus, ...]
    mean_staleness: float
    max_staleness: int
    lost_servers: tuple[int, ...] = ()
    steps: int = 0
    replicas_per_worker: int = 1
    reading: Reading | None = None
