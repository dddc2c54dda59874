"""A distributed dataset whose batches are on the engines, iterated in an ordinary notebook cell."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distnb.errors import StructureError
from distnb.input.optional import BatchIterator
from distnb.notebook.handles.pending import BesideCall, itself
from distnb.notebook.handles.state import state_of_handle

if TYPE_CHECKING:
    from distnb.input.dataset import DistributedIterator

__all__ = ["RemoteDataset"]

Call = Callable[..., Any]
"""`call(function, *args)`: calls it on every replica, in cross-replica context, and regroups the results."""

Beside = Callable[[Callable[[], Sequence[Any]], Sequence[Any]], BesideCall]
"""`beside(ask, changed)`: calls what `ask` gives, (function, *args), beside a program; it changes engine objects."""


class RemoteDataset:
    """Iterating it reads a batch on every replica and gives the structure of their slices, behind handles.

    Captured by a distributed cell, or passed to `strategy.run`, it stands for the engines' own dataset, `handle`.
    `note` is told of each batch that is given.
    """

    def __init__(self, handle: Any, call: Call, beside: Beside, note: Callable[[Any], None]) -> None:
        self._handle = handle
        self._call = call
        self._beside = beside
        self._note = note

    is_distributed_dataset = True

    @property
    def handle(self) -> Any:
        """The engines' dataset."""
        return self._handle

    def __iter__(self) -> RemoteIterator:
        iterator = self._call(iter, self._handle)
        # The user's data was looked at for this call. Were it looked at for each batch, that would take longer than the
        # batch; what reading changes in it comes to the notebook at the iteration's end.
        facts = state_of_handle(iterator).facts
        for replica, fact in facts.items():
            facts[replica] = fact._replace(holds=tuple(held for held in fact.holds if not isinstance(held, str)))
        return RemoteIterator(iterator, self._handle, self._call, self._beside, self._note)

    def __len__(self) -> int:
        return int(self._call(len, self._handle))

    @property
    def element_spec(self) -> Any:
        """As that of the engines' dataset."""
        return _unpacked(self._call(_spec_of, self._handle))

    def state_dict(self) -> Any:
        """As that of the engines' dataset: one dict, where all replicas read the same data."""
        return _unpacked(self._call(_state_of, self._handle))

    def load_state_dict(self, state_dict: Any) -> None:
        """Have the engines' dataset go on where the state was taken."""
        self._call(_load, self._handle, state_dict)

    def __repr__(self) -> str:
        return f"RemoteDataset({self._handle!r})"

    def __getattr__(self, name: str) -> Any:  # `cardinality` and `epoch`, which are plain numbers
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._handle, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self._handle,)


class RemoteIterator(BatchIterator):
    """One iteration over the engines' dataset.

    The replicas are asked for some of the next batches while they work on the last that is here. Each counts as given
    only when the cell comes for it; and where reading raises, or could be told by the user's code, none is asked for.
    """

    is_distributed_iterator = True

    def __init__(self, handle: Any, dataset: Any, call: Call, beside: Beside, note: Callable[[Any], None]) -> None:
        self._handle = handle
        self._dataset = dataset
        self._call = call
        self._beside = beside
        self._note = note
        self._here: deque[Any] = deque()
        self._given = 0  # of those that were here; the replicas hear of it when they are asked for more
        self._asked: BesideCall | None = None
        self._ahead = 0
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._asked is not None and (self._asked.is_sent or not self._here):
            self._here.extend(self._come(self._asked))
            self._asked = None
        if self._here:
            batch = self._here.popleft()
            self._given += 1
        else:
            self._ahead, found = self._call(_advance, self._handle)
            if not found:
                self._ended = True
                self._note(None)
                self._call(_nothing, self._dataset)  # what reading changed in the notebook's data comes with it
                raise StopIteration
            (batch,) = found
        if self._ahead:
            if self._asked is None:
                self._asked = self._beside(self._ask, (self._handle, self._dataset))
            self._asked.waits = bool(self._here)
        self._note(batch)
        return batch

    def _ask(self) -> tuple[Any, ...]:
        given, self._given = self._given, 0
        return _look_ahead, self._handle, given, len(self._here), self._ahead - len(self._here)

    def _come(self, asked: BesideCall) -> Sequence[Any]:
        """The batches that were asked for; none where reading the next one raises."""
        try:
            batches: Sequence[Any] = asked.result()
        except StructureError:  # the replicas read different data, and some are at the end
            return ()
        return batches

    def __reduce__(self) -> tuple[Any, ...]:
        self._here.clear()  # the program that it is for may take those
        self._asked = None
        return itself, (self._handle,)


# Bytes that are equal on all replicas come to the notebook; objects would stay there, behind handles.


def _unpacked(packed: Any) -> Any:
    return pickle.loads(packed) if isinstance(packed, bytes) else packed


def _spec_of(dataset: Any) -> bytes:
    return pickle.dumps(dataset.element_spec)


def _state_of(dataset: Any) -> bytes:
    return pickle.dumps(dataset.state_dict())


def _load(dataset: Any, state: Any) -> None:
    dataset.load_state_dict(_unpacked(state))


def _advance(iterator: DistributedIterator) -> tuple[int, tuple[Any, ...]]:
    """How many batches to ask for ahead, and the next one; none at the end: StopIteration would be a failure."""
    try:
        return iterator.ahead, (next(iterator),)
    except StopIteration:
        return 0, ()


def _look_ahead(iterator: DistributedIterator, given: int, here: int, more: int) -> tuple[Any, ...]:
    """Some more of the next batches, behind those that are `here`, once so many have been counted as `given`."""
    for _ in range(given):
        next(iterator)
    return tuple(iterator.peek(here + more)[here:])


def _nothing(*_: Any) -> None:
    pass
