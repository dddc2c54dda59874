"""The state of a coordinator and its workers at one moment."""

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
        state: "stuck": it was ordered to end a closure, and did not.
        closure, seconds: The name of the function that it runs, and since when it does; as far as is known here.
        done: Closures that it has done, those of processes that were lost among them.
        how: How it was lost.
    """

    worker: int
    state: WorkerState
    closure: str = ""
    seconds: float = 0.0
    done: int = 0
    how: str = ""


@dataclass(frozen=True)
class CoordinatorStatus:
    """The numbers of closures of each kind, and the state of the workers.

    Attributes:
        waiting: Not with a worker.
        running: With a worker: what it runs, and the next.
        done, failed, cancelled: Ended well, by an error, or without a result.
        retried: How often one was moved from a lost worker to another.
        mean_staleness, max_staleness: Of the latest optimizer steps: how many updates their gradients had missed.
        lost_servers: Parameter servers that are gone.
        steps: Optimizer steps of closures that ended well.
        replicas_per_worker: Worker *w* has the replicas from *w* times as many on.
        reading: The position of a loop over epochs that schedules the closures, as Keras's; None where there is none.
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
