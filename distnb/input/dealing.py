"""Who gets what of the batches: a slice of each global batch, or elements of an input pipeline in turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from distnb.input.cutting import slice_bounds
from distnb.topology import Device

__all__ = ["Dealer", "Portion", "ReplicaInput", "Turns"]


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
class ReplicaInput:
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
    def takes_whole_batches(self) -> bool:
        """Whether a batch of the pipeline is one replica's, so that nobody cuts it."""
        return self.turns is not None and self.turns.pieces == 1

    @property
    def elements_per_step(self) -> int:
        """What all readers of the pipeline take of it together for one step."""
        return self.turns.takers if self.turns else 1


class Portion(NamedTuple):
    """What a replica gets of one global batch.

    Attributes:
        batch: The batch that it is part of.
        examples: How many that batch holds; None for an element that is not cut, such as a scalar.
        start, stop: Which of them are the replica's; equal where it gets none.
        size: Examples in the global batch; None where they cannot be counted.
    """

    batch: Any
    examples: int | None
    start: int
    stop: int
    size: int | None


class Dealer(ABC):
    """This replica's portion of each global batch. Who has the batches inherits from it: a loader's workers end when
    nobody refers to what reads, and an object of its own, with a way back, would be a cycle.
    """

    def __init__(self, place: ReplicaInput) -> None:
        self._place = place
        self._ready: deque[Portion] = deque()
        self._group: list[Portion] = []

    @abstractmethod
    def _batch(self) -> Any:
        """The next batch: a structure of examples, a list of indices, a range."""

    def _count(self, batch: Any) -> int | None:
        """How many examples a batch holds; None for one that is not to be cut."""
        return len(batch)

    def skip(self, elements: int) -> None:
        """Leave out batches or, where replicas take turns, elements."""
        take = self._next_element if self._place.turns else self._batch
        with suppress(StopIteration):
            for _ in range(elements):
                take()

    def deal(self) -> Portion:
        """The next portion. Raises StopIteration at the end."""
        turns = self._place.turns
        if turns is None:
            batch = self._batch()
            count = self._count(batch)
            if count is None:
                return Portion(batch, None, 0, 1, None)
            return Portion(batch, count, *slice_bounds(count, self._place.num_replicas, self._place.replica_id), count)
        with suppress(StopIteration):
            # What was taken stays when reading the next one fails: the caller may go on.
            while len(self._group) < turns.takers:
                self._group.append(self._next_element())
        group, self._group = self._group, []
        if not group:
            raise StopIteration
        portion = group[turns.turn] if turns.turn < len(group) else group[0]._replace(stop=group[0].start)
        if any(element.examples is None for element in group):
            return Portion(portion.batch, None, 0, int(portion.stop > portion.start), None)
        return portion._replace(size=sum(element.stop - element.start for element in group))

    def _next_element(self) -> Portion:
        pieces = self._place.turns.pieces if self._place.turns else 1
        while not self._ready:
            batch = self._batch()
            count = self._count(batch)
            if count is None:
                self._ready.append(Portion(batch, None, 0, 1, None))
                break
            bounds = (slice_bounds(count, pieces, piece) for piece in range(pieces))
            self._ready += (Portion(batch, count, *at, None) for at in bounds if pieces == 1 or at[0] < at[1])
        return self._ready.popleft()
