"""What a DataLoader of ours is to load: the batch sampler that stands before the user's."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from distnb.input.dealing import Dealer, Portion, ReplicaInput
from distnb.input.draws import Drawing

__all__ = ["Feed", "Feeding"]


class Feed:
    """A batch sampler that asks for this replica's portion of each global batch (`sliced`), or for all of it.

    Attributes:
        skip: What the next iteration leaves out: batches or, where replicas take turns, elements.
        latest: The latest iteration.
    """

    def __init__(self, batches: Iterable[Any], place: ReplicaInput, drawing: Drawing, sliced: bool) -> None:
        self._batches = batches
        self._place = place
        self._drawing = drawing
        self._sliced = sliced
        self.skip = 0
        self.latest: Feeding

    def __iter__(self) -> Iterator[Any]:
        # No generator: the user's sampler may draw as soon as it is asked for an iterator, as a DataLoader asks it.
        self.latest = Feeding(iter(self._batches), self._place, self._drawing, self._sliced, self.skip)
        return self.latest

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


class Feeding(Dealer, Iterator[Any]):
    """One iteration of a `Feed`.

    Attributes:
        sliced: See `Feed`.
        asked: What was asked for and has not come yet, in order, each with the digest of all indices so far.
    """

    def __init__(self, batches: Iterator[Any], place: ReplicaInput, drawing: Drawing, sliced: bool, skip: int) -> None:
        super().__init__(place if sliced else replace(place, num_replicas=1, replica_id=0, turns=None))
        self._batches = batches
        self._drawing = drawing
        self.sliced = sliced
        self._left_out = skip
        self._digest = 0
        self._next: Portion | None = None
        # One replica gets what comes, and need not know.
        self.asked: deque[tuple[Portion, int]] = deque(maxlen=0 if place.num_replicas == 1 else None)

    def _batch(self) -> Any:
        batch = next(self._batches)
        indices = batch if hasattr(batch, "__len__") and hasattr(batch, "__getitem__") else list(batch)
        try:
            self._digest = zlib.crc32(array("q", indices).tobytes(), self._digest)
        except (TypeError, OverflowError):
            self._digest = zlib.crc32(repr(indices).encode(), self._digest)
        return indices

    def leave_out(self) -> None:
        """Leave out now what is to be left out: a DataLoader draws a number of its own before it asks for a batch."""
        skip, self._left_out = self._left_out, 0
        self.skip(skip)

    def ask(self) -> None:
        """Decide now what is loaded next: examples may be loaded with another stream than samplers draw from."""
        if self._next is None:
            with self._drawing():
                self.leave_out()
                self._next = self.deal()
            self.asked.append((self._next._replace(batch=None), self._digest))

    def __next__(self) -> Any:
        self.ask()
        assert self._next is not None
        (batch, _, start, stop, _), self._next = self._next, None
        return batch[start:stop] if stop > start else batch[:1]  # from which an empty slice learns what it looks like
