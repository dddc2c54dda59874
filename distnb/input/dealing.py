"""The replica's portion of the batches: a slice of each global batch, or elements of an input pipeline in turn."""

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
    """Turns of replicas that read one input pipeline.

    Attributes:
        pipelines: The number of pipelines.
        pipeline: The index of the pipeline that this replica reads.
        takers: The number of replicas that read it.
        turn: This replica's position among them.
        pieces: The number of elements that each batch of the pipeline is cut into; 1 if a batch is an element.
    """

    pipelines: int
    pipeline: int
    takers: int
    turn: int
    pieces: int


@dataclass(frozen=True)
class ReplicaInput:
    """The replica that reads, and the destination of its batches.

    Attributes:
        num_replicas: The number of replicas in sync.
        replica_id: The replica that reads.
        device: The device on which it computes.
        target: The destination of its batches: the device, or the host.
        turns: The replica's turns at a pipeline; None if it gets a slice of each batch.
    """

    num_replicas: int
    replica_id: int
    device: Device
    target: Device
    turns: Turns | None = None

    @property
    def several_pipelines(self) -> bool:
        """True if other replicas read other data."""
        return self.turns is not None and self.turns.pipelines > 1

    @property
    def takes_whole_batches(self) -> bool:
        """True if a batch of the pipeline belongs to one replica and is not cut."""
        return self.turns is not None and self.turns.pieces == 1

    @property
    def elements_per_step(self) -> int:
        """The number of elements that all readers of the pipeline take together for one step."""
        return self.turns.takers if self.turns else 1


class Portion(NamedTuple):
    """A replica's part of one global batch.

    Attributes:
        batch: The batch that contains the part.
        examples: The number of examples in that batch; None for an element that is not cut, such as a scalar.
        start, stop: The range of the replica's examples; empty if it gets none.
        size: The number of examples in the global batch; None if they cannot be counted.
    """

    batch: Any
    examples: int | None
    start: int
    stop: int
    size: int | None


class Dealer(ABC):
    """Base class of objects that select this replica's portion of each global batch.

    The class with the batches inherits from it, because a separate object with a reference back would form a cycle: a
    loader's workers end when the last reference to their reader is gone.
    """

    def __init__(self, place: ReplicaInput) -> None:
        self._place = place
        self._ready: deque[Portion] = deque()
        self._group: list[Portion] = []

    @abstractmethod
    def _batch(self) -> Any:
        """Return the next batch: a structure of examples, a list of indices, a range."""

    def _count(self, batch: Any) -> int | None:
        """Return the number of examples in a batch, or None if the batch must not be cut."""
        return len(batch)

    def skip(self, elements: int) -> None:
        """Skip batches or, if replicas take turns, elements."""
        take = self._next_element if self._place.turns else self._batch
        with suppress(StopIteration):
            for _ in range(elements):
                take()

    def deal(self) -> Portion:
        """Return the next portion. Raise StopIteration at the end."""
        turns = self._place.turns
        if turns is None:
            batch = self._batch()
            count = self._count(batch)
            if count is None:
                return Portion(batch=batch, examples=None, start=0, stop=1, size=None)
            start, stop = slice_bounds(count, self._place.num_replicas, self._place.replica_id)
            return Portion(batch=batch, examples=count, start=start, stop=stop, size=count)
        with suppress(StopIteration):
            # If the next read fails, keep the elements taken so far: the caller may continue.
            while len(self._group) < turns.takers:
                self._group.append(self._next_element())
        group, self._group = self._group, []
        if not group:
            raise StopIteration
        portion = group[turns.turn] if turns.turn < len(group) else group[0]._replace(stop=group[0].start)
        if any(element.examples is None for element in group):
            return Portion(
                batch=portion.batch, examples=None, start=0, stop=int(portion.stop > portion.start), size=None
            )
        return portion._replace(size=sum(element.stop - element.start for element in group))

    def _next_element(self) -> Portion:
        pieces = self._place.turns.pieces if self._place.turns else 1
        while not self._ready:
            batch = self._batch()
            count = self._count(batch)
            if count is None:
                self._ready.append(Portion(batch=batch, examples=None, start=0, stop=1, size=None))
                break
            bounds = (slice_bounds(count, pieces, piece) for piece in range(pieces))
            self._ready += (
                Portion(batch=batch, examples=count, start=start, stop=stop, size=None)
                for start, stop in bounds
                if pieces == 1 or start < stop
            )
        return self._ready.popleft()
