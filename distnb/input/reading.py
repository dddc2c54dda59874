"""Reading of batches on request, or ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from distnb.errors import StructureError
from distnb.input.batch_placement import BatchPlacement
from distnb.input.cutting import cut, map_leaves, map_parts
from distnb.input.dealing import ReplicaInput
from distnb.input.sources.base import Load
from distnb.values.distributed import PerReplica

__all__ = ["Batch", "Reader", "empty_like", "may_be_empty"]


class Batch(NamedTuple):
    """A batch on this replica.

    Attributes:
        tree: Its structure, with the replica's part of each leaf.
        size: The number of examples in the global batch; None if they cannot be counted.
        digest: As in `Load`.
    """

    tree: Any
    size: int | None
    digest: int


class Reader:
    """The reader of one iteration. It cuts the replica's part of each global batch, moves it to the device, and wraps
    it.

    It reads `depth` batches ahead, so that copies to the device overlap with the caller's work.
    """

    def __init__(self, loads: Iterator[Load], place: ReplicaInput, placement: BatchPlacement, depth: int) -> None:
        self._loads: Any = loads
        self._place = place
        self._placement = placement
        self._depth = depth
        self._ready: deque[Batch | Exception] = deque()

    def fill(self) -> None:
        """Read ahead as many batches as the depth allows."""
        self._read_ahead(self._depth)

    def _read_ahead(self, count: int) -> None:
        ready = self._ready
        while len(ready) < count and not (ready and isinstance(ready[-1], StopIteration)):
            try:
                ready.append(self._next())
            except StopIteration:
                # A new object, because the traceback would keep the reader, and with it the workers, alive.
                ready.append(StopIteration())
            except Exception as error:  # noqa: BLE001 - raised at its place among the batches
                ready.append(error)

    def read(self) -> Batch:
        """Return the next batch. Raise StopIteration at the end, and the source's errors at their place."""
        self._read_ahead(self._depth + 1)
        if isinstance(self._ready[0], StopIteration):
            raise StopIteration
        item = self._ready.popleft()
        try:
            if isinstance(item, Batch):
                return self._hand_over(item)
            raise item
        finally:
            del item  # the exception's traceback refers to this frame, which must not refer back to the exception

    def peek(self, count: int) -> list[Batch]:
        """Return the next batches that `read` would return, at most `count`, up to where it would raise."""
        self._read_ahead(count)
        ready = itertools.takewhile(lambda each: isinstance(each, Batch), itertools.islice(self._ready, count))
        return [self._hand_over(batch) for batch in ready if isinstance(batch, Batch)]

    def _hand_over(self, batch: Batch) -> Batch:
        return batch._replace(tree=self._placement.hand_over(batch.tree))

    def close(self) -> None:
        """End the iteration early. Any thread may call it, any number of times."""
        self._loads.close()
        self._ready = deque([StopIteration()])

    def cut_short(self) -> None:
        """End the iteration early, including persistent workers."""
        self.close()
        if hasattr(self._loads, "end_all_workers"):
            self._loads.end_all_workers()

    def _next(self) -> Batch:
        load = next(self._loads)
        return Batch(self._placement.batch(lambda: self._placed(load), self._depth > 0), load.size, load.digest)

    def _placed(self, load: Load) -> Any:
        carry = self._placement.carry
        replicas, replica_id = self._place.num_replicas, self._place.replica_id
        if load.examples is None and replicas == 1:
            as_it_is = self._place.target.type == "cpu"
            return load.tree if as_it_is else map_parts(load.tree, lambda part: carry(part, False))

        def element(node: Any) -> Any:
            if node is None:
                return None
            component = carry(node if load.stop else empty_like(node), load.borrowed)
            return PerReplica.own(replica_id, component, replicas)

        def leaf(node: Any) -> Any:
            if load.separate and load.start == load.stop and not may_be_empty(node):
                raise StructureError(
                    f"A global batch of {load.size} example(s) leaves replica {replica_id} of {replicas} without any, "
                    f"and the batch's {type(node).__name__} cannot be empty. Make the global batch larger, drop the "
                    "last partial one (drop_last=True), or collate into tensors."
                )
            uncut = load.separate and load.stop == load.examples
            component = carry(node if uncut else cut(node, load.start, load.stop), load.borrowed)
            return component if replicas == 1 else PerReplica.own(replica_id, component, replicas, load.size)

        if load.examples is None:
            return map_parts(load.tree, element)
        return map_leaves(load.tree, load.examples, leaf, own=load.separate)


def may_be_empty(node: Any) -> bool:
    """Return whether a leaf can be cut down to no example at all."""
    return hasattr(node, "shape") or (isinstance(node, Sequence) and not hasattr(node, "to"))


def empty_like(node: Any) -> Any:
    """Return an empty tensor, array or list in place of an element, or None if the element cannot be empty."""
    if hasattr(node, "reshape") and not len(node.shape):
        return node.reshape(1)[:0]
    return cut(node, 0, 0) if may_be_empty(node) else None
