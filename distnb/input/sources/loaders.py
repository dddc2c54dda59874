"""Source of DataLoaders. Map-style data is loaded by the slice if its collate function allows it."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, default_collate

from distnb.compat import loader_internals
from distnb.input.dealing import ReplicaInput
from distnb.input.draws import Drawing, ReplicaDraws, WorkerSeeds, draws_at_start_only, fold
from distnb.input.sources.base import IN_MEMORY_AHEAD, Load, Source
from distnb.input.sources.batches import Batches
from distnb.input.sources.feeding import Feed, FeedIteration
from distnb.input.sources.workers import forget_workers, has_lost_workers, has_workers
from distnb.options import InputOptions

__all__ = ["LoaderSource", "copy_loader", "is_plain"]

_logger = logging.getLogger("distnb.input")

_WORKERS_AHEAD = 4  # of batches that workers load: a replica would wait for more, while the workers prefetch a few


def is_plain(loader: DataLoader[Any]) -> bool:
    """Return whether the loader iterates with torch's own code, whatever its class."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and loader_internals.makes_plain_iterators(loader)


def copy_loader(loader: DataLoader[Any], **attributes: Any) -> Any:
    """Return a copy of a loader with other attributes, even those fixed by its constructor. It shares no workers."""
    copied = copy.copy(loader)
    copied.__dict__.update(attributes)  # the loader's own setters refuse
    loader_internals.forget_iterator(copied)
    return copied


class LoaderSource(Source):
    """The batches of a DataLoader.

    A copy of the loader does the work. Its batch sampler requests the replica's portions, so torch's own machinery
    (seeds, persistent workers, pinning, time-outs) acts as it does for the user's loader.
    """

    def __init__(self, loader: DataLoader[Any], place: ReplicaInput, options: InputOptions, drawing: Drawing) -> None:
        self.data = loader
        self._place = place
        self._drawing = drawing
        self.iterable = loader_internals.reads_iterable(loader)
        self._plain = is_plain(loader)
        self._fed = self._plain and not self.iterable and loader.batch_sampler is not None
        self._sliced = self._fed and place.num_replicas > 1 and _collates_slices(loader, place, options)
        self._in_memory = (
            not loader.num_workers and type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate
        )
        drawn_at_start = draws_at_start_only(loader.batch_sampler)
        if not self._plain:
            self.ahead = 0
        elif self._in_memory:
            self.ahead = IN_MEMORY_AHEAD if drawn_at_start else 0
        elif loader.num_workers:
            self.ahead = _WORKERS_AHEAD if self.iterable or drawn_at_start else 0
        self.exclusive = self._plain and bool(loader.persistent_workers)
        self._copy: DataLoader[Any] | None = None

    def start(self, skip: int = 0, kept: bool | None = None) -> Iterator[Load]:
        loader, place = self._reading(kept), self._place
        self._copy = loader
        # Pieces of batches are skipped by the code that cuts batches.
        cut_later = place.turns is not None and not place.takes_whole_batches and not self._sliced
        early = skip if self._fed and not cut_later else 0
        feed: Feed | None = loader.batch_sampler if self._fed else None
        if feed is not None:
            feed.skip = early
        iterator: Any = iter(loader)
        feeding = feed.latest if feed is not None else None
        if feeding is not None:
            feeding.skip_now()
        around: Callable[[], AbstractContextManager[Any]] = self._drawing
        if self._plain and (loader.num_workers > 0 or self._in_memory):
            around = nullcontext
        elif feeding is not None and feeding.sliced:
            # A resumed iteration must not repeat the draws made at the start of the original one.
            around = _slice_context(
                feeding, ReplicaDraws(fold(loader_internals.base_seed(iterator) + skip, place.replica_id))
            )
        return Batches(
            iterator,
            place,
            around,
            feeding=feeding if place.num_replicas > 1 else None,
            skip=skip - early,
            # Only the workers know whether a failed batch counts among the requested ones.
            continues=not (self._fed and loader.num_workers and place.num_replicas > 1),
            persistent=loader if self.exclusive else None,
        )

    def _reading(self, kept: bool | None) -> Any:
        """Return the loader to read with: the kept one if its workers persist, else a copy with the latest changes."""
        if self._copy is not None and self.exclusive:
            if has_lost_workers(self._copy):
                _logger.info("the persistent workers have ended, and are started again")
                forget_workers(self._copy)
            if kept in (None, self.kept()):
                return self._copy
        loader, place = self.data, self._place
        attributes: dict[str, Any] = {}
        if self._fed:
            attributes["batch_sampler"] = Feed(loader.batch_sampler, place, self._drawing, self._sliced)
        if place.num_replicas > 1 and not loader.in_order:
            attributes["in_order"] = True  # otherwise a batch could not be assigned to its global batch
            _logger.info("in_order=False is ignored: the batches of a distributed DataLoader come in order")
        if self._sliced and place.replica_id:
            attributes["worker_init_fn"] = WorkerSeeds(place.replica_id, loader.worker_init_fn)
        if kept and not self.kept():
            attributes["generator"] = torch.Generator()  # its workers' seeds do not come from any existing stream
        if self._in_memory and all(map(_is_simple, loader.dataset.tensors)):
            attributes |= {"dataset": _Rows(loader.dataset.tensors), "collate_fn": _as_it_is}
        return copy_loader(loader, **attributes) if attributes or self._plain else loader

    def sizes(self) -> tuple[int, int] | None:
        loader = self.data
        batches = loader.batch_sampler
        if not self._fed or type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
            return None
        examples, batch = len(batches.sampler), batches.batch_size
        return examples - (examples % batch if batches.drop_last else 0), batch

    def kept(self) -> bool:
        return self.exclusive and self._copy is not None and has_workers(self._copy)

    def length(self) -> int:
        return len(self.data)

    def peek(self) -> Any:
        """Return a first batch as the collate function makes it, without changing the loader or its generators."""
        loader, generators = self.data, self.generators()
        before = [generator.get_state() for generator in generators]
        try:
            # Load it in a worker if the loader has workers: a file that the dataset opens must not be opened here and
            # then inherited by forked workers.
            workers = min(1, loader.num_workers)
            alone: dict[str, Any] = {"num_workers": workers, "persistent_workers": False, "pin_memory": False}
            if self._fed:
                alone["batch_sampler"] = [next(iter(loader.batch_sampler))]
            return next(iter(copy_loader(loader, **alone)))
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)

    def generators(self) -> list[Any]:
        batch_sampler = self.data.batch_sampler
        holders = (self.data, self.data.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _slice_context(feeding: FeedIteration, draws: ReplicaDraws) -> Callable[[], AbstractContextManager[Any]]:
    """Return contexts for loading a replica's slice. The sampler has drawn from the shared stream before."""

    def around() -> AbstractContextManager[Any]:
        feeding.request_next()
        return draws.entered()

    return around


def _collates_slices(loader: DataLoader[Any], place: ReplicaInput, options: InputOptions) -> bool:
    """Return whether the collate function sees only a replica's slice.

    torch's own function handles examples one by one, so the slice's batch is the batch's slice. A function that pads to
    the longest example, mixes examples or packs them gives other values for a slice.
    """
    if (
        place.takes_whole_batches
        or options.collate == "slice"
        or (options.collate == "auto" and loader.collate_fn is default_collate)
    ):
        return True
    if options.collate == "auto":
        name = getattr(loader.collate_fn, "__qualname__", type(loader.collate_fn).__qualname__)
        warnings.warn(
            f"The collate function {name} may give other values for a slice than for a whole batch (by padding or "
            f"mixing), so each of the {place.num_replicas} replicas loads every global batch completely and keeps "
            'its slice. If it handles examples one by one, pass InputOptions(collate="slice").',
            stacklevel=2,
        )
    return False


class _Rows:
    """Tensors in memory. Indexing each of them once gives the same bits as collating example by example."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitems__(self, indices: Any) -> Any:
        at = torch.as_tensor([int(index) for index in indices])
        return [tensor[at] for tensor in self._tensors]


def _is_simple(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.requires_grad


def _as_it_is(batch: Any) -> Any:
    return batch
