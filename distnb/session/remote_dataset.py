"""A distributed dataset whose batches are on the engines, iterated in an ordinary notebook cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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

    def __iter__(self) -> Iterator[Any]:
        # A replica's StopIteration would end the program as a failure, so the end is told as a value.
        iterator = self._call(iter, self._handle)
        while True:
            more, batch = self._call(_advance, iterator)
            if not more:
                return
            yield batch

    def __len__(self) -> int:
        return int(self._call(len, self._handle))

    def __repr__(self) -> str:
        return f"RemoteDataset({self._handle!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._handle, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._handle,)


def _itself(value: Any) -> Any:
    return value


def _advance(iterator: Iterator[Any]) -> tuple[bool, Any]:
    try:
        return True, next(iterator)
    except StopIteration:
        return False, None
