"""Where batches come from: the interface of a source, and what it loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from distnb.topology import Device

__all__ = ["Load", "Place", "Shared", "Source"]

Shared = Callable[[], AbstractContextManager[Any]]
"""Makes the random stream that all replicas share the current one for a while."""


@dataclass(frozen=True)
class Place:
    """Which replica reads, of how many, onto which device."""

    num_replicas: int
    replica_id: int
    device: Device


class Load(NamedTuple):
    """What a source loaded of one global batch, and which part of it is this replica's slice.

    Attributes:
        tree: The batch's structure.
        examples: How many are in the tree; None for a whole batch whose size must be read off its leaves.
        bounds: Which of them are the slice; None to cut a whole batch by the rule.
        size: Examples in the global batch; None when it is what the tree holds.
        separate: The tree was collated from the slice alone, so that nothing has to be cut.
        borrowed: The tree is the user's data itself, so slices must be copies.
        digest: Of the indices of all global batches so far, to see that replicas drew the same; 0 without indices.
    """

    tree: Any
    examples: int | None = None
    bounds: tuple[int, int] | None = None
    size: int | None = None
    separate: bool = False
    borrowed: bool = False
    digest: int = 0


class Source(ABC):
    """A dataset that can be read batch by batch, again and again.

    Attributes:
        threadable: Another thread may read it: that draws no random numbers in this process.
        in_memory: The next batch is always at hand, so reading ahead on the caller's thread never waits for data.
        exclusive: Only one iteration can be under way: starting a new one ends the last.
    """

    threadable: bool = False
    in_memory: bool = False
    exclusive: bool = False

    @abstractmethod
    def start(self) -> Iterator[Load]:
        """Begin to read, on the caller's thread.

        Random numbers are drawn as an ordinary DataLoader draws them, from the shared stream. An iterator with a
        `close` method is closed when reading ends early; one with `free` is freed when it is stuck.
        """

    @abstractmethod
    def length(self) -> int:
        """Number of global batches. Raises TypeError when it is not known."""
