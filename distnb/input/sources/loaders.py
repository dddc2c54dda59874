"""What can be asked of a user's DataLoader without iterating over it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["changed", "generators_of", "is_plain", "iterator_beyond", "own_seeds", "peek_at"]

_ITERABLE = 1  # torch's number for loaders of iterable datasets


def is_plain(loader: DataLoader[Any]) -> bool:
    """Whether iterating the loader is what torch wrote, whatever its class."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def changed(loader: DataLoader[Any], **attributes: Any) -> Any:
    """A copy of a loader with other attributes, also those that its constructor has fixed; it shares no workers."""
    copied = copy.copy(loader)
    copied.__dict__.update(attributes, _iterator=None)  # its setters refuse
    return copied


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that the user gave to a loader or its samplers, each once."""
    batch_sampler = loader.batch_sampler
    holders = (loader, loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def peek_at(loader: DataLoader[Any]) -> Any:
    """A first batch, as its collate function makes it; the loader and its generators stay as they are."""
    generators = generators_of(loader)
    before = [generator.get_state() for generator in generators]
    try:
        workers = min(1, loader.num_workers)  # a file that the dataset opens must not be opened here and then forked
        alone: dict[str, Any] = {"num_workers": workers, "persistent_workers": False, "pin_memory": False}
        if loader._dataset_kind != _ITERABLE and loader.batch_sampler is not None and is_plain(loader):
            alone["batch_sampler"] = [next(iter(loader.batch_sampler))]
        return next(iter(changed(loader, **alone)))
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def own_seeds() -> dict[str, Any]:
    """What makes a copy of a loader draw the seeds of its workers from nobody's stream."""
    return {"generator": torch.Generator()}


def iterator_beyond(loader: DataLoader[Any], count: int) -> Iterator[Any] | None:
    """An iterator over a loader that leaves out the first batches without loading them; None where that cannot be.

    The random numbers of what is left out have been drawn when it is returned.
    """
    if loader._dataset_kind == _ITERABLE or loader.batch_sampler is None or loader.persistent_workers:
        return None
    shorter = _Skipping(loader.batch_sampler, count)
    iterator: Iterator[Any] = iter(changed(loader, batch_sampler=shorter))
    # A DataLoader draws a number of its own first, so this is not for the sampler's `__iter__`.
    shorter.skip()
    return iterator


class _Skipping:
    """A batch sampler, for one iteration."""

    def __init__(self, batches: Iterable[Any], count: int) -> None:
        self._batches = batches
        self._count = self._left = count
        self._iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._batches)
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)

    def skip(self) -> None:
        """Leave out what is to be left out, if that was not done."""
        left, self._left = self._left, 0
        for _ in islice(self._iterator, left):
            pass

    def __len__(self) -> int:
        return max(0, len(self._batches) - self._count)  # type: ignore[arg-type]
