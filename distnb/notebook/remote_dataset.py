"""A distributed dataset whose batches are on the engines, iterated in an ordinary notebook cell."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distnb.errors import StructureError
from distnb.input.optional import AskedIterator
from distnb.notebook.handles.state import state_of_handle
from distnb.notebook.pending import BesideCall, itself

if TYPE_CHECKING:
    from distnb.input.dataset import DistributedIterator

__all__ = ["RemoteDataset"]

Call = Callable[..., Any]
"""`call(function, *args)`: calls it on every replica, in cross-replica context, and regroups the results."""

Beside = Callable[[Sequence[Any], Sequence[Any]], BesideCall]
"""`beside((function, *args), changed)`: calls it, beside the next program, where it changes engine objects."""


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

    def __iter__(self) -> RemoteIterator:
        iterator = self._call(iter, self._handle)
        # The user's data was looked at for this call. Were it looked at for each batch, that would take longer than the
        # batch; what reading changes in it comes to the notebook at the iteration's end.
        facts = state_of_handle(iterator).facts
        for replica, fact in facts.items():
            facts[replica] = replace(fact, holds=tuple(held for held in fact.holds if not isinstance(held, str)))
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


class RemoteIterator(AskedIterator):
    """One iteration over the engines' dataset.

    The replicas are asked for the next batch while they work on this one, so that it is there when the cell comes for
    it. It counts as given only then; and where reading it raises, or could be told by the user's code, it is not asked
    for.
    """

    is_distributed_iterator = True

    def __init__(self, handle: Any, dataset: Any, call: Call, beside: Beside, note: Callable[[Any], None]) -> None:
        self._handle = handle
        self._dataset = dataset
        self._call = call
        self._beside = beside
        self._note = note
        self._asked: BesideCall | None = None
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        came, batch = self._take_asked()
        ahead = came
        if not came:
            more, batch, ahead = self._call(_advance, self._handle)
            if not more:
                self._ended = True
                self._note(None)
                self._call(_nothing, self._dataset)  # what reading changed in the notebook's data comes with it
                raise StopIteration
        if ahead:
            self._asked = self._beside((_ask_ahead, self._handle, came), (self._handle, self._dataset))
        self._note(batch)
        return batch

    def _take_asked(self) -> tuple[bool, Any]:
        """Whether there is a batch that was asked for ahead, and the batch."""
        asked, self._asked = self._asked, None
        if asked is None:
            return False, None
        try:
            more, batch = asked.result()
        except StructureError:  # the replicas read different data, and some are at the end
            return False, None
        return more is True, batch

    def __reduce__(self) -> tuple[Any, ...]:
        self._asked = None  # the cell that it is for may take that batch
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


def _advance(iterator: DistributedIterator) -> tuple[bool, Any, bool]:
    """The next batch, and whether to ask for those after it ahead. StopIteration would end the program as a failure."""
    try:
        return True, next(iterator), iterator.ahead
    except StopIteration:
        return False, None, False


def _ask_ahead(iterator: DistributedIterator, took: bool) -> tuple[bool, Any]:
    """The batch after the next; before that, the one that was asked for ahead is counted as given."""
    if took:
        next(iterator)
    batch = iterator.peek()
    return batch is not None, batch


def _nothing(*_: Any) -> None:
    pass
