"""Reading batches on the caller's thread, when they are asked for or ahead, or ahead on a thread of its own."""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

from distnb.errors import StructureError
from distnb.input.batch_placement import BatchPlacement
from distnb.input.cutting import count_examples, cut, map_leaves, map_parts, slice_bounds
from distnb.input.sources.base import Load, Place
from distnb.values.distributed import PerReplica

__all__ = [
    "Batch",
    "CallerReader",
    "Maker",
    "Reader",
    "ThreadReader",
    "join_all",
    "may_be_empty",
    "nothing_of",
]

_STUCK_AFTER_S = 1.0
_PERSISTENT_STUCK_AFTER_S = 10.0  # workers that may be slow now, and are wanted later


_reading: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


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


class Maker:
    """Makes the replica's part of each global batch: cut, carried to the device, marked as per-replica.

    Args:
        loads: What the source loads.
        place: The replica.
        placement: How leaves reach its device.
    """

    def __init__(self, loads: Iterator[Load], place: Place, placement: BatchPlacement) -> None:
        self._loads = loads
        self._place = place
        self._placement = placement
        self._as_is = place.num_replicas == 1 and place.target.type == "cpu"

    def __call__(self, ahead: bool) -> Batch:
        """The next batch. Raises StopIteration at the end."""
        load = next(self._loads)
        size: int | None = 0

        def make() -> Any:
            nonlocal size
            size, tree = self._make(load)
            return tree

        made = self._placement.batch(make, ahead)
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

    @property
    def has_workers(self) -> bool:
        """Whether processes load for the source, so that closing it may take a while."""
        return hasattr(self._loads, "free")

    def close(self) -> None:
        """Let the source go."""
        close = getattr(self._loads, "close", None)
        if close is not None:
            close()

    def give_up(self) -> None:
        """Have the source begin anew in its next iteration, whatever it kept from the last ones."""
        if getattr(self._loads, "persistent", False):
            self.free()

    def free(self) -> None:
        """Free a reader that the source keeps stuck."""
        free = getattr(self._loads, "free", None)
        if free is not None:
            free()


def may_be_empty(node: Any) -> bool:
    """Whether a leaf can be cut down to no example at all."""
    return hasattr(node, "shape") or (isinstance(node, Sequence) and not hasattr(node, "to"))


def nothing_of(node: Any) -> Any:
    """What stands for no element like this one: an empty tensor, array or list; None for what cannot be empty."""
    if hasattr(node, "reshape") and not len(node.shape):
        return node.reshape(1)[:0]
    return cut(node, 0, 0) if may_be_empty(node) else None


class Reader(ABC):
    """Gives the batches of one iteration; `close` ends it early, from any thread, and may be called again."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker

    @abstractmethod
    def read(self) -> Batch:
        """The next batch. Raises StopIteration at the end, and what the source raised, at its place."""

    @abstractmethod
    def peek(self) -> Batch | None:
        """The batch that `read` gives next; None where that raises."""

    def close(self) -> None:
        """End the iteration early."""
        if self._maker.has_workers:
            # An interrupted program does not wait for a worker that is stuck.
            threading.Thread(target=self._maker.close, name="distnb-input-end", daemon=True).start()
        else:
            self._maker.close()

    def cut_short(self) -> None:
        """End the iteration early and for good: workers that outlive iterations end too."""
        self.close()
        if self._maker.has_workers:
            threading.Thread(target=self._maker.give_up, name="distnb-input-end", daemon=True).start()

    def ending(self) -> Callable[[], None]:
        """What ends the iteration and waits until nothing reads the source any more; it does not keep the reader."""
        return self._maker.close


class CallerReader(Reader):
    """Reads on the caller's thread.

    Args:
        maker: Makes batches.
        depth: How many it reads ahead, so that copies to the device overlap with the caller's work.
    """

    def __init__(self, maker: Maker, depth: int) -> None:
        super().__init__(maker)
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
                ready.append(self._maker(self._depth > 0))
            except StopIteration:
                ready.append(StopIteration())
            except Exception as error:  # noqa: BLE001 - raised when its turn comes
                ready.append(error)

    def read(self) -> Batch:
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
            del item  # as in _read_ahead

    def peek(self) -> Batch | None:
        self._have(1)
        first = self._ready[0]
        return first if isinstance(first, Batch) else None


class ThreadReader(Reader):
    """Reads some batches ahead on a thread of its own, which ends with the iteration or with this object."""

    def __init__(self, maker: Maker, depth: int, *, persistent: bool) -> None:
        super().__init__(maker)
        self._stuck_after_s = _PERSISTENT_STUCK_AFTER_S if persistent else _STUCK_AFTER_S
        self._items: SimpleQueue[Batch | BaseException] = SimpleQueue()
        # The thread takes one token per batch; False tells it to end.
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._stop = threading.Event()
        for _ in range(depth):
            self._tokens.put(True)
        self._thread = threading.Thread(
            target=_read_ahead, args=(maker, self._items, self._tokens, self._stop), name="distnb-input", daemon=True
        )
        _reading.add(self._thread)
        self._ended = False
        self._peeked: Batch | BaseException | None = None
        # Dropped without being closed. Starting a thread or taking a lock is not for the garbage collector's time.
        self._dropped = weakref.finalize(self, _signal, self._stop, self._tokens)
        self._thread.start()

    def read(self) -> Batch:
        if self._ended:
            raise StopIteration
        item, self._peeked = self._peeked or self._items.get(), None
        if isinstance(item, StopIteration):
            self._ended = True
            raise StopIteration
        self._tokens.put(True)
        try:
            if isinstance(item, Batch):
                return item
            raise item
        finally:
            del item  # as in _read_ahead

    def peek(self) -> Batch | None:
        if self._ended:
            return None
        if self._peeked is None:
            self._peeked = self._items.get()
        return self._peeked if isinstance(self._peeked, Batch) else None

    def close(self) -> None:
        if self._dropped.detach() is None:
            return
        _signal(self._stop, self._tokens)
        if not self._ended and self._thread.is_alive():
            # It ends with the batch that it waits for, unless a worker is stuck.
            watch = (self._thread, self._maker, self._stuck_after_s)
            threading.Thread(target=_free_when_stuck, args=watch, name="distnb-input-end", daemon=True).start()
        self._ended = True

    def ending(self) -> Callable[[], None]:
        thread, maker, stop, tokens, patience_s = (
            self._thread, self._maker, self._stop, self._tokens, self._stuck_after_s
        )  # fmt: skip

        def end() -> None:
            _signal(stop, tokens)
            _free_when_stuck(thread, maker, patience_s)
            thread.join()

        return end


def join_all(timeout_s: float) -> None:
    """Before the interpreter ends: wait a while for threads that were told to end.

    One that came back from torch's C++ to an interpreter that is gone would take the process with it.
    """
    until = time.monotonic() + timeout_s
    for thread in list(_reading):
        thread.join(max(0.0, until - time.monotonic()))


def _signal(stop: threading.Event, tokens: SimpleQueue[bool]) -> None:
    stop.set()
    tokens.put(False)


def _free_when_stuck(thread: threading.Thread, maker: Maker, stuck_after_s: float) -> None:
    thread.join(stuck_after_s)
    if thread.is_alive():
        maker.free()


def _read_ahead(
    make: Maker,
    items: SimpleQueue[Batch | BaseException],
    tokens: SimpleQueue[bool],
    stop: threading.Event,
) -> None:
    """The thread. It holds no reference to the reader, so that a dropped one ends it."""
    try:
        while tokens.get() and not stop.is_set():
            try:
                item: Batch | BaseException = make(True)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread, when its turn comes
                item = error
            ended = isinstance(item, StopIteration)
            items.put(StopIteration() if ended else item)
            # An exception's traceback knows this frame: were it kept here, neither would ever go.
            del item
            if ended:
                break
    finally:
        make.close()
