"""Map-style data loaded by DataLoader workers, only this replica's own slice of each global batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader

from distnb.errors import ProgramError
from distnb.input.draws import WorkerSeeds, draws_at_start_only, on_host
from distnb.input.feed import BatchRequest, FeedingSampler
from distnb.input.sources import children
from distnb.input.sources.base import FROM_THE_START, Beginning, Load, Place, Shared
from distnb.input.sources.loaders import changed, own_seeds
from distnb.input.splitting.collating import CollateRule
from distnb.input.splitting.sliced import SlicedSource

__all__ = ["WorkerSource", "end_workers", "free_workers", "has_lost_workers", "has_workers"]

_PATIENCE_S = 1.0


class WorkerSource(SlicedSource):
    """The examples of a DataLoader with workers, each replica with workers of its own.

    The work is done by a copy of the loader whose batch sampler asks for the replica's slices, so that torch's own
    machinery (seeds, persistent workers, pinning, time-outs) acts as it does for the user's loader.
    """

    def __init__(self, loader: DataLoader[Any], place: Place, rule: CollateRule, shared: Shared) -> None:
        super().__init__(loader, place, rule, shared)
        self._copy: tuple[DataLoader[Any], FeedingSampler] | None = None
        self.threadable = draws_at_start_only(loader.batch_sampler)
        self.exclusive = bool(loader.persistent_workers)

    def start(self, beginning: Beginning = FROM_THE_START) -> Iterator[Load]:
        whole = self._rule.needs_whole_batches()
        # Persistent workers live in the copy, so it is kept; else attributes that the user changed since are seen.
        if beginning.kept not in (None, self.kept()):
            self._copy = self._make_copy(whole, seeded=beginning.kept is True)
        elif self._copy is None or not self.exclusive or has_lost_workers(self._copy[0]):
            self._copy = self._make_copy(whole)
        copied, sampler = self._copy
        sampler.skip = beginning.skip
        iterator = iter(copied)
        shared = None if self.threadable else self._shared
        return _WorkerBatches(iterator, sampler.pending, shared, self._place, self.exclusive, self._forget)

    def _forget(self) -> None:
        self._copy = None

    def kept(self) -> bool:
        return self._copy is not None and has_workers(self._copy[0])

    def _make_copy(self, whole: bool, seeded: bool = False) -> tuple[DataLoader[Any], FeedingSampler]:
        sampler = FeedingSampler(self._loader.batch_sampler, self._place, whole)  # type: ignore[arg-type]
        # Without order there is no telling which global batch a slice belongs to.
        attributes: dict[str, Any] = {"batch_sampler": sampler, "in_order": True}
        if self._place.replica_id and not whole:
            attributes["worker_init_fn"] = WorkerSeeds(self._place.replica_id, self._loader.worker_init_fn)
        return changed(self._loader, **attributes, **(own_seeds() if seeded else {})), sampler


class _WorkerBatches(Iterator[Load]):
    def __init__(
        self,
        iterator: Iterator[Any],
        pending: deque[BatchRequest],
        shared: Shared | None,
        place: Place,
        persistent: bool,
        forget: Callable[[], None],
    ) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._pending = pending
        self._shared = shared
        self._device = place.device
        self.persistent = persistent
        self._forget = forget
        self._failed = False
        self._closed = False

    def __next__(self) -> Load:
        iterator = self._iterator
        if self._closed or iterator is None:
            raise StopIteration
        if self._failed:
            raise ProgramError(
                "Loading a batch failed before, so this iteration has ended. Start a new one: iterate over the "
                "dataset again."
            )
        try:
            with on_host(self._device):
                if self._shared is None:
                    tree = next(iterator)
                else:
                    with self._shared():
                        tree = next(iterator)
        except StopIteration:
            raise
        except BaseException:
            # Whether the failed batch counts among the requests is torch's secret, so there is no going on.
            self._failed = True
            raise
        return self._pending.popleft().loaded(tree)

    def close(self) -> None:
        """End the workers; persistent ones stay. It may wait for a batch that is being loaded."""
        self._closed = True
        if not self.persistent:
            iterator, self._iterator = self._iterator, None
            end_workers(iterator)

    def free(self) -> None:
        """End the workers from another thread, when one is stuck and the reader with it."""
        self._forget()
        free_workers(self._iterator)


def has_workers(loader: DataLoader[Any]) -> bool:
    """Whether persistent workers of a loader wait for the next iteration."""
    return loader.__dict__.get("_iterator") is not None and not has_lost_workers(loader)


def has_lost_workers(loader: DataLoader[Any]) -> bool:
    """Whether persistent workers of a loader have ended, as those of an interrupted program do."""
    kept = loader.__dict__.get("_iterator")
    return kept is not None and not all(worker.is_alive() for worker in kept._workers)


def end_workers(iterator: Any) -> None:
    """Shut the workers of a DataLoader's iterator down: tracebacks may hold the iterator for long."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None and not getattr(iterator, "_shutdown", False):
        # Torch waits 5 s for one that is stuck, then ends it without letting it tidy up: it is interrupted before.
        hurry = threading.Timer(_PATIENCE_S, children.interrupt, (iterator._workers,))
        hurry.daemon = True
        hurry.start()
        shutdown()
        hurry.cancel()


def free_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, also a stuck one that a thread waits for.

    The iterator cannot be told to shut them down: the waiting thread would no longer look whether they live, and so
    wait for ever.
    """
    workers = getattr(iterator, "_workers", ())
    if not workers:
        return
    _remove_worker_pids(id(iterator))  # else torch's handler raises in the main thread, wherever that is
    iterator._worker_pids_set = False
    iterator._workers_done_event.set()
    children.interrupt(workers)
    for worker in workers:
        worker.join(children.TIDY_UP_S)
        worker.kill()
