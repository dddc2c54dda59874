"""The interface of sources, and the batches that they load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["IN_MEMORY_AHEAD", "Load", "Source"]

IN_MEMORY_AHEAD = 16  # a message from the notebook per batch would cost a fifth of a short step


class Load(NamedTuple):
    """Loaded data for this replica's portion of one global batch.

    Attributes:
        tree: The loaded structure.
        examples: The number of examples it holds; None for an element that is passed on as it is (or as nothing).
        start, stop: The range of the examples in the portion.
        size: The number of examples in the global batch; None if they cannot be counted.
        separate: True if the tree was collated from the portion alone, so it need not be cut.
        borrowed: True if the tree is the user's own data, so slices must be copies.
        digest: A digest of the indices of all global batches so far, to compare the replicas' draws; 0 without indices.
    """

    tree: Any
    examples: int | None
    start: int
    stop: int
    size: int | None
    separate: bool = False
    borrowed: bool = False
    digest: int = 0


class Source(ABC):
    """A dataset that can be read batch by batch, any number of times.

    Attributes:
        data: The object that the user distributed, for code that inspects what a dataset refers to.
        ahead: The number of batches that may be read before the notebook requests them. It is 0 if reading, once
            started, runs user code in this process or draws random numbers: the order relative to the user's program
            would matter.
        iterable: True if the data can only be read sequentially.
        exclusive: True if only one iteration can run, so that a new one ends the previous one.
    """

    data: Any
    ahead: int = 0
    iterable: bool = False
    exclusive: bool = False

    @abstractmethod
    def start(self, skip: int = 0, kept: bool | None = None) -> Iterator[Load]:
        """Start to read, on the caller's thread.

        Random numbers are drawn as an ordinary DataLoader draws them, from the shared stream. If reading ends early,
        the iterator's `close` method is called, if it has one. If it has workers, `end_all_workers` ends them.

        Args:
            skip: The number of batches to skip (elements, if replicas take turns). Reading them draws the usual
                numbers.
            kept: The result of `kept` before the iteration to resume; None for a new iteration.
        """

    @abstractmethod
    def length(self) -> int:
        """Return the number of batches. Raise TypeError if it is unknown."""

    @abstractmethod
    def peek(self) -> Any:
        """Return the structure of a first batch, or of a part of one, without consuming it. May draw random numbers."""

    def sizes(self) -> tuple[int, int] | None:
        """Return the numbers of examples and of those in a full global batch; None if unknown before reading."""
        return None

    def kept(self) -> bool:
        """Return whether the next iteration uses running workers, and therefore draws no seed for them."""
        return False

    def generators(self) -> list[Any]:
        """Return the user's own random generators that reading draws from."""
        return []
