"""Surveys of an engine's values, which pickle them to find their digests and contents before any value is sent.

The digest of data contains the id of a device object, which is the same on every replica. A dict that holds a loss is
therefore equal on all replicas, although the losses differ. An object that stays is digested with its content.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import types
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from distnb.engine.namespace.engine_objects import EngineObjects
from distnb.errors import CannotTravelError
from distnb.objects.code.definitions import is_code
from distnb.objects.digesting import Digester, Digests, content
from distnb.objects.memory.blocks import dense_tensor
from distnb.objects.merging import ATOMS
from distnb.wire.messages import ObjectId

__all__ = ["MOST_DEVICE_OBJECTS", "ContentSurveyor", "DataSurveyor"]

MOST_DEVICE_OBJECTS = 1000
"""The most device objects of a container that is sent to the notebook. A container with more stays as a whole."""

_MOST_PARTS = 50_000  # the most parts of a value whose instances are searched for device objects


class _Surveyor(Digester):
    """A pickler for digests that notes the notebook's objects, and objects with ids, within a value."""

    def __init__(self, objects: EngineObjects, digests: Digests) -> None:
        self._objects = objects
        self._holds: dict[str | ObjectId, None] = {}
        super().__init__(objects.tracker.side, digests)

    def holds(self) -> tuple[str | ObjectId, ...]:
        """Return the names and ids of the notebook's and the engine's objects in the most recently digested value."""
        tracker, objects = self._objects.tracker, self._objects
        found = dict(self._holds)
        if tracker.names or objects.owns_containers:
            within = self.memo.copy().keys()
            found |= dict.fromkeys((*tracker.names_within(within), *objects.containers_within(within)))
        return tuple(found)

    def array(self, array: Any) -> Any:
        self._note_memory(array.__array_interface__["data"][0], array.nbytes)
        return super().array(array)

    def alone(self, keys: list[int]) -> set[int]:
        return super().alone(keys).union(self._objects.tracker.without_numbers(keys))

    def tensor(self, tensor: Any) -> Any:
        # A tensor with a number of its own is found among the pickled objects.
        if self._objects.tracker.number_of(tensor) is None and dense_tensor(tensor):
            self._note_memory(tensor.data_ptr(), 0)
        return super().tensor(tensor)

    def _note_memory(self, start: int, nbytes: int) -> None:
        tracker = self._objects.tracker
        number = tracker.number_of_memory(start, 1)
        if number is not None:
            self._holds[tracker.name_of(number)] = None
            self.digested.nbytes -= nbytes  # the notebook has these bytes

    def reference(self, obj: Any) -> Any:
        found = super().reference(obj)
        if found is not None and (identity := self._objects.id_of(obj)) is not None:
            self._holds[identity] = None
        return found


class ContentSurveyor(_Surveyor):
    """A surveyor of an object that stays.

    Args:
        value: The object.
        tensors: True if the elements of its tensors are digested; otherwise only their shape and dtype are.
    """

    def __init__(self, objects: EngineObjects, value: Any, *, tensors: bool) -> None:
        self._root = value
        self._tensors = tensors
        super().__init__(objects, Digests())

    def digest_of_root(self) -> bytes | None:
        """Return the object's digest, or None if it cannot be pickled."""
        with contextlib.suppress(Exception):  # many objects cannot be pickled, and have no digest
            return self.digest_of([self._root])
        return None

    def holds(self) -> tuple[str | ObjectId, ...]:
        own = self._objects.id_of(self._root)
        return tuple(each for each in super().holds() if each != own)

    def reference(self, obj: Any) -> Any:
        return None if obj is self._root else super().reference(obj)

    def alone(self, keys: list[int]) -> set[int]:
        return set(keys)

    def tensor(self, tensor: Any) -> Any:
        if self._tensors:
            return super().tensor(tensor)
        if dense_tensor(tensor):
            self._note_memory(tensor.data_ptr(), 0)
        return content, (f"{tensor.dtype}{tuple(tensor.shape)}",)


class DataSurveyor(_Surveyor):
    """A surveyor of data, which gives ids to the device objects within.

    An instance that holds a device object counts as a device object, because its methods need the device. A container
    does not.

    Args:
        serial: The program's serial number, from which new ids are made.
        most_nbytes: The size in bytes above which data stays.

    Attributes:
        made: The objects that got ids, in order, by the name of the value in which they were found.
        reasons: The reason why an object that is not a device object stays, by its id.
        errors: The error that digesting a value raised, by name.
        overfull: The names of values with more device objects than one value that is sent may have.
        instances: The number of objects in each value that are pickled by their classes' own methods, by name.
        nbytes: The bytes of each value that the notebook lacks, by name.
        held: The notebook's objects in each value, as far as they are known yet, by name.
    """

    def __init__(self, objects: EngineObjects, serial: int, most_nbytes: int) -> None:
        self._serial = serial
        self._most_nbytes = most_nbytes
        self._name = ""
        self.instances: dict[str, int] = {}
        self.made: dict[str, dict[ObjectId, Any]] = {}
        self.reasons: dict[ObjectId, str] = {}
        self.errors: dict[str, Exception] = {}
        self.overfull: set[str] = set()
        self.nbytes: dict[str, int] = {}
        self.held: dict[str, tuple[str | ObjectId, ...]] = {}
        super().__init__(objects, Digests())

    def begin(self, name: str, value: Any) -> None:
        super().begin(name, value)
        self._name = name

    def digest_of(self, value: Any) -> bytes:
        name = self._name
        try:
            digest = self._digest(value)
            if self.instances[name] and (self.made.get(name) or any(type(each) is tuple for each in self._holds)):
                holders = self._holders(value)
                if holders:
                    self.drop(name)
                    self._objects.references.holders |= holders
                    digest = self._digest(value)
        except Exception as error:
            self.errors[name] = error
            raise
        self.nbytes[name] = self.digested.nbytes
        # Packing finds the tracked objects of a sent value, so only a value that stays needs the full search.
        self.held[name] = self.holds() if self.digested.nbytes > self._most_nbytes else tuple(self._holds)
        return digest

    def _digest(self, value: Any) -> bytes:
        return super().digest_of(value)

    def arrange(self, sets: Iterable[Any]) -> None:
        self.drop(self._name)  # the ids of device objects depend on their order
        super().arrange(sets)

    def _digest_of(self, value: Any) -> bytes:
        self.instances[self._name] = 0
        self._holds.clear()
        return super()._digest_of(value)

    def drop(self, name: str) -> None:
        """Release the ids of the device objects within a value that is not sent."""
        self._objects.release(self.made.pop(name, ()))

    def reference(self, obj: Any) -> Any:
        if self._objects.id_of(obj) is None and self._objects.references.stays(obj):
            return self._own(obj)
        return super().reference(obj)

    def other(self, obj: Any) -> Any:
        self.instances[self._name] += 1
        return super().other(obj)

    def refused(self, obj: Any, error: Exception | None) -> Any:
        found = self._own(obj)
        identity = self._objects.id_of(obj)
        assert identity is not None
        why = f"{type(error).__name__}: {error}" if error is not None else "it belongs to its process"
        self.reasons[identity] = f"a {type(obj).__qualname__} cannot be pickled ({why})"
        return found

    def _own(self, obj: Any) -> Any:
        made = self.made.setdefault(self._name, {})
        if len(made) == MOST_DEVICE_OBJECTS:
            self.overfull.add(self._name)
            raise CannotTravelError(f"it holds more than {MOST_DEVICE_OBJECTS:,} objects that stay on the replicas")
        identity = self._objects.own((self._serial, f"{self._name}*{len(made)}"), obj)
        made[identity] = obj
        return content, (identity,)

    # -- instances that hold device objects ----------------------------------------------------------------------------

    def _holders(self, value: Any) -> dict[int, Any]:
        """Return the instances in a value that hold a device object, by their `id()`."""
        # The objects form a graph: a list `batch` holds an instance `Sample`, which holds a tensor of the device. The
        # first loop finds the tensor, and notes the holder of each object. The second one follows the holders from the
        # tensor back to the root, and finds `Sample` and `batch`. `batch` is a container, so `Sample` is returned.
        holders: dict[int, list[int]] = {}  # the holders of each object, both as `id()`
        seen: dict[int, Any] = {id(value): value}
        found: list[int] = []
        queue = [value]
        for obj in queue:  # the loop appends to it
            if self._objects.id_of(obj) is not None or self._objects.references.stays(obj):
                found.append(id(obj))
                continue
            for part in self._parts(obj, is_root=obj is value):
                if type(part) in ATOMS:
                    continue
                holders.setdefault(id(part), []).append(id(obj))
                if id(part) not in seen:
                    seen[id(part)] = part
                    queue.append(part)
            if len(queue) > _MOST_PARTS:
                raise CannotTravelError(f"it holds device objects, and more than {_MOST_PARTS:,} parts")
        above: dict[int, Any] = {}
        for key in found:  # the loop appends to it
            for holder in holders.get(key, ()):
                if holder not in above and self._objects.tracker.number_of(seen[holder]) is None:
                    above[holder] = seen[holder]
                    found.append(holder)
        return {key: obj for key, obj in above.items() if not (is_container(type(obj)) or _is_open(obj))}

    def _parts(self, obj: Any, *, is_root: bool) -> Iterable[Any]:
        """Return the objects that are pickled for an object: the items of a container, the state of an instance."""
        kind = type(obj)
        if kind is dict:
            return chain(obj, obj.values())
        if kind in (list, tuple, set, frozenset):
            return tuple(obj)
        if issubclass(kind, type | types.CodeType) and not is_root:
            return ()  # a class is digested on its own
        try:
            reduced: Any = self.tensor(obj) if kind is torch.Tensor else self.reducer_override(obj)
            if reduced is NotImplemented:
                reducer: Any = self.dispatch_table.get(kind)
                reduced = reducer(obj) if reducer is not None else obj.__reduce_ex__(5)
            if type(reduced) is not tuple:
                return ()
            return [part for each in reduced for part in (tuple(each) if isinstance(each, Iterator) else (each,))]
        except Exception:  # whatever a user's class raises  # noqa: BLE001
            return ()


def _is_open(obj: Any) -> bool:
    """Return whether an object is code or a part of code, which may hold handles in the notebook like a container."""
    return isinstance(obj, types.CellType | types.CodeType) or is_code(obj)


_CONTAINERS: tuple[type, ...] = (dict, list, tuple, set, frozenset, collections.deque)
_PLAIN_CONTAINERS = frozenset({*_CONTAINERS, collections.OrderedDict, collections.defaultdict, collections.Counter})


def is_container(kind: type) -> bool:
    """Return whether a class is one of Python's containers, or a subclass that is unpickled without code of its own.

    Such a container may hold handles in the notebook. A dataclass or a class with a constructor may not.
    """
    if kind in _PLAIN_CONTAINERS:
        return True
    base = next((each for each in _CONTAINERS if issubclass(kind, each)), None)
    if base is None or dataclasses.is_dataclass(kind):
        return False
    if hasattr(kind, "_fields") and base is tuple:
        makers = [each for each in kind.__mro__ if "__new__" in vars(each)]
        return vars(makers[0]).get("_fields") is not None and makers[0].__bases__ == (tuple,)
    known = next(each for each in kind.__mro__ if each in _PLAIN_CONTAINERS)
    methods = ("__new__", "__reduce__", "__reduce_ex__", "__setstate__", "__setitem__", "append", "extend")
    return all(getattr(kind, name, None) == getattr(known, name, None) for name in methods)
