"""Map-style data: each replica loads only its own slice of each global batch; here by itself (`num_workers=0`)."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from distnb.input.collating import CollateRule
from distnb.input.cutting import slice_bounds
from distnb.input.draws import ReplicaDraws, draws_at_start_only, fold, on_host
from distnb.input.sources.base import FROM_THE_START, Load, Place, Shared, Source, StartingPoint
from distnb.input.sources.loaders import generators_of, peek_at

__all__ = ["BatchRequest", "Feed", "SampleSource", "SlicedSource"]


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


def _digest(indices: Any, digest: int) -> int:
    try:
        return zlib.crc32(array("q", indices).tobytes(), digest)
    except (TypeError, OverflowError):
        return zlib.crc32(repr(indices).encode(), digest)


class SlicedSource(Source):
    """The examples of a DataLoader, of which each replica loads its own slice of each global batch.

    Args:
        loader: The user's loader; its dataset is map-style and it collates batches.
        place: The replica that reads.
        rule: Whether its collate function may see only a slice.
        shared: The stream that all replicas share.
    """

    def __init__(self, loader: DataLoader[Any], place: Place, rule: CollateRule, shared: Shared) -> None:
        self.data = self._loader = loader
        self._place = place
        self._rule = rule
        self._shared = shared

    def length(self) -> int:
        return len(self._loader)

    def peek(self) -> Any:
        return peek_at(self._loader)

    def generators(self) -> list[Any]:
        return list(generators_of(self._loader))


class SampleSource(SlicedSource):
    """The examples of a DataLoader without workers."""

    def __init__(self, loader: DataLoader[Any], place: Place, rule: CollateRule, shared: Shared) -> None:
        super().__init__(loader, place, rule, shared)
        self.quiet = _is_quiet(loader) and draws_at_start_only(loader.batch_sampler)

    def start(self, beginning: StartingPoint = FROM_THE_START) -> Iterator[Load]:
        loader = self._loader
        whole = self._rule.needs_whole_batches()
        batches = iter(loader.batch_sampler)  # type: ignore[arg-type]
        # A DataLoader draws this for workers even if it has none; without it the next shuffle would be another one.
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        if whole:
            loading: Callable[[], AbstractContextManager[Any]] = self._shared  # everyone draws the same
        else:
            # Where an iteration goes on, what is drawn there is no repetition of what was drawn at its beginning.
            draws = ReplicaDraws(fold(base_seed + beginning.skip, self._place.replica_id))
            loading = lambda: draws  # noqa: E731
        feed = Feed(batches, self._place, whole, beginning.skip)
        feed.skip()
        return _Samples(loader, feed, self._shared, loading, self._place)


class _Samples(Iterator[Load]):
    def __init__(
        self,
        loader: DataLoader[Any],
        feed: Feed,
        shared: Shared,
        loading: Callable[[], AbstractContextManager[Any]],
        place: Place,
    ) -> None:
        self._feed = feed
        self._shared = shared
        self._loading = loading
        self._device = place.device
        self._fetch = _fetcher(loader)
        self._started = False
        self._quiet_sampler = draws_at_start_only(loader.batch_sampler)
        self._quiet_dataset = _is_quiet(loader)

    def __next__(self) -> Load:
        with on_host(self._device):
            if self._started and self._quiet_sampler:
                request = next(self._feed)
            else:
                with self._shared():
                    request = next(self._feed)
                self._started = True
            if self._quiet_dataset:
                tree = self._fetch(request.indices)
            else:
                with self._loading():
                    tree = self._fetch(request.indices)
        return request.loaded(tree)


def _is_quiet(loader: DataLoader[Any]) -> bool:
    """Whether loading an example runs none of the user's code, and so draws nothing."""
    return type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate


def _fetcher(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """What makes a batch of indices."""
    dataset: Any = loader.dataset
    collate = loader.collate_fn
    several = getattr(dataset, "__getitems__", None)

    def fetch(indices: Any) -> Any:
        return collate(several(indices) if several else [dataset[index] for index in indices])

    if not _is_quiet(loader):
        return fetch
    if any(tensor.layout is not torch.strided or tensor.requires_grad for tensor in dataset.tensors):
        return fetch

    def gather(indices: Any) -> Any:
        # What collating example by example gives, bit for bit, in one indexing per tensor.
        if not isinstance(indices, list) or not all(type(index) is int for index in indices):
            return fetch(indices)
        at = torch.tensor(indices)
        return [tensor[at] for tensor in dataset.tensors]

    return gather
