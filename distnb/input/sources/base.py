"""Where batches come from: the interface of a source, and what it loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["Load", "Source"]


class Load(NamedTuple):
    """What a source loaded for this replica's portion of one global batch.

    Attributes:
        tree: The structure that was loaded.
        examples: How many it holds; None for an element that is handed out as it is (or nothing in its place).
        start, stop: Which of them are the portion.
        size: Examples in the global batch; None where they cannot be counted.
        separate: The tree was collated from the portion alone, so that nothing has to be cut.
        borrowed: The tree is the user's data itself, so slices must be copies.
        digest: Of the indices of all global batches so far, to see that replicas drew the same; 0 without indices.
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
    """A dataset that can be read batch by batch, again and again.

    Attributes:
        data: What the user distributed, for whoever looks at what a dataset leads to.
        quiet: Reading it runs none of the user's code in this process, and draws no random numbers once it has begun.
        iterable: It is read from end to end.
        exclusive: Only one iteration can be under way: starting a new one ends the last.
    """

    data: Any
    quiet: bool = False
    iterable: bool = False
    exclusive: bool = False

    @abstractmethod
    def start(self, skip: int = 0, kept: bool | None = None) -> Iterator[Load]:
        """Begin to read, on the caller's thread.

        Random numbers are drawn as an ordinary DataLoader draws them, from the shared stream. An iterator with a
        `close` method is closed when reading ends early; one with `give_up` has workers, which that ends.

        Args:
            skip: Batches to leave out (elements, where replicas take turns). Reading them draws what it always draws.
            kept: What `kept` said before the iteration that is gone on with; None for a new one.
        """

    @abstractmethod
    def length(self) -> int:
        """Number of batches. Raises TypeError when it is not known."""

    @abstractmethod
    def peek(self) -> Any:
        """The structure of a first batch, or of part of one. Nothing is consumed; random numbers may be drawn."""

    def sizes(self) -> tuple[int, int] | None:
        """How many examples there are, and how many a full global batch has; None where reading alone tells."""
        return None

    def kept(self) -> bool:
        """Whether the next iteration uses workers that are there already, so that it draws no seed for them."""
        return False

    def generators(self) -> list[Any]:
        """The user's own random generators that reading draws from."""
        return []
