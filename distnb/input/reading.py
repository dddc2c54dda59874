"""Reading batches when they are asked for, or ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from distnb.errors import StructureError
from distnb.input.batch_placement import BatchPlacement
from distnb.input.cutting import count_examples, cut, map_leaves, map_parts, slice_bounds
from distnb.input.sources.base import Load, Place
from distnb.values.distributed import PerReplica

__all__ = [
    "Batch",
    "Reader",
    "may_be_empty",
    "nothing_of",
]


class Batch(NamedTuple):
    """One batch on its way to the caller.

    Attributes:
        made: What the placement made of it.
        size: Examples in the global batch; 0 where they were not counted, None where they cannot be.
        digest: As in `Load`.
    """

    made: Any
    size: int | None
    digest: int


class Reader:
    """One iteration: the replica's part of each global batch, cut, carried to the device, marked as per-replica.

    Args:
        loads: What the source loads.
        place: The replica.
        placement: How leaves reach its device.
        depth: How many batches are read ahead, so that copies to the device overlap with the caller's work.
    """

    def __init__(self, loads: Iterator[Load], place: Place, placement: BatchPlacement, depth: int) -> None:
        self._loads: Any = loads
        self._place = place
        self._placement = placement
        self._as_is = place.num_replicas == 1 and place.target.type == "cpu"
        self._depth = depth
        self._ready: deque[Batch | Exception] = deque()

    def fill(self) -> None:
        """Read as many batches as are read ahead."""
        self._have(self._depth)

    def _have(self, count: int) -> None:
        ready = self._ready
        while len(ready) < count:
            if ready and isinstance(ready[-1], StopIteration):
                break
            try:
                ready.append(self._next())
            except StopIteration:
                ready.append(StopIteration())
            except Exception as error:  # noqa: BLE001 - raised when its turn comes
                ready.append(error)

    def read(self) -> Batch:
        """The next batch. Raises StopIteration at the end, and what the source raised, at its place."""
        self._have(self._depth + 1)
        ready = self._ready
        if isinstance(ready[0], StopIteration):
            raise StopIteration
        item = ready.popleft()
        try:
            if isinstance(item, Batch):
                return item
            raise item
        finally:
            del item  # an exception's traceback knows this frame: were it kept here, neither would ever go

    def peek(self) -> Batch | None:
        """The batch that `read` gives next; None where that raises."""
        self._have(1)
        first = self._ready[0]
        return first if isinstance(first, Batch) else None

    def close(self) -> None:
        """End the iteration early. It may be called from any thread, and again."""
        if hasattr(self._loads, "close"):
            self._loads.close()

    def cut_short(self) -> None:
        """End the iteration early and for good: workers that outlive iterations end too."""
        self.close()
        if hasattr(self._loads, "give_up"):
            self._loads.give_up()

    def _next(self) -> Batch:
        load = next(self._loads)
        size: int | None = 0

        def make() -> Any:
            nonlocal size
            size, tree = self._make(load)
            return tree

        made = self._placement.batch(make, self._depth > 0)
        return Batch(made, size, load.digest)

    def _make(self, load: Load) -> tuple[int | None, Any]:
        carry = self._placement.carry
        replicas, replica_id = self._place.num_replicas, self._place.replica_id
        if load.examples is None and replicas == 1:
            # One replica gets the very batch, whatever is in it.
            return 0, load.tree if self._as_is else map_parts(load.tree, lambda part: carry(part, False))
        if load.whole:

            def element(node: Any) -> Any:
                if node is None:
                    return None
                component = carry(node if load.bounds != (0, 0) else nothing_of(node), load.borrowed)
                return PerReplica.own(replica_id, component, replicas)

            return None, map_parts(load.tree, element)
        count = count_examples(load.tree) if load.examples is None else load.examples
        size = count if load.size is None else load.size
        start, stop = load.bounds or slice_bounds(count, replicas, replica_id)
        uncut = load.separate and stop == count
        borrowed = load.borrowed

        def leaf(node: Any) -> Any:
            if load.separate and start == stop and not may_be_empty(node):
                raise StructureError(
                    f"A global batch of {size} example(s) leaves replica {replica_id} of {replicas} without any, and "
                    f"the batch's {type(node).__name__} cannot be empty. Make the global batch larger, drop the last "
                    "partial one (drop_last=True), or collate into tensors."
                )
            component = carry(node if uncut else cut(node, start, stop), borrowed)
            return component if replicas == 1 else PerReplica.own(replica_id, component, replicas, size)

        return size, map_leaves(load.tree, count, leaf, own=load.separate)


def may_be_empty(node: Any) -> bool:
    """Whether a leaf can be cut down to no example at all."""
    return hasattr(node, "shape") or (isinstance(node, Sequence) and not hasattr(node, "to"))


def nothing_of(node: Any) -> Any:
    """What stands for no element like this one: an empty tensor, array or list; None for what cannot be empty."""
    if hasattr(node, "reshape") and not len(node.shape):
        return node.reshape(1)[:0]
    return cut(node, 0, 0) if may_be_empty(node) else None
