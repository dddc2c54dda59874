"""Map-style data loaded by DataLoader workers, only this replica's own slice of each global batch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from multiprocessing import connection, util
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from distnb.errors import ProgramError
from distnb.input.collating import CollateRule
from distnb.input.draws import WorkerSeeds, draws_at_start_only, on_host
from distnb.input.sources.base import FROM_THE_START, Load, Place, Shared, StartingPoint
from distnb.input.sources.loaders import changed, own_seeds
from distnb.input.sources.samples import BatchRequest, Feed, SlicedSource

__all__ = ["LoadedBatches", "WorkerSource", "end_processes", "has_lost_workers", "has_workers"]

_PATIENCE_S = 1.0
_TIDY_UP_S = 5.0  # nobody waits for it


class WorkerSource(SlicedSource):
    """The examples of a DataLoader with workers, each replica with workers of its own.

    The work is done by a copy of the loader whose batch sampler asks for the replica's slices, so that torch's own
    machinery (seeds, persistent workers, pinning, time-outs) acts as it does for the user's loader.
    """

    def __init__(self, loader: DataLoader[Any], place: Place, rule: CollateRule, shared: Shared) -> None:
        super().__init__(loader, place, rule, shared)
        self._copy: tuple[DataLoader[Any], FeedingSampler] | None = None
        self.quiet = draws_at_start_only(loader.batch_sampler)
        self.exclusive = bool(loader.persistent_workers)

    def start(self, beginning: StartingPoint = FROM_THE_START) -> Iterator[Load]:
        whole = self._rule.needs_whole_batches()
        # Persistent workers live in the copy, so it is kept; else attributes that the user changed since are seen.
        if beginning.kept not in (None, self.kept()):
            self._copy = self._make_copy(whole, seeded=beginning.kept is True)
        elif self._copy is None or not self.exclusive or has_lost_workers(self._copy[0]):
            self._copy = self._make_copy(whole)
        copied, sampler = self._copy
        sampler.skip = beginning.skip
        iterator = iter(copied)
        shared = None if self.quiet else self._shared
        pending = sampler.pending
        return LoadedBatches(
            iterator,
            shared,
            self._place,
            lambda tree: pending.popleft().loaded(tree),
            goes_on=False,  # whether a failed batch counts among the requests is torch's secret
            persistent=self.exclusive,
            forget=self._forget,
        )

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


class FeedingSampler:
    """A batch sampler for a DataLoader of our own; it keeps what was asked for until the batch has come.

    Attributes:
        pending: Requests of the latest iteration whose batches have not come yet, in order.
        skip: How many batches the next iteration leaves out.
    """

    def __init__(self, batches: Iterable[Any], place: Place, whole: bool) -> None:
        self._batches = batches
        self._place = place
        self._whole = whole
        self.pending: deque[BatchRequest] = deque()
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        # No generator: the user's sampler may draw as soon as it is asked for an iterator, as a DataLoader asks it.
        self.pending = deque()
        return _Recorded(Feed(iter(self._batches), self._place, self._whole, self.skip), self.pending)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


class _Recorded(Iterator[Any]):
    def __init__(self, feed: Feed, pending: deque[BatchRequest]) -> None:
        self._feed = feed
        self._pending = pending

    def __next__(self) -> Any:
        request = next(self._feed)
        self._pending.append(request)
        return request.indices


class LoadedBatches(Iterator[Load]):
    """An iteration over a DataLoader, or over batches of any other kind.

    Args:
        iterator: Gives them.
        shared: The random stream that they draw from; None if they draw from none.
        place: The replica that reads.
        load: What is loaded with a batch.
        goes_on: Whether it may go on behind a batch that could not be loaded.
        persistent: The loader's workers serve later iterations, too.
        forget: Called when its workers were killed.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        shared: Shared | None,
        place: Place,
        load: Callable[[Any], Load] = Load,
        *,
        goes_on: bool = True,
        persistent: bool = False,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._shared = shared or nullcontext
        self._device = place.device
        self._load = load
        self._goes_on = goes_on
        self._persistent = persistent
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
            with on_host(self._device), self._shared():
                tree = next(iterator)
        except StopIteration:
            raise
        except BaseException:
            self._failed = not self._goes_on
            raise
        return self._load(tree)

    def close(self) -> None:
        """End the workers; persistent ones stay, and a generator stays where it is."""
        self._closed = True
        if not self._persistent:
            iterator, self._iterator = self._iterator, None
            _end_workers(iterator)

    def give_up(self) -> None:
        """End the workers, persistent ones, too."""
        self._forget()
        iterator, self._iterator = self._iterator, None
        _end_workers(iterator)


def has_workers(loader: DataLoader[Any]) -> bool:
    """Whether persistent workers of a loader wait for the next iteration."""
    return loader.__dict__.get("_iterator") is not None and not has_lost_workers(loader)


def has_lost_workers(loader: DataLoader[Any]) -> bool:
    """Whether persistent workers of a loader have ended, as those of an interrupted program do."""
    kept = loader.__dict__.get("_iterator")
    return kept is not None and not all(worker.is_alive() for worker in kept._workers)


def _end_workers(iterator: Any) -> None:
    """Shut the workers of a DataLoader's iterator down: tracebacks may hold the iterator for long.

    An interrupted program does not wait for one that is stuck.
    """
    if hasattr(iterator, "_shutdown_workers") and not getattr(iterator, "_shutdown", False):
        threading.Thread(target=_shut_down, args=(iterator,), name="distnb-input-end", daemon=True).start()


def _shut_down(iterator: Any) -> None:
    # Torch waits 5 s for one that is stuck, then ends it without letting it tidy up: it is interrupted before.
    hurry = threading.Timer(_PATIENCE_S, _interrupt, (iterator._workers,))
    hurry.daemon = True
    hurry.start()
    iterator._shutdown_workers()
    hurry.cancel()


# -- the ends of processes ---------------------------------------------------------------------------------------------
# Those that load data for this one may tidy up when they end, but they are not waited for.

_interrupted: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def _interrupt(children: Iterable[BaseProcess]) -> None:
    """Do what Ctrl-C in a terminal would. Once to each: a second one would disturb its tidying up."""
    for child in children:
        if child not in _interrupted and child.pid is not None and child.is_alive():
            _interrupted.add(child)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)


def end_processes(children: Iterable[BaseProcess]) -> None:
    """End them without waiting: those that do not heed an interrupt are terminated in a while."""
    children = list(children)
    _interrupt(children)
    if children:
        threading.Thread(target=_terminate_late, args=(children,), name="distnb-children", daemon=True).start()


def _terminate_late(children: list[BaseProcess]) -> None:
    for child in children:
        child.join(_TIDY_UP_S)
    for child in children:
        if child.is_alive():
            child.terminate()


# A worker hands tensors over by a socket that multiprocessing puts into a temporary folder: made late, on a thread that
# the worker's end does not wait for. It stays behind when the worker is terminated, or ends at the wrong moment. So the
# socket has an address that is no file.

_WORKERS = "torch.utils.data._utils.worker"


def _prepare(_: object) -> None:
    """Called first of all in each process that multiprocessing forks from this one."""
    process: Any = multiprocessing.current_process()
    if getattr(process._target, "__module__", "") == _WORKERS:
        vars(connection)["arbitrary_address"] = _address_without_file


def _address_without_file(family: str) -> str:
    # Linux keeps such a name as long as the socket is open; who connects must know multiprocessing's key.
    return f"\0distnb-{os.getpid()}-{secrets.token_hex(8)}"


util.register_after_fork(_interrupted, _prepare)
