"""What a DataLoader of ours is to load: the batch sampler that stands before the user's."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from distnb.input.dealing import Dealer, Place, Portion
from distnb.input.draws import Drawing, ReplicaDraws

__all__ = ["Feed"]


class Feed:
    """A batch sampler that asks for this replica's portion of each global batch, or for all of it.

    Args:
        batches: The user's batch sampler.
        place: The replica.
        drawing: The stream that samplers draw from.
        slices: Ask for the portion only.

    Attributes:
        skip: What the next iteration leaves out: batches or, where replicas take turns, elements.
        asked: What the latest iteration asked for and has not come yet, in order, each with the digest of all indices.
    """

    def __init__(self, batches: Iterable[Any], place: Place, drawing: Drawing, slices: bool) -> None:
        self._batches = batches
        self._most = 0 if place.num_replicas == 1 else None  # which need not know
        self._place = place if slices else replace(place, num_replicas=1, replica_id=0, turns=None)
        self.drawing = drawing
        self.slices = slices
        self.skip = 0
        self.asked: deque[tuple[Portion, int]] = deque()
        self._latest: _Feeding | None = None

    def __iter__(self) -> Iterator[Any]:
        # No generator: the user's sampler may draw as soon as it is asked for an iterator, as a DataLoader asks it.
        self.asked = deque(maxlen=self._most)
        self._latest = _Feeding(self, iter(self._batches), self._place)
        return self._latest

    def settle(self, loading: ReplicaDraws | None) -> None:
        """Leave out what the latest iteration is to leave out, and mind the stream that its examples are loaded with.

        A DataLoader draws a number of its own first, so leaving out is not for `__iter__`.
        """
        assert self._latest is not None
        self._latest.leave_out()
        self._latest.loading = loading

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


class _Feeding(Iterator[Any]):
    """One iteration."""

    def __init__(self, feed: Feed, batches: Iterator[Any], place: Place) -> None:
        self._batches = batches
        self._drawing = feed.drawing
        self._asked = feed.asked
        self._skip = feed.skip
        self._digest = 0
        self._dealer = Dealer(self._indices, len, place)
        self.loading: ReplicaDraws | None = None

    def _indices(self) -> Any:
        batch = next(self._batches)
        indices = batch if hasattr(batch, "__len__") and hasattr(batch, "__getitem__") else list(batch)
        try:
            self._digest = zlib.crc32(array("q", indices).tobytes(), self._digest)
        except (TypeError, OverflowError):
            self._digest = zlib.crc32(repr(indices).encode(), self._digest)
        return indices

    def leave_out(self) -> None:
        skip, self._skip = self._skip, 0
        self._dealer.skip(skip)

    def __next__(self) -> Any:
        with self.loading.suspended() if self.loading else nullcontext(), self._drawing():
            self.leave_out()
            portion = next(self._dealer)
        self._asked.append((portion._replace(batch=None), self._digest))
        if portion.stop > portion.start:
            return portion.batch[portion.start : portion.stop]
        return portion.batch[:1]  # from which an empty slice learns its structure and its dtypes
