"""A distributed dataset whose batches are on the engines, iterated in an ordinary notebook cell."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distnb.errors import StructureError
from distnb.input.optional import BatchIterator
from distnb.notebook.handles.pending import DeferredCall
from distnb.notebook.handles.state import state_of_handle
from distnb.runtime.in_process import local_components

if TYPE_CHECKING:
    from distnb.input.dataset import DistributedIterator

__all__ = ["RemoteDataset"]

Call = Callable[..., Any]
"""`call(function, *args)` calls a function on every replica, in cross-replica context, and regroups the results."""

Defer = Callable[[Callable[[], Sequence[Any]], Sequence[Any]], DeferredCall]
"""`defer(ask, changed)` calls `ask()`, which is (function, *args), after the next program; see `Calls.defer`."""


class RemoteDataset:
    """A dataset on the engines. Each step reads a batch on every replica, and returns its structure with handles.

    In a distributed cell and in `strategy.run` it represents the engines' own dataset.

    Args:
        handle: The handle of the engines' dataset.
        call: Calls a function on every replica.
        defer: Defers such a call.
        note: Called with each batch that an iteration returns.
        began: Called with each iteration that begins.
    """

    def __init__(
        self,
        handle: Any,
        call: Call,
        defer: Defer,
        note: Callable[[Any], None],
        began: Callable[[RemoteIterator], None] = lambda iteration: None,
    ) -> None:
        self._handle = handle
        self._call = call
        self._defer = defer
        self._note = note
        self._began = began

    is_distributed_dataset = True

    @property
    def handle(self) -> Any:
        """The engines' dataset."""
        return self._handle

    def __iter__(self) -> RemoteIterator:
        iterator = self._call(iter, self._handle)
        # This call has compared the user's data with the engines'. Comparing them again for each batch would take
        # longer than the batch. Changes that reading makes in the data are sent to the notebook when the iteration
        # ends.
        facts = state_of_handle(iterator).facts
        for replica, fact in facts.items():
            facts[replica] = fact._replace(holds=tuple(held for held in fact.holds if not isinstance(held, str)))
        iteration = RemoteIterator(iterator, self._handle, self._call, self._defer, self._note)
        self._began(iteration)
        return iteration

    def __len__(self) -> int:
        return int(self._call(len, self._handle))

    @property
    def element_spec(self) -> Any:
        """The element spec of the engines' dataset."""
        return _unpacked(self._call(_spec_of, self._handle))

    def state_dict(self) -> Any:
        """Return the state of the engines' dataset: one dict if all replicas read the same data."""
        return _unpacked(self._call(_state_of, self._handle))

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue the engines' dataset from a state."""
        self._call(_load, self._handle, state_dict)

    def __repr__(self) -> str:
        return f"RemoteDataset({self._handle!r})"

    def __getattr__(self, name: str) -> Any:  # `cardinality` and `epoch`, which are plain numbers
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._handle, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._handle,)


class RemoteIterator(BatchIterator):
    """An iteration over the engines' dataset.

    It fetches some batches ahead, with a deferred call that runs after the program that uses the last fetched batch.
    With four batches per fetch the order is:

        batch 0, run(0), fetch 1 to 4, run(1), run(2), run(3), run(4), fetch 5 to 8, …

    A batch counts as returned only when the cell asks for it. If reading the next batch raises, or if the user's code
    could notice the early reading, nothing is fetched ahead.
    """

    is_distributed_iterator = True

    def __init__(self, handle: Any, dataset: Any, call: Call, defer: Defer, note: Callable[[Any], None]) -> None:
        self._handle = handle
        self._dataset = dataset
        self._call = call
        self._defer = defer
        self._note = note
        self._here: deque[Any] = deque()
        self._given = 0  # the number of batches returned since the last fetch, which the next fetch reports
        self._asked: DeferredCall | None = None
        self._ahead = 0
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        data: tuple[Any, ...] = ()
        if self._asked is not None and (self._asked.is_sent or not self._here):
            self._here.extend(self._fetched(self._asked))
            self._asked = None
            if not self._here:
                data = (self._dataset,)  # this is probably the end
        if self._here:
            batch = self._here.popleft()
            self._given += 1
        else:
            ahead, found = self._call(_advance, self._handle, *data)
            self._ahead = min(local_components(ahead))  # the replicas' parts of a batch may differ in size
            if not found:
                self._ended = True
                self._note(None)
                if not data:
                    self._call(_nothing, self._dataset)  # fetches the changes that reading made in the notebook's data
                raise StopIteration
            (batch,) = found
        if self._ahead:
            if self._asked is None:
                self._asked = self._defer(self._ask, (self._handle, self._dataset))
            self._asked.urgent = not self._here
        self._note(batch)
        return batch

    def _ask(self) -> tuple[Any, ...]:
        given, self._given = self._given, 0
        return _read_ahead, self._handle, given, len(self._here), self._ahead - len(self._here)

    def _fetched(self, asked: DeferredCall) -> Sequence[Any]:
        """Return the batches that were fetched ahead, or () if reading the next one raises."""
        try:
            batches: Sequence[Any] = asked.result()
        except StructureError:  # the replicas read different data, and some are at the end
            return ()
        return batches

    @contextmanager
    def read_again(self) -> Iterator[None]:
        """Return a context in which the replicas may change. Batches that were fetched ahead are read again afterwards.

        No call may be under way.
        """
        self._here.clear()
        self._asked = None
        try:
            yield
        finally:
            if self._given and not self._ended:  # the replicas must know before anything reads their dataset
                self._asked = self._defer(self._ask, (self._handle, self._dataset))
                self._asked.urgent = False

    def __reduce__(self) -> tuple[Any, ...]:
        self._here.clear()  # the program may read these batches itself
        self._asked = None
        return _itself, (self._handle,)


# Bytes that are equal on all replicas are sent to the notebook. Objects would stay on the replicas, behind handles.


def _itself(value: Any) -> Any:
    """Return the value. A dataset and an iteration are pickled as a call of this function with their handle."""
    return value


def _unpacked(packed: Any) -> Any:
    return pickle.loads(packed) if isinstance(packed, bytes) else packed


def _spec_of(dataset: Any) -> bytes:
    return pickle.dumps(dataset.element_spec)


def _state_of(dataset: Any) -> bytes:
    return pickle.dumps(dataset.state_dict())


def _load(dataset: Any, state: Any) -> None:
    dataset.load_state_dict(_unpacked(state))


def _advance(iterator: DistributedIterator, *_: Any) -> tuple[int, tuple[Any, ...]]:
    """Return the number of batches to fetch ahead, and the next batch in a tuple.

    The tuple is empty at the end, since StopIteration would count as an error of the replica. At the end the dataset is
    given, too: then the changes that reading made in the notebook's data are returned with the result.
    """
    try:
        batch = next(iterator)
        return iterator.ahead_like(batch), (batch,)
    except StopIteration:
        return 0, ()


def _read_ahead(iterator: DistributedIterator, given: int, here: int, more: int) -> tuple[Any, ...]:
    """Return some more of the next batches.

    Args:
        given: The number of batches that the cell has received since the last fetch.
        here: The number of batches that the notebook has and the cell has not received.
        more: The number of batches to return, after these.
    """
    for _ in range(given):
        next(iterator)
    return tuple(iterator.peek(here + more)[here:])


def _nothing(*_: Any) -> None:
    pass
