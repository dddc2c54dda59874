"""Source of any iterable of batches, or a function that returns one. Every replica reads all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from distnb.errors import ProgramError
from distnb.input.dealing import ReplicaInput
from distnb.input.draws import Drawing
from distnb.input.sources.base import Load, Source
from distnb.input.sources.batches import Batches

__all__ = ["IterableSource"]


class IterableSource(Source):
    """A list, a generator, or a function that makes a generator."""

    iterable = True

    def __init__(
        self, batches: Iterable[Any] | Callable[[], Iterable[Any]], place: ReplicaInput, drawing: Drawing
    ) -> None:
        self.data = batches
        self._place = place
        self._drawing = drawing
        self._started = False

    def start(self, skip: int = 0, kept: bool | None = None) -> Iterator[Load]:
        if isinstance(self.data, Iterator):
            if self._started:
                raise self._consumed("was read before: a second iteration would be empty")
            self._started = True
        return Batches(self._iterator(), self._place, self._drawing, skip=skip)

    def _iterator(self) -> Iterator[Any]:
        return iter(self.data if isinstance(self.data, Iterable) else self.data())

    def _consumed(self, what: str) -> ProgramError:
        return ProgramError(
            f"This dataset was made from a {type(self.data).__name__}, which can be read only once, but {what}. "
            "Distribute something that can be read again: a list, a DataLoader, or the function that makes the "
            "generator (distribute_dataset(make_batches) instead of distribute_dataset(make_batches()))."
        )

    def length(self) -> int:
        return len(self.data)

    def peek(self) -> Any:
        if isinstance(self.data, Iterator):
            raise self._consumed("inspecting its first batch would consume it")
        return next(self._iterator())
