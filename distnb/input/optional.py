"""Asking an iteration for its next batch in tf.distribute's words. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distnb.errors import OptionError

__all__ = ["AskedIterator", "OptionalBatch"]


class OptionalBatch:
    """A batch, or nothing: what `get_next_as_optional` gives.

    Args:
        *batch: The batch, if there is one.
    """

    __slots__ = ("_batch",)

    def __init__(self, *batch: Any) -> None:
        self._batch = batch

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return bool(self._batch)

    def get_value(self) -> Any:
        """The batch.

        Raises:
            OptionError: There is none: the data had ended.
        """
        if not self._batch:
            raise OptionError(
                "get_value() of an optional batch without one: the data had ended. Ask has_value() first."
            )
        return self._batch[0]

    def __repr__(self) -> str:
        return f"OptionalBatch({', '.join(map(repr, self._batch))})"


class AskedIterator(Iterator[Any]):
    """An iterator that can be asked by `get_next`, too."""

    def get_next(self) -> Any:
        """The next batch, as `next(iterator)` gives it. Raises StopIteration at the end."""
        return next(self)

    def get_next_as_optional(self) -> OptionalBatch:
        """The next batch, or none at the end: `optional.has_value()`, `optional.get_value()`."""
        try:
            return OptionalBatch(next(self))
        except StopIteration:
            return OptionalBatch()
