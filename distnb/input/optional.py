"""Requests for the next batch under tf.distribute's names. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distnb.errors import OptionError

__all__ = ["BatchIterator", "OptionalBatch"]


class OptionalBatch:
    """A batch or nothing, the result of `get_next_as_optional`.

    Args:
        *batch: The batch, if there is one.
    """

    __slots__ = ("_batch",)

    def __init__(self, *batch: Any) -> None:
        self._batch = batch

    def has_value(self) -> bool:
        """Return whether there is a batch."""
        return bool(self._batch)

    def get_value(self) -> Any:
        """Return the batch.

        Raises:
            OptionError: There is no batch, because the data had ended.
        """
        if not self._batch:
            raise OptionError("get_value() of an empty optional batch: the data had ended. Check has_value() first.")
        return self._batch[0]

    def __repr__(self) -> str:
        return f"OptionalBatch({', '.join(map(repr, self._batch))})"


class BatchIterator(Iterator[Any]):
    """An iterator that also has `get_next`."""

    def get_next(self) -> Any:
        """Return the next batch, as `next(iterator)` does. Raise StopIteration at the end."""
        return next(self)

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next batch, or none at the end: `optional.has_value()`, `optional.get_value()`."""
        try:
            return OptionalBatch(next(self))
        except StopIteration:
            return OptionalBatch()
