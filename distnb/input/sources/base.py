"""Where batches come from: the interface of a source, and what it loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from distnb.topology import Device

__all__ = ["FROM_THE_START", "StartingPoint", "Load", "Place", "Shared", "Source", "Turns"]

Shared = Callable[[], AbstractContextManager[Any]]
"""Makes the random stream that all replicas share the current one for a while."""


@dataclass(frozen=True)
class Turns:
    """How a replica takes from an input pipeline whose elements its readers take in turn.

    Attributes:
        pipelines: How many pipelines there are.
        pipeline: Which of them this replica reads.
        takers: Replicas that read it.
        turn: This replica's place among them.
        pieces: Into how many elements each batch of the pipeline is cut; 1 where a batch is an element.
    """

    pipelines: int
    pipeline: int
    takers: int
    turn: int
    pieces: int


@dataclass(frozen=True)
class Place:
    """Which replica reads, of how many, and where it wants its batches.

    Attributes:
        num_replicas: Replicas in sync.
        replica_id: Which of them reads.
        device: Where it computes.
        target: Where its batches go: the device, or the host.
        turns: How it takes from a pipeline; None where it gets its slice of each batch.
    """

    num_replicas: int
    replica_id: int
    device: Device
    target: Device
    turns: Turns | None = None

    @property
    def several_pipelines(self) -> bool:
        """Whether other replicas read other data."""
        return self.turns is not None and self.turns.pipelines > 1

    @property
    def elements_per_step(self) -> int:
        """What all readers of the pipeline take of it together for one step."""
        return self.turns.takers if self.turns else 1


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
        whole: It is an element that cannot be cut, such as a scalar: it is handed out as it is or, where `bounds` are
            (0, 0), nothing in its place.
    """

    tree: Any
    examples: int | None = None
    bounds: tuple[int, int] | None = None
    size: int | None = None
    separate: bool = False
    borrowed: bool = False
    digest: int = 0
    whole: bool = False


class StartingPoint(NamedTuple):
    """Where an iteration begins.

    Attributes:
        skip: Batches to leave out (elements, where replicas take turns).
        kept: What `Source.kept` said before the iteration that is gone on with; None for a new one.
    """

    skip: int = 0
    kept: bool | None = None


FROM_THE_START = StartingPoint()


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
    def start(self, beginning: StartingPoint = FROM_THE_START) -> Iterator[Load]:
        """Begin to read, on the caller's thread.

        Random numbers are drawn as an ordinary DataLoader draws them, from the shared stream. An iterator with a
        `close` method is closed when reading ends early; one with `give_up` has workers, which that ends.

        Args:
            beginning: Where an earlier iteration is gone on with. What is left out draws what reading it would draw.
        """

    @abstractmethod
    def length(self) -> int:
        """Number of batches. Raises TypeError when it is not known."""

    @abstractmethod
    def peek(self) -> Any:
        """The structure of a first batch, or of part of one. Nothing is consumed; random numbers may be drawn."""

    def kept(self) -> bool:
        """Whether the next iteration uses workers that are there already, so that it draws no seed for them."""
        return False

    def generators(self) -> list[Any]:
        """The user's own random generators that reading draws from."""
        return []
