"""Map-style data that this process loads itself (`num_workers=0`), only its own slice of each global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from distnb.input.draws import ReplicaDraws, draws_at_start_only, fold, on_host
from distnb.input.feed import Feed
from distnb.input.sources.base import FROM_THE_START, Beginning, Load, Place, Shared
from distnb.input.splitting.collating import CollateRule
from distnb.input.splitting.sliced import SlicedSource

__all__ = ["SampleSource"]


class SampleSource(SlicedSource):
    """The examples of a DataLoader without workers."""

    def __init__(self, loader: DataLoader[Any], place: Place, rule: CollateRule, shared: Shared) -> None:
        super().__init__(loader, place, rule, shared)
        self.in_memory = _is_quiet(loader) and draws_at_start_only(loader.batch_sampler)

    def start(self, beginning: Beginning = FROM_THE_START) -> Iterator[Load]:
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
