"""A pipeline that is read whole, and whose elements its readers take in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from distnb.errors import StructureError
from distnb.input.sources.base import FROM_THE_START, Beginning, Load, Source, Turns
from distnb.input.splitting.layout import count_examples
from distnb.input.splitting.split import slice_bounds

__all__ = ["TurnsSource"]


class TurnsSource(Source):
    """Of every `takers` successive elements of a source this replica gets one; after an odd end, an empty one.

    Args:
        batches: Loads whole batches.
        turns: Which elements are this replica's.
    """

    def __init__(self, batches: Source, turns: Turns) -> None:
        self._batches = batches
        self._turns = turns
        self.data = batches.data
        self.threadable = batches.threadable
        self.in_memory = batches.in_memory
        self.iterable = batches.iterable
        self.exclusive = batches.exclusive

    def start(self, beginning: Beginning = FROM_THE_START) -> Iterator[Load]:
        if self._turns.pieces == 1:
            return _Taking(self._batches.start(beginning), self._turns, 0)
        return _Taking(self._batches.start(beginning._replace(skip=0)), self._turns, beginning.skip)

    def length(self) -> int:
        return self._batches.length()

    def peek(self) -> Any:
        return self._batches.peek()

    def state(self) -> Any:
        return self._batches.state()

    def kept(self) -> bool:
        return self._batches.kept()

    def generators(self) -> list[Any]:
        return self._batches.generators()


class _Element(NamedTuple):
    """Some examples of a load; `examples` is None for what cannot be counted, which is one element as it is."""

    load: Load
    examples: int | None
    start: int
    stop: int


class _Taking(Iterator[Load]):
    def __init__(self, loads: Iterator[Load], turns: Turns, skip: int) -> None:
        self._loads = loads
        self._turns = turns
        self._ready: deque[_Element] = deque()
        self._group: list[_Element] = []
        if hasattr(loads, "free"):
            self.free = loads.free
            self.persistent = getattr(loads, "persistent", False)
        try:
            for _ in range(skip):
                self._next_element()
        except StopIteration:
            pass  # all was left out

    def _next_element(self) -> _Element:
        while not self._ready:
            load = next(self._loads)
            pieces = self._turns.pieces
            try:
                count = count_examples(load.tree) if load.examples is None else load.examples
            except StructureError:
                if pieces > 1:
                    raise
                self._ready.append(_Element(load, None, 0, 1))
                break
            first, last = load.bounds or (0, count)
            for piece in range(pieces):
                start, stop = slice_bounds(last - first, pieces, piece)
                if stop > start or pieces == 1:
                    self._ready.append(_Element(load, count, first + start, first + stop))
        return self._ready.popleft()

    def __next__(self) -> Load:
        # What was taken stays when reading the next one fails: the caller may go on.
        while len(self._group) < self._turns.takers:
            try:
                self._group.append(self._next_element())
            except StopIteration:
                break
        group, self._group = self._group, []
        if not group:
            raise StopIteration
        turn = self._turns.turn
        load, count, start, stop = group[turn] if turn < len(group) else group[0]._replace(stop=group[0].start)
        if any(element.examples is None for element in group):
            return Load(load.tree, bounds=(0, stop - start), whole=True, borrowed=load.borrowed)
        size = sum(element.stop - element.start for element in group)
        whole = self._turns.pieces == 1 and load.bounds is None
        return Load(load.tree, count, (start, stop), size, separate=whole, borrowed=load.borrowed)

    def close(self) -> None:
        """Let the pipeline go."""
        close = getattr(self._loads, "close", None)
        if close is not None:
            close()
