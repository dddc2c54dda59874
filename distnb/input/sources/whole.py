"""Data that every replica reads whole, because it cannot be asked for a slice: iterable datasets, generators, lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from distnb.errors import ProgramError
from distnb.input.draws import draws_at_start_only
from distnb.input.sources.base import FROM_THE_START, Load, Place, Shared, Source, StartingPoint
from distnb.input.sources.loaders import changed, generators_of, is_plain, iterator_beyond, own_seeds, peek_at
from distnb.input.sources.workers import LoadedBatches, has_lost_workers, has_workers

__all__ = ["LoaderSource", "PythonSource"]


class LoaderSource(Source):
    """A DataLoader whose batches can only be cut once they are there, or need not be cut (one replica).

    Args:
        loader: The user's loader.
        place: The replica that reads.
        shared: The stream that all replicas share.
    """

    def __init__(self, loader: DataLoader[Any], place: Place, shared: Shared) -> None:
        if place.num_replicas > 1 and not getattr(loader, "in_order", True):
            # Replicas cut the same batch only if it comes at the same place for all.
            loader = changed(loader, in_order=True)
        self.data = loader
        self._loader = loader
        self._place = place
        self._shared = shared
        iterable = loader._dataset_kind == 1
        ours = is_plain(loader)
        self.iterable = iterable
        self.quiet = ours and loader.num_workers > 0 and (iterable or draws_at_start_only(loader.batch_sampler))
        self.exclusive = ours and bool(loader.persistent_workers)
        self._ours = ours

    def start(self, beginning: StartingPoint = FROM_THE_START) -> Iterator[Load]:
        skip = beginning.skip
        if self.exclusive and has_lost_workers(self._loader):
            self._forget()
        if beginning.kept not in (None, self.kept()):
            self._loader = changed(self.data, **(own_seeds() if beginning.kept else {}))
        iterator = iterator_beyond(self._loader, skip) if skip and self._ours else None
        if iterator is None:
            iterator = iter(self._loader)
        else:
            skip = 0
        shared = None if self.quiet else self._shared
        loads = LoadedBatches(iterator, shared, self._place, persistent=self.exclusive, forget=self._forget)
        return _beyond(loads, skip)

    def length(self) -> int:
        return len(self._loader)

    def peek(self) -> Any:
        return peek_at(self.data)

    def kept(self) -> bool:
        return self.exclusive and has_workers(self._loader)

    def generators(self) -> list[Any]:
        return list(generators_of(self.data))

    def _forget(self) -> None:
        self._loader.__dict__["_iterator"] = None  # persistent workers that were killed


class PythonSource(Source):
    """Any iterable of batches, or a function that returns one.

    Args:
        batches: The iterable, or a callable without arguments.
        place: The replica that reads.
        shared: The stream that all replicas share.
    """

    iterable = True

    def __init__(self, batches: Iterable[Any] | Callable[[], Iterable[Any]], place: Place, shared: Shared) -> None:
        self.data = batches
        self._place = place
        self._shared = shared
        self._started = False

    def start(self, beginning: StartingPoint = FROM_THE_START) -> Iterator[Load]:
        return _beyond(LoadedBatches(self._iterator(), self._shared, self._place), beginning.skip)

    def _iterator(self) -> Iterator[Any]:
        batches = self.data
        if not isinstance(batches, Iterable):
            return iter(batches())
        iterator = iter(batches)
        if iterator is batches:
            if self._started:
                raise ProgramError(
                    f"This dataset was made from a {type(batches).__name__}, which can be read once only, and was "
                    "read before: a second iteration would find nothing. Distribute something that can be read again: "
                    "a list, a DataLoader, or the function that makes the generator (distribute_dataset(make_batches) "
                    "instead of distribute_dataset(make_batches()))."
                )
            self._started = True
        return iterator

    def length(self) -> int:
        return len(self.data)

    def peek(self) -> Any:
        if isinstance(self.data, Iterator):
            raise ProgramError(
                f"This dataset was made from a {type(self.data).__name__}, which can be read once only: looking at "
                "its first batch would take it away. Distribute something that can be read again: a list, a "
                "DataLoader, or the function that makes the generator."
            )
        return next(self._iterator())


def _beyond(loads: LoadedBatches, skip: int) -> LoadedBatches:
    """The iterator after some batches, which are read and dropped."""
    for _ in range(skip):
        try:
            next(loads)
        except StopIteration:
            break
    return loads
