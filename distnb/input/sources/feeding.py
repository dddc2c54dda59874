"""The batch sampler that replaces the user's in a DataLoader, and selects the examples to load."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from distnb.input.dealing import Dealer, Portion, ReplicaInput
from distnb.input.draws import Drawing

__all__ = ["Feed", "FeedIteration"]


class Feed:
    """A batch sampler that requests this replica's portion of each global batch (`sliced`), or the whole batch.

    Attributes:
        skip: The number of batches (elements, if replicas take turns) that the next iteration skips.
        latest: The latest iteration.
    """

    def __init__(self, batches: Iterable[Any], place: ReplicaInput, drawing: Drawing, sliced: bool) -> None:
        self._batches = batches
        self._place = place
        self._drawing = drawing
        self._sliced = sliced
        self.skip = 0
        self.latest: FeedIteration

    def __iter__(self) -> Iterator[Any]:
        # Not a generator function, because the user's sampler may draw when a DataLoader requests its iterator.
        self.latest = FeedIteration(iter(self._batches), self._place, self._drawing, self._sliced, self.skip)
        return self.latest

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


class FeedIteration(Dealer, Iterator[Any]):
    """An iteration of a `Feed`.

    Attributes:
        sliced: See `Feed`.
        requested: The requested portions that have not arrived yet, in order, each with the digest of all indices so
            far.
    """

    def __init__(self, batches: Iterator[Any], place: ReplicaInput, drawing: Drawing, sliced: bool, skip: int) -> None:
        super().__init__(place if sliced else replace(place, num_replicas=1, replica_id=0, turns=None))
        self._batches = batches
        self._drawing = drawing
        self.sliced = sliced
        self._skip = skip
        self._digest = 0
        self._next: Portion | None = None
        # A single replica gets every batch and needs no record of its requests.
        self.requested: deque[tuple[Portion, int]] = deque(maxlen=0 if place.num_replicas == 1 else None)

    def _batch(self) -> Any:
        batch = next(self._batches)
        indices = batch if hasattr(batch, "__len__") and hasattr(batch, "__getitem__") else list(batch)
        try:
            self._digest = zlib.crc32(array("q", indices).tobytes(), self._digest)
        except (TypeError, OverflowError):
            self._digest = zlib.crc32(repr(indices).encode(), self._digest)
        return indices

    def skip_now(self) -> None:
        """Skip now, because a DataLoader draws a number of its own before it requests a batch."""
        skip, self._skip = self._skip, 0
        self.skip(skip)

    def request_next(self) -> None:
        """Select the next examples now, because loading them may use another random stream than the sampler."""
        if self._next is None:
            with self._drawing():
                self.skip_now()
                self._next = self.deal()
            self.requested.append((self._next._replace(batch=None), self._digest))

    def __next__(self) -> Any:
        self.request_next()
        assert self._next is not None
        (batch, _, start, stop, _), self._next = self._next, None
        return batch[start:stop] if stop > start else batch[:1]  # one example shows the structure of an empty slice
