"""A distributed dataset whose batches are on the engines, iterated in an ordinary notebook cell."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

from distnb.input.optional import AskedIterator

__all__ = ["RemoteDataset"]

Call = Callable[..., Any]
"""`call(function, *args)`: calls it on every replica, in cross-replica context, and regroups the results."""


class RemoteDataset:
    """Iterating it reads a batch on every replica and gives the structure of their slices, behind handles.

    Captured by a distributed cell, or passed to `strategy.run`, it stands for the engines' own dataset.

    Args:
        handle: The dataset on the engines.
        call: Calls a function on every replica.
    """

    def __init__(self, handle: Any, call: Call) -> None:
        self._handle = handle
        self._call = call

    is_distributed_dataset = True

    def __iter__(self) -> RemoteIterator:
        return RemoteIterator(self._call(iter, self._handle), self._call)

    def __len__(self) -> int:
        return int(self._call(len, self._handle))

    @property
    def element_spec(self) -> Any:
        """As that of the engines' dataset."""
        return _unpacked(self._call(_spec_of, self._handle))

    @property
    def cardinality(self) -> int:
        """As that of the engines' dataset."""
        return int(self._call(_cardinality_of, self._handle))

    @property
    def epoch(self) -> int:
        """As that of the engines' dataset."""
        return int(self._call(_epoch_of, self._handle))

    def state_dict(self) -> Any:
        """As that of the engines' dataset: one dict, where all replicas read the same data."""
        return _unpacked(self._call(_state_of, self._handle))

    def load_state_dict(self, state_dict: Any) -> None:
        """Have the engines' dataset go on where the state was taken."""
        self._call(_load, self._handle, state_dict)

    def __repr__(self) -> str:
        return f"RemoteDataset({self._handle!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._handle, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._handle,)


class RemoteIterator(AskedIterator):
    """One iteration over the engines' dataset.

    Args:
        handle: The iterator on the engines.
        call: Calls a function on every replica.
    """

    is_distributed_iterator = True

    def __init__(self, handle: Any, call: Call) -> None:
        self._handle = handle
        self._call = call
        self._ended = False

    def __next__(self) -> Any:
        # A replica's StopIteration would end the program as a failure, so the end is told as a value.
        if not self._ended:
            more, batch = self._call(_advance, self._handle)
            if more:
                return batch
            self._ended = True
        raise StopIteration


def _itself(value: Any) -> Any:
    return value


# Bytes that are equal on all replicas come to the notebook; objects would stay there, behind handles.


def _unpacked(packed: Any) -> Any:
    return pickle.loads(packed) if isinstance(packed, bytes) else packed


def _spec_of(dataset: Any) -> bytes:
    return pickle.dumps(dataset.element_spec)


def _cardinality_of(dataset: Any) -> int:
    return int(dataset.cardinality)


def _epoch_of(dataset: Any) -> int:
    return int(dataset.epoch)


def _state_of(dataset: Any) -> bytes:
    return pickle.dumps(dataset.state_dict())


def _load(dataset: Any, state: Any) -> None:
    dataset.load_state_dict(_unpacked(state))


def _advance(iterator: Iterator[Any]) -> tuple[bool, Any]:
    try:
        return True, next(iterator)
    except StopIteration:
        return False, None
