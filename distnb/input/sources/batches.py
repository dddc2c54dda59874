"""Iterations over a DataLoader, or over batches of any other kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from distnb.errors import ProgramError, StructureError
from distnb.input.cutting import count_examples
from distnb.input.dealing import Dealer, ReplicaInput
from distnb.input.draws import on_host
from distnb.input.sources.base import Load
from distnb.input.sources.feeding import FeedIteration
from distnb.input.sources.workers import end_workers, forget_workers

__all__ = ["Batches"]


class Batches(Dealer, Iterator[Load]):
    """Loader of this replica's portions. It cuts whole batches, or receives the portions that the feed requested.

    Args:
        iterator: The iterator that returns batches.
        place: The replica that reads.
        around: A function that returns the context for loading a batch.
        feeding: The iteration of the feed that selects the examples to load.
        skip: The number of the iterator's batches to skip.
        continues: Whether the iteration may continue after a batch that could not be loaded.
        persistent: The loader, if its workers serve later iterations, too.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        place: ReplicaInput,
        around: Callable[[], AbstractContextManager[Any]],
        *,
        feeding: FeedIteration | None = None,
        skip: int = 0,
        continues: bool = True,
        persistent: DataLoader[Any] | None = None,
    ) -> None:
        super().__init__(place)
        self._iterator: Iterator[Any] | None = iterator
        self._around = around
        self._feeding = feeding
        self._continues = continues
        self._persistent = persistent
        self._failed = False
        self._closed = False
        self._digest = 0
        self.skip(skip)

    def __next__(self) -> Load:
        if self._feeding is not None and self._feeding.sliced:
            tree = self._load()
            portion, digest = self._feeding.requested.popleft()
            own = portion.stop - portion.start
            return Load(
                tree=tree, examples=own or 1, start=0, stop=own, size=portion.size, separate=True, digest=digest
            )
        portion = self.deal()
        return Load(
            tree=portion.batch,
            examples=portion.examples,
            start=portion.start,
            stop=portion.stop,
            size=portion.size,
            separate=self._place.takes_whole_batches,
            digest=self._digest,
        )

    def _batch(self) -> Any:
        tree = self._load()
        if self._feeding is not None:
            _, self._digest = self._feeding.requested.popleft()
        return tree

    def _count(self, batch: Any) -> int | None:
        if self._place.num_replicas == 1:
            return None  # a single replica gets the batch itself, whatever it contains
        try:
            return count_examples(batch)
        except StructureError:
            if self._place.takes_whole_batches:
                return None
            raise

    def _load(self) -> Any:
        iterator = self._iterator
        if self._closed or iterator is None:
            raise StopIteration
        if self._failed:
            raise ProgramError(
                "This iteration ended when a batch could not be loaded. Start a new one: iterate over the dataset "
                "again."
            )
        try:
            with on_host(self._place.device), self._around():
                return next(iterator)
        except StopIteration:
            raise
        except BaseException:
            self._failed = not self._continues
            if self._feeding is not None:
                self._feeding.requested.clear()  # the requested examples are lost
            raise

    def close(self) -> None:
        """End the workers, except persistent ones. A generator keeps its position."""
        self._closed = True
        if self._persistent is None:
            self.end_all_workers()

    def end_all_workers(self) -> None:
        """End the workers, including persistent ones."""
        if self._persistent is not None:
            forget_workers(self._persistent)
        iterator, self._iterator = self._iterator, None
        end_workers(iterator)
