"""Twins: an object in the notebook and the one on the engines that stands for the same thing.

Both sides keep a table of them. The notebook's is weak where it can be: when an object dies there, its twin is
released, and the engines let go of it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from distnb.wire.cycles import held_by_none
from distnb.wire.memory import Regions, meet, span_of
from distnb.wire.messages import ObjectId

__all__ = ["NOT_THERE", "Twins", "is_value_twin", "sent_id"]

_FEWEST_FOR_CYCLES = 1000
_BARE_REFCOUNT = 3  # the table's own entry, the loop's variable, and getrefcount's argument


class _NotThere:
    """The component of a replica that never assigned the name."""

    def __repr__(self) -> str:
        return "<unassigned>"

    def __reduce__(self) -> str:
        return "NOT_THERE"


NOT_THERE = _NotThere()


def sent_id(serial: int, index: int, *, by_engine: bool = False) -> ObjectId:
    """The id of the object that stands at `index` in the memo of one delivery's pickle (or of its effects')."""
    return serial, f"+{index}" if by_engine else f":{index}"


def is_value_twin(identity: ObjectId) -> bool:
    """Whether the notebook holds this object as a plain value, and not by a handle."""
    return identity[1][0] in ":+"


class Twins:
    """One side's table.

    Args:
        weak: Hold objects weakly where their type allows it, and the others only while something else does.

    Attributes:
        ids: The id of each object here, by its `id()`.
        owned: The same, of engine objects alone, which the notebook holds by handles.
        contents: The mark of the content of each array, tensor or frozen object when both sides last agreed on it.
        released: Ids whose object here has died, for the other side to hear.
    """

    def __init__(self, *, weak: bool) -> None:
        self._weak = weak
        self._objects: dict[ObjectId, Any] = {}
        self._strong: dict[ObjectId, Any] = {}
        self.ids: dict[int, ObjectId] = {}
        self.owned: dict[int, ObjectId] = {}
        self.contents: dict[ObjectId, Any] = {}
        self.released: deque[ObjectId] = deque()
        self._look_for_cycles_at = _FEWEST_FOR_CYCLES
        self._regions: Regions[ObjectId] = Regions()

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, identity: ObjectId) -> bool:
        return self.get(identity, None) is not None

    def id_of(self, obj: Any) -> ObjectId | None:
        """The id of an object here, if it has a twin."""
        return self.ids.get(id(obj))

    def get(self, identity: ObjectId, default: Any = NOT_THERE) -> Any:
        """The object here that has this id."""
        found = self._objects.get(identity, NOT_THERE)
        if isinstance(found, weakref.ref) and self._weak:
            found = found()
            return default if found is None else found
        return default if found is NOT_THERE else found

    def add(self, identity: ObjectId, obj: Any, *, findable: bool = True) -> None:
        """Make `obj` the object of an id. An object keeps the first id that it was given."""
        held = obj
        if self._weak:
            try:
                held = weakref.ref(obj, functools.partial(self._died, identity, id(obj)))
            except TypeError:
                self._strong[identity] = obj
        self._objects[identity] = held
        span = span_of(obj)
        if span is not None:
            self._regions.add(identity, span)
        if type(obj) is tuple:
            self.contents[identity] = self.parts_of(obj)
        if findable:
            known = self.ids.setdefault(id(obj), identity)
            if not is_value_twin(known):
                self.owned[id(obj)] = known

    def parts_of(self, obj: Any) -> tuple[ObjectId | None, ...]:
        """The ids of what a tuple, or a method, holds."""
        parts = obj if type(obj) is tuple else (obj.__func__, obj.__self__)
        return tuple([self.ids.get(id(part)) for part in parts])

    def neighbours(self, obj: Any) -> list[tuple[ObjectId, Any]]:
        """The other arrays, tensors and buffers with ids that lie in the memory of one."""
        span = span_of(obj) if self._regions else None
        if span is None:
            return []
        found = [(identity, self.get(identity)) for identity in self._regions.near(span)]
        # Its data may have been replaced since.
        return [(identity, other) for identity, other in found if other is not obj and meet(span_of(other), span)]

    def _died(self, identity: ObjectId, key: int, reference: weakref.ref[Any]) -> None:
        if self._objects.pop(identity, None) is not None:
            self.released.append(identity)
        if self.ids.get(key) == identity:
            del self.ids[key]
        if key in self.owned and self.owned[key] == identity:
            del self.owned[key]
        self.contents.pop(identity, None)
        self._regions.remove(identity)

    def drop(self, identities: Iterable[ObjectId]) -> None:
        """Forget objects, on the other side's word or because they were replaced."""
        for identity in identities:
            found = self.get(identity)
            self._objects.pop(identity, None)
            self._strong.pop(identity, None)
            self.contents.pop(identity, None)
            self._regions.remove(identity)
            if found is not NOT_THERE and self.ids.get(id(found)) == identity:
                del self.ids[id(found)]
                self.owned.pop(id(found), None)

    def hide(self, identity: ObjectId) -> None:
        """Let an object be pickled as a new one from now on; its id still finds it."""
        found = self.get(identity)
        if self.ids.get(id(found)) == identity:
            del self.ids[id(found)]
            self.owned.pop(id(found), None)

    def sweep(self) -> None:
        """Release objects that cannot be held weakly (lists, dicts) and that only this table still holds."""
        # Parents were numbered before their parts, so one pass frees whole trees.
        for identity in list(self._strong):
            obj = self._strong[identity]
            if sys.getrefcount(obj) <= _BARE_REFCOUNT + 1:  # it is in two tables
                self.drop((identity,))
                self.released.append(identity)
            del obj
        if len(self._strong) > self._look_for_cycles_at:
            self._release_cycles()
            # Only when there are twice as many: so it costs little for each object that is ever made.
            self._look_for_cycles_at = max(_FEWEST_FOR_CYCLES, 2 * len(self._strong))

    def _release_cycles(self) -> None:
        """Release objects that cannot be held weakly and that only refer to each other."""
        unheld = held_by_none(self._strong, tables=2)
        self.drop(unheld)
        self.released.extend(unheld)

    def take_released(self) -> tuple[ObjectId, ...]:
        """The ids released since the last call."""
        taken: list[ObjectId] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self.released.popleft())
        return tuple(taken)

    def items(self) -> list[tuple[ObjectId, Any]]:
        """Every id and its object, as they are now."""
        pairs = [(identity, self.get(identity)) for identity in list(self._objects)]
        return [(identity, obj) for identity, obj in pairs if obj is not NOT_THERE]
