"""The indices of each global batch, and which of them this replica loads."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from distnb.input.sources.base import Load, Place
from distnb.input.splitting.split import slice_bounds

__all__ = ["Feed", "FeedingSampler", "BatchRequest"]


class BatchRequest(NamedTuple):
    """What to load of one global batch.

    Attributes:
        indices: The indices to load: the replica's slice, or the whole batch. For an empty slice the first one of the
            batch, from which structure and dtypes are learned.
        size: Examples in the global batch.
        own: Examples of the slice; None when the whole batch is to be loaded.
        digest: Of all indices so far.
    """

    indices: Any
    size: int
    own: int | None
    digest: int

    def loaded(self, tree: Any) -> Load:
        """What was loaded, once the batch of these indices is there."""
        if self.own is None:
            return Load(tree, self.size, None, self.size, digest=self.digest)
        return Load(tree, self.own or 1, (0, self.own), self.size, separate=True, digest=self.digest)


class Feed(Iterator[BatchRequest]):
    """Turns the batches of a batch sampler into requests.

    Args:
        batches: Iterator over lists of indices, one per global batch.
        place: The replica that reads.
        whole: Load whole batches.
        skip: How many to leave out.
    """

    def __init__(self, batches: Iterator[Any], place: Place, whole: bool, skip: int) -> None:
        self._place = place
        self._whole = whole
        self._digest = 0
        turns = place.turns
        self._batches = batches if turns is None or turns.pieces == 1 else _pieces(batches, turns.pieces)
        self._skip = skip

    def skip(self) -> None:
        """Leave out now what is to be left out."""
        left, self._skip = self._skip, 0
        for indices in islice(self._batches, left):
            self._digest = _digest(_listed(indices), self._digest)

    def __next__(self) -> BatchRequest:
        if self._skip:
            self.skip()
        turns = self._place.turns
        if turns is not None:
            return self._taken([_listed(indices) for indices in islice(self._batches, turns.takers)], turns.turn)
        indices = _listed(next(self._batches))
        size = len(indices)
        self._digest = _digest(indices, self._digest)
        if self._whole:
            return BatchRequest(indices, size, None, self._digest)
        start, stop = slice_bounds(size, self._place.num_replicas, self._place.replica_id)
        return BatchRequest(indices[start:stop] if stop > start else indices[:1], size, stop - start, self._digest)

    def _taken(self, elements: list[Any], turn: int) -> BatchRequest:
        if not elements:
            raise StopIteration
        for indices in elements:
            self._digest = _digest(indices, self._digest)
        size = sum(map(len, elements))
        if turn < len(elements):
            return BatchRequest(elements[turn], size, len(elements[turn]), self._digest)
        return BatchRequest(elements[0][:1], size, 0, self._digest)


def _listed(indices: Any) -> Any:
    return indices if hasattr(indices, "__len__") and hasattr(indices, "__getitem__") else list(indices)


def _pieces(batches: Iterator[Any], pieces: int) -> Iterator[Any]:
    for batch in batches:
        indices = _listed(batch)
        for piece in range(min(pieces, len(indices))):  # the later ones are empty
            start, stop = slice_bounds(len(indices), pieces, piece)
            yield indices[start:stop]


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


def _digest(indices: Any, digest: int) -> int:
    try:
        return zlib.crc32(array("q", indices).tobytes(), digest)
    except (TypeError, OverflowError):
        return zlib.crc32(repr(indices).encode(), digest)
