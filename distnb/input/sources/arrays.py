"""Source of tensors and arrays in memory, cut into global batches in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from distnb.input.cutting import count_examples, map_leaves
from distnb.input.dealing import Dealer, ReplicaInput
from distnb.input.sources.base import IN_MEMORY_AHEAD, Load, Source

__all__ = ["ArraySource"]


class ArraySource(Source):
    """A structure of tensors, arrays and lists that all have one entry per example. It draws no random numbers.

    Numeric arrays give batches of tensors, everything else slices of its own kind.
    """

    ahead = IN_MEMORY_AHEAD

    def __init__(self, data: Any, batch_size: int, place: ReplicaInput) -> None:
        self._examples = count_examples(data)
        self.data = data
        self._columns = map_leaves(data, self._examples, _column)
        self._batch_size = batch_size
        self._place = place

    def start(self, skip: int = 0, kept: bool | None = None) -> Iterator[Load]:
        ranges = _Ranges(self._examples, self._batch_size, self._place)
        ranges.skip(skip)
        with suppress(StopIteration):
            while True:
                batch, _, start, stop, of_all = ranges.deal()
                first, end = batch.start + start, batch.start + stop
                yield Load(
                    tree=self._columns, examples=self._examples, start=first, stop=end, size=of_all, borrowed=True
                )

    def length(self) -> int:
        return -(-self._examples // self._batch_size)

    def sizes(self) -> tuple[int, int] | None:
        return self._examples, self._batch_size

    def peek(self) -> Any:
        return map_leaves(self._columns, self._examples, lambda leaf: leaf[: self._batch_size])


class _Ranges(Dealer):
    """Batches of a fixed number of examples, each as a range of their numbers."""

    def __init__(self, examples: int, size: int, place: ReplicaInput) -> None:
        super().__init__(place)
        self._left = iter([range(first, min(first + size, examples)) for first in range(0, examples, size)])

    def _batch(self) -> range:
        return next(self._left)


class _Column(Sequence[Any]):
    """A list of one item per example, marked so that it is not taken for structure."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, at: Any) -> Any:
        return self._items[at]


def _column(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        native = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
        if not native.flags.writeable or any(stride < 0 for stride in native.strides):
            native = native.copy()  # torch accepts neither
        try:
            return torch.from_numpy(native)
        except TypeError:
            return leaf  # torch lacks this number type
    return _Column(leaf) if isinstance(leaf, (list, tuple)) else leaf
