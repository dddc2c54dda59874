"""The merge, which updates existing objects with the content of the objects that arrived for them.

Numbers identify the existing object that is the *counterpart* of an arrived object. Places cannot: after
`records.sort()` the same place holds another record. An arrived object with a counterpart updates the counterpart,
which keeps its identity. An arrived object without a counterpart is new, and the objects in it are merged.

An example. The notebook has `cfg = {"lr": 0.1, "layers": [64]}`. A replica sets `cfg["lr"] = 0.2` and appends to
`cfg["layers"]`. A dict with the new content arrives. Pairs of numbers identify `cfg` as the counterpart of this dict,
and the old list as the counterpart of the list in it::

    arrived                              here, before                     here, after
    {"lr": 0.2, "layers": <new list>}    cfg = {"lr": 0.1,                the same dict: {"lr": 0.2,
                                                "layers": <old list>}                     "layers": <old list>}
    <new list> [64, 32]                  <old list> [64]                  the same list: [64, 32]

`merged(arrived dict)` looks up the counterpart `cfg`, then merges each value. 0.2 is an atom and needs no merge. The
new list is merged into the old list, and `cfg` gets the old list. Every other reference to `cfg` or `layers` in the
notebook sees the change. `_done` maps each arrived object to its result before its items are merged, so the recursion
ends for an object that contains itself.
"""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import copyreg
import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle

from distnb.compat import matplotlib_internals
from distnb.objects import keras_archives
from distnb.objects.code import definitions
from distnb.objects.constructors import ByOpener
from distnb.objects.memory.blocks import MemoryBlock, TensorBatch, is_stored
from distnb.objects.memory.mapped_files import is_same_window
from distnb.objects.placeholder import Placeholder

__all__ = ["ATOMS", "Merge"]

ATOMS: frozenset[type] = frozenset(
    {
        bool,
        bytes,
        complex,
        float,
        int,
        range,
        str,
        type(Ellipsis),
        type(None),
        type(NotImplemented),
        types.CodeType,
        types.ModuleType,
        ByOpener,
        MemoryBlock,
        TensorBatch,
    }
)
"""Types of objects that contain no object that could have a counterpart."""

_NOTHING: Any = object()


class Merge:
    """A merge of arrived objects into existing objects.

    Args:
        counterparts: The existing object by the `id()` of the object that arrived for it.
        substitutes: Objects that replace arrived objects, by the `id()` of the arrived object.
        versions: Arrived objects that are merged instead of other arrived objects, by the `id()` of the other ones.
    """

    def __init__(
        self,
        counterparts: Mapping[int, Any],
        substitutes: Mapping[int, Any] | None = None,
        versions: Mapping[int, Any] | None = None,
    ) -> None:
        self._counterparts = counterparts
        self._versions = versions or {}
        self._done: dict[int, Any] = dict(substitutes or {})
        self._kept: list[Any] = []  # keeps arrived objects alive, since an `id()` is reused after an object's end

    def merged(self, new: Any) -> Any:
        """Return the object that represents an arrived object here from now on."""
        kind, key = type(new), id(new)
        if kind in ATOMS:
            return new
        if key in self._done:
            return self._done[key]
        version = self._versions.get(key, new)
        if version is not new:
            return self.merged(version)
        self._kept.append(new)
        old = self._counterparts.get(key, _NOTHING)
        if kind is Placeholder:
            result = new if old is _NOTHING else old  # the object could not be sent; the existing one is unchanged
        elif isinstance(new, tuple | frozenset):
            result = self._frozen(new, old)
        else:
            if type(old) is not kind and not _arrives_as(type(old), kind):
                old = _NOTHING
            rule = _rule_for(kind)
            if rule is None:
                result = self._reduced(new, old)
            else:
                target = new if old is _NOTHING else old
                self._done[key] = target  # before its items are merged, because it may contain itself
                result = rule(self, new, target)
        self._done[key] = result
        return result

    def final(self, new: Any) -> Any:
        """Return the object into which an arrived object was merged, or the arrived object itself."""
        return self._done.get(id(new), new)

    def has_merged(self, new: Any) -> bool:
        """Return whether an arrived object was reached and merged."""
        return id(new) in self._done

    def all(self, items: Iterable[Any]) -> list[Any]:
        """Return the merged objects of several arrived ones."""
        return [item if type(item) in ATOMS else self.merged(item) for item in items]

    def classes(self, held: Iterable[tuple[type, dict[str, Any]]], made: Iterable[type]) -> None:
        """Update classes: known ones with the state that arrived, new ones with their own state, merged."""
        for cls, state in [*held, *((each, definitions.class_state(each)) for each in made)]:
            old = definitions.class_state(cls)
            for name in old.keys() - state.keys():
                if not name.startswith("__"):
                    with contextlib.suppress(Exception):  # the user's metaclass may raise any error
                        delattr(cls, name)
            for name, value in state.items():
                merged = self.merged(value)
                if name == "_abc_impl":
                    for each in merged:
                        cls.register(each)  # type: ignore[attr-defined]
                elif (
                    name not in old or merged is not old[name]
                ):  # replace even an equal string, because the digest depends on the strings' identities
                    with contextlib.suppress(Exception):  # Python or the user's metaclass may refuse the assignment
                        setattr(cls, name, merged)

    # -- by kind -------------------------------------------------------------------------------------------------------

    def _frozen(self, new: Any, old: Any) -> Any:
        items = self.all(new)
        if type(old) is type(new) and isinstance(new, tuple) and _same(items, list(old)):
            return old
        if all(a is b for a, b in zip(items, new, strict=True)):
            return new
        if type(new) in (tuple, frozenset):
            return type(new)(items)
        if isinstance(new, frozenset):
            return new
        made = tuple.__new__(type(new), items)
        if getattr(new, "__dict__", None):
            made.__dict__.update(new.__dict__)
        return made

    def _items(self, new: Any, target: Any) -> Any:
        """Merge a container of items by the methods of its builtin class, not by those of a user's subclass."""
        kind, fill = next(each for each in _CONTAINERS if isinstance(new, each[0]))
        items = self.all(new)
        if target is not new or not _same(items, list(target)):
            kind.clear(target)
            fill(target, items)
        return target if type(new) is kind else self._attributes(new, target)

    def _dict(self, new: Any, target: Any) -> Any:
        items = [(self.merged(key), self.merged(value)) for key, value in dict.items(new)]
        unchanged = target is new and all(a[1] is b for a, b in zip(items, dict.values(new), strict=True))
        if not unchanged or any(a[0] is not b for a, b in zip(items, dict.keys(new), strict=True)):
            base: Any = collections.OrderedDict if isinstance(new, collections.OrderedDict) else dict
            base.clear(target)
            for key, value in items:  # not by the method of the user's class, which may count or check
                base.__setitem__(target, key, value)
        if isinstance(new, collections.defaultdict):
            target.default_factory = self.merged(new.default_factory)
        if type(new) in (dict, collections.OrderedDict, collections.defaultdict):
            return target
        return self._attributes(new, target)

    def _bytes(self, new: Any, target: Any) -> Any:
        if isinstance(new, array.array) and new.typecode != target.typecode:
            return new
        if target is not new:
            target[:] = new
        return target

    def _array(self, new: Any, target: Any) -> Any:
        if new.dtype.hasobject:
            flat = new.reshape(-1)
            for place in range(flat.size):
                flat[place] = self.merged(flat[place])
        if target is new or (new.base is not None and is_same_window(new, target)):
            return target
        if new.shape != target.shape or new.dtype != target.dtype:
            return new
        if new.__array_interface__["data"] == target.__array_interface__["data"] and new.strides == target.strides:
            return target  # both are windows on the same memory, which is already updated
        if not target.flags.writeable:
            return target if bool((new == target).all()) else new
        target[...] = new
        return target

    def _tensor(self, new: Any, target: Any) -> Any:
        if target is new:
            return new
        try:
            _replace_content(target, new)
        except (RuntimeError, TypeError, NotImplementedError):  # torch cannot give the old tensor this content
            return new
        if target.is_leaf:
            if target.requires_grad != new.requires_grad:
                target.requires_grad_(new.requires_grad)
            target.grad = self.merged(new.grad)
        attributes = {name: self.merged(value) for name, value in vars(new).items()}
        vars(target).clear()
        vars(target).update(attributes)
        return target

    def _storage(self, new: Any, target: Any) -> Any:
        from distnb.compat.torch_internals import untyped_storage

        here, arrived = untyped_storage(target), untyped_storage(new)
        if target is not new and here.data_ptr() != arrived.data_ptr():
            if here.nbytes() != arrived.nbytes():
                here.resize_(arrived.nbytes())
            here.copy_(arrived)
        return target

    def _cell(self, new: Any, target: Any) -> Any:
        content = self.merged(definitions.content_of(new))
        if content is not definitions.EMPTY:
            target.cell_contents = content
        return target

    def _function(self, new: Any, target: Any) -> Any:
        if target is not new and target.__code__ != new.__code__:
            target.__code__ = new.__code__
        state = {name: self.merged(value) for name, value in definitions.function_state(new).items()}
        attributes = state.pop("__dict__")
        for name, value in state.items():
            if getattr(target, name) is not value:
                setattr(target, name, value)
        if attributes is not target.__dict__:
            target.__dict__.clear()
            target.__dict__.update(attributes)
        for cell, own in zip(new.__closure__ or (), target.__closure__ or (), strict=False):
            content = self.merged(definitions.content_of(cell))
            if content is not definitions.EMPTY:
                own.cell_contents = content
        return target

    def _cache(self, new: Any, target: Any) -> Any:
        function = self.merged(new.__wrapped__)
        return target if function is target.__wrapped__ else definitions.make_cache(function, new.cache_parameters())

    def _exception(self, new: Any, target: Any) -> Any:
        target.args = self.merged(new.args)
        if (cause := self.merged(new.__cause__)) is not target.__cause__:
            target.__cause__ = cause
        return self._attributes(new, target)

    def _transform(self, new: Any, target: Any) -> Any:
        state = {name: self.merged(value) for name, value in vars(new).items() if name != "_parents"}
        matplotlib_internals.update_transform(target, state)
        return target

    def _attributes(self, new: Any, target: Any) -> Any:
        """Merge the attributes of an instance, in its dict and its slots."""
        attributes = getattr(new, "__dict__", None)
        if isinstance(attributes, dict):
            kept = attributes
            getstate: Any = type(new).__getstate__
            if getstate is not object.__getstate__:
                own_state: Any = None
                with contextlib.suppress(Exception):  # the user's method may raise any error
                    own_state = new.__getstate__()
                if isinstance(own_state, dict):  # only the attributes in it were sent
                    kept = {name: attributes[name] for name in own_state if name in attributes}
            merged = {name: self.merged(value) for name, value in kept.items()}
            if kept is attributes and list(target.__dict__) != list(merged):
                target.__dict__.clear()  # the order of attributes counts, too
            target.__dict__.update(merged)
        for name in copyreg._slotnames(type(new)):  # type: ignore[attr-defined]
            if hasattr(new, name):
                object.__setattr__(target, name, self.merged(getattr(new, name)))
            elif hasattr(target, name):
                object.__delattr__(target, name)
        return target

    def _reduced(self, new: Any, old: Any) -> Any:
        """Merge an object of any other class: by its attributes if they are its whole state, else by its reduction."""
        key, kind = id(new), type(new)
        reducer = copyreg.dispatch_table.get(kind) or cloudpickle.Pickler.dispatch_table.get(kind)
        try:
            reduced: Any = reducer(new) if reducer is not None else new.__reduce_ex__(4)
        except Exception:  # the user's method may raise any error  # noqa: BLE001
            return new if old is _NOTHING else old
        if isinstance(reduced, str):
            return new
        make, args, state = (*reduced, None)[:3]
        plain = getattr(make, "__name__", "") in ("__newobj__", "_reconstructor")
        if plain and not hasattr(kind, "__setstate__"):
            target = new if old is _NOTHING else old
            self._done[key] = target
            return self._attributes(new, target)
        by_state = state is not None and hasattr(kind, "__setstate__")
        if by_state:
            self._done[key] = new if old is _NOTHING else old
        merged_args = self.all(args)  # an iterator's arguments hold a part of its state
        if by_state and (old is not _NOTHING or _same(merged_args, list(args))):
            target = self._done[key]
            merged = self.merged(state)
            if target is old or not _same([merged], [state]):
                target.__setstate__(merged)
            return target
        all_in_args = all(each is None for each in reduced[2:])
        if old is not _NOTHING and all_in_args:
            before = reducer(old) if reducer is not None else old.__reduce_ex__(4)
            if before[0] == make and _same(merged_args, list(before[1])):
                return old
        if all_in_args and _same(merged_args, list(args)):
            return new
        rest = [self.merged(state), *reduced[3:]] if len(reduced) > 2 else []
        return copy._reconstruct(new, None, make, tuple(merged_args), *rest[:3])  # type: ignore[attr-defined]


def _same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two lists hold the same objects, or equal atoms, in the same order."""
    return len(one) == len(other) and all(
        a is b or (type(a) in ATOMS and type(a) is type(b) and bool(a == b)) for a, b in zip(one, other, strict=True)
    )


_Rule = Callable[[Merge, Any, Any], Any]

_CONTAINERS: tuple[tuple[Any, Callable[[Any, Any], object]], ...] = (
    (list, list.extend),
    (set, set.update),
    (collections.deque, collections.deque.extend),
)

_RULES: tuple[tuple[type, _Rule], ...] = (
    (dict, Merge._dict),
    *((kind, Merge._items) for kind, _ in _CONTAINERS),
    (bytearray, Merge._bytes),
    (array.array, Merge._bytes),
    (types.CellType, Merge._cell),
    (types.FunctionType, Merge._function),
    (functools._lru_cache_wrapper, Merge._cache),
    # Classes are identified by ids. Their attributes are merged at the end.
    (type, lambda merge, new, target: new),
    *((kind, lambda merge, new, target: new) for kind in definitions.NAMED_TYPES),
    (BaseException, Merge._exception),
    (types.SimpleNamespace, Merge._attributes),
    (functools.cached_property, Merge._attributes),
)


def _arrives_as(kind: type, arrived: type) -> bool:
    """Return whether objects of one class arrive as objects of another: a copy-on-write memmap arrives as an array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and kind is numpy.memmap and arrived is numpy.ndarray


def _replace_content(target: Any, new: Any) -> None:
    """Give a tensor the content, shape and dtype of another.

    Raises:
        RuntimeError, TypeError, NotImplementedError: torch does not support the change.
    """
    import torch

    if new.layout is not torch.strided or target.layout is not torch.strided or new.is_nested:
        if target.dtype != new.dtype:
            raise TypeError(f"{target.dtype} is not {new.dtype}")
        with torch.no_grad():
            target.copy_(new)
        return
    windows = all(not each.is_cpu or is_stored(each) for each in (target, new))
    if not windows or new.shape != target.shape or new.dtype != target.dtype:
        target.data = new.data  # the tensor was resized, or is another window
    elif new.data_ptr() != target.data_ptr() or new.stride() != target.stride():
        target.data.copy_(new.data)


def _rule_for(kind: type) -> _Rule | None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and hasattr(torch, "UntypedStorage"):
        if issubclass(kind, torch.Tensor):
            return Merge._tensor
        if kind in (torch.UntypedStorage, torch.storage.TypedStorage):
            return Merge._storage
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return Merge._array
    if matplotlib_internals.is_transform(kind):
        return Merge._transform
    if keras_archives.is_symbolic(kind):
        return lambda merge, new, target: target  # never changed, and a model's graph begins at the existing one
    return next((rule for base, rule in _RULES if issubclass(kind, base)), None)
