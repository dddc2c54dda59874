"""Handles: the notebook's references to objects that live on the engines.

A handle shows the object's type and place, forwards attributes and calls, and fetches a value only on request. In a
program that receives or captures it, it represents each replica's own component.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn, cast

from distnb.errors import DistributedValueError, StructureError
from distnb.notebook.handles import library_guards
from distnb.notebook.handles.computing import OPERATORS, compute
from distnb.notebook.handles.state import RemoteState, state_of_handle
from distnb.notebook.handles.summaries import as_text
from distnb.values import DistributedValues, Mirrored, PerReplica
from distnb.values.distributed import as_array
from distnb.wire.exchange import follow

__all__ = [
    "HANDLES",
    "RemoteMethod",
    "RemoteMirrored",
    "RemotePerReplica",
    "RemoteState",
    "change_kind",
    "make_handle",
    "state_of_handle",
]

_OWN = frozenset({"_components", "_num_replicas", "_global_batch_size", "_kinds"})
_PROTOCOLS = ("_repr_", "_ipython_", "_typ")  # IPython and pandas recognise classes by these


def _apply(handle: DistributedValues, function: Callable[..., Any], *others: Any) -> Any:
    """Call a function with the object on every replica."""
    return state_of_handle(handle).operations.run(handle, "apply", (function, handle, *others))


def _applies(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda handle, *others: _apply(handle, function, *others)


def _reads(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda handle: convert(handle._read())


class _Handle(DistributedValues):
    """The base of both kinds of handles. It adds no slots, so that a handle can change its kind in place."""

    __slots__ = ()

    # -- showing -----------------------------------------------------------------------------------------------------

    @property
    def values(self) -> tuple[Any, ...]:
        state = state_of_handle(self)
        found = state.operations.fetch_components(self, range(self._num_replicas))
        return Components(found.values()).of(self)

    @property
    def replica_ids(self) -> tuple[int, ...]:
        state = state_of_handle(self)
        return tuple(sorted({*state.facts, *state.local}))

    def component(self, replica_id: int) -> Any:
        state = state_of_handle(self)
        if not isinstance(replica_id, int) or not 0 <= replica_id < self._num_replicas:
            raise DistributedValueError(
                f"A {type(self).__name__} of {self._num_replicas} replica(s) has no component "
                f"{replica_id}: they are numbered from 0."
            )
        return state.operations.fetch_components(self, (replica_id,))[replica_id]

    def __repr__(self) -> str:
        state = state_of_handle(self)
        fresh = state.operations.refresh(self)
        return as_text(state, self.num_replicas, mirrored=isinstance(self, Mirrored), fresh=fresh)

    def __dir__(self) -> list[str]:
        state = state_of_handle(self)
        names = {"values", "component", "num_replicas", "replica_ids", "numpy", "item"}
        for fact in state.facts.values():
            names.update(fact.summary.attributes)
            names.update(name for name in dir(_class_named(fact.summary.type)) if not name.startswith("__"))
        return sorted(names)

    # -- forwarding ------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name.startswith(_PROTOCOLS):
            raise AttributeError(name)
        state = state_of_handle(self)
        return state.operations.attribute(self, (("a", name),))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
            return
        _apply(self, setattr, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return state_of_handle(self).operations.run(self, "call", args, kwargs)

    __delattr__ = _applies(delattr)
    __getitem__ = _applies(operator.getitem)
    __setitem__ = _applies(operator.setitem)
    __delitem__ = _applies(operator.delitem)
    __copy__ = _applies(copy.copy)

    def __hash__(self) -> int:
        kinds = _hashing(self)
        if kinds <= {"identity"}:
            return object.__hash__(self)
        if kinds == {"value"} and isinstance(self, Mirrored):
            return hash(self._read())
        self._refuse("cannot be hashed" if "none" in kinds else "has no hash of its own")

    def _on_replicas(self, function: Callable[..., Any], *others: Any) -> Any:
        return _apply(self, function, *others)

    def _refuse(self, wish: str) -> NoReturn:
        state = state_of_handle(self)
        what = f"{state.label[0].upper()}{state.label[1:]} (a {state.type_name} on the replicas)"
        if state.why:
            raise DistributedValueError(
                f"{what} {wish} in the notebook: {state.why}. Work with it in a distributed cell, or in a function "
                "that strategy.run calls."
            )
        if isinstance(self, Mirrored):
            name = state.label.strip("`")
            raise DistributedValueError(
                f"{what} {wish}. Fetch it: strategy.local_results({name if name.isidentifier() else 'value'})[0]."
            )
        super()._refuse(wish)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise DistributedValueError(
            f"A handle of a {state_of_handle(self).type_name} cannot be pickled: the object lives on the engines. "
            "Fetch it first: strategy.local_results(value)."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        return _apply(self, copy.deepcopy)

    def __iter__(self) -> Iterator[Any]:
        if _is_iterator(self):
            return self
        if isinstance(self, Mirrored):
            _check_not_scalar(self, "iterated over")
            if _has_labels(self) and not hasattr(_class_named(state_of_handle(self).type_name), "columns"):
                self._refuse("cannot be iterated over, which would lose its labels")
            items = state_of_handle(self).operations.run(self, "list")
            return iter(items) if isinstance(items, list) else self._refuse("is too large to be iterated over")
        if _is_dataset(self):
            return cast("Iterator[Any]", _apply(self, iter))
        self._refuse("cannot be iterated")

    def __next__(self) -> Any:
        if not _is_iterator(self):
            raise TypeError(f"A handle of a {state_of_handle(self).type_name} is not an iterator: iter() makes one.")
        try:
            items = state_of_handle(self).operations.run(self, "next")
        except StructureError:
            raise StructureError(
                f"This {state_of_handle(self).type_name} has ended on some replicas but not on others. Iterate over it "
                "in a distributed cell, or in a function that strategy.run calls, where each replica reaches its own "
                "end."
            ) from None
        if not items:
            raise StopIteration
        return items[0]


class RemotePerReplica(_Handle, PerReplica):
    """A handle of objects that differ, or may differ, from replica to replica."""

    __slots__ = ()

    def __len__(self) -> int:
        return int(_apply(self, len)) if _is_dataset(self) else self._refuse("has no length")


class RemoteMirrored(_Handle, Mirrored):
    """A handle of objects that are equal on every replica."""

    __slots__ = ()

    def numpy(self, *, force: bool = True) -> Any:
        """Fetch the array from the first replica, which is always possible: `force` has torch's name and no effect."""
        return as_array(self._read())

    to_numpy = numpy  # for Matplotlib and others, which would otherwise iterate over thousands of handles

    def _read(self) -> Any:
        return state_of_handle(self).operations.read(self)

    def item(self) -> Any:
        """Fetch the number from the first replica."""
        return self._read().item()

    __float__ = _reads(float)
    __int__ = _reads(int)
    __index__ = _reads(operator.index)

    def __eq__(self, other: object) -> Any:
        # An object that is compared by its identity has one handle.
        by_identity = _hashing(self) <= {"identity"} and not _is_array(self)
        return self is other if by_identity else compute(operator.eq, (self, other))

    def __ne__(self, other: object) -> Any:
        by_identity = _hashing(self) <= {"identity"} and not _is_array(self)
        return self is not other if by_identity else compute(operator.ne, (self, other))

    __hash__ = _Handle.__hash__

    def __bool__(self) -> bool:
        return bool(self._read() if _is_array(self) else _apply(self, bool))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if _has_labels(self) or issubclass(_class_named(state_of_handle(self).type_name), Mapping | Set):
            self._refuse("cannot become an array, which would lose its keys or labels")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __len__(self) -> int:
        _check_not_scalar(self, "measured by len()")
        return int(_apply(self, len))

    def __contains__(self, value: Any) -> bool:
        return bool(_apply(self, operator.contains, value))

    def __format__(self, spec: str) -> str:
        return format(self._read(), spec) if spec else repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a copy of the object, which can be opened where there are no engines."""
        value = self._read()
        if type(value) is dict:
            # pickle refuses a dict, since the handle has another class. torch.load(weights_only=True) allows this type.
            return OrderedDict, (), None, None, iter(value.items())
        if type(value) is list:
            return type(value), (), None, iter(value)
        if type(value) in (str, bytes):
            return type(value), (value,)
        reduced = value.__reduce_ex__(protocol)
        # pickle compares the class that `__newobj__` creates with the handle's. Protocol 1 uses another function.
        return value.__reduce_ex__(1) if getattr(reduced[0], "__name__", "") == "__newobj__" else reduced

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs)


for _name, _method in OPERATORS.items():
    setattr(RemoteMirrored, _name, _method)


class RemoteMapping(RemoteMirrored):
    """A handle of equal mappings, which functions accept as a `Mapping`."""

    __slots__ = ()


Mapping.register(RemoteMapping)


class RemoteSequence(RemoteMirrored):
    """A handle of equal sequences, which `match` and functions accept as a `Sequence`."""

    __slots__ = ()


Sequence.register(RemoteSequence)

HANDLES: tuple[type[DistributedValues], ...] = (RemotePerReplica, RemoteMirrored, RemoteMapping, RemoteSequence)


class Components(tuple[Any, ...]):
    """The value of `handle.values`: the components. Called, as in `mapping.values()`, it calls the object's method."""

    _handle: Any = None

    def of(self, handle: Any) -> Components:
        """Bind the components to their handle."""
        self._handle = handle
        return self

    def __call__(self) -> Any:
        """Call the object's own method of that name."""
        return state_of_handle(self._handle).operations.run(self._handle, "call", path=(("a", "values"),))

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


def _is_dataset(handle: DistributedValues) -> bool:
    """Return whether the object is a distributed dataset of a cell, which all replicas read together."""
    return state_of_handle(handle).type_name == "distnb.input.dataset.DistributedDataset"


def _hashing(handle: DistributedValues) -> set[str]:
    """Return the ways in which the components are hashed: by "identity", by "value", or not at all ("none")."""
    state = state_of_handle(handle)
    local = {"value"} if state.local else set()
    return local | {str(fact.summary.hashing) for fact in state.facts.values()}


def _is_array(handle: DistributedValues) -> bool:
    """Return whether the object is a tensor, an array or a variable, which is compared element by element."""
    return any(fact.summary.dtype for fact in state_of_handle(handle).facts.values())


def _has_labels(handle: DistributedValues) -> bool:
    """Return whether the object belongs to pandas, and so has labels in addition to its values."""
    return state_of_handle(handle).type_name.partition(".")[0] == "pandas"


def _check_not_scalar(handle: DistributedValues, wish: str) -> None:
    """Raise if the object is a number: `torch.tensor([handle, …])` treats objects of unknown types as sequences."""
    if any(fact.summary.shape == "()" for fact in state_of_handle(handle).facts.values()):
        raise DistributedValueError(
            f"This is a handle of a 0-d tensor, which cannot be {wish}. Get its number with handle.item() or "
            "float(handle), or stack several handles into one tensor with torch.stack(handles)."
        )


def _is_iterator(handle: DistributedValues) -> bool:
    return any(fact.summary.iterates for fact in state_of_handle(handle).facts.values())


def make_handle(state: RemoteState, *, mirrored: bool, size: int) -> DistributedValues:
    """Create a handle of an object on `size` replicas."""
    library_guards.install()
    kind = _kind_of(state, mirrored=mirrored)
    handle = kind.__new__(kind)
    object.__setattr__(handle, "_components", state)
    object.__setattr__(handle, "_num_replicas", size)
    object.__setattr__(handle, "_global_batch_size", None)
    object.__setattr__(handle, "_kinds", None)
    return handle


def change_kind(handle: DistributedValues, *, mirrored: bool) -> None:
    """Change the kind of a handle in place, for all references to it."""
    object.__setattr__(handle, "__class__", _kind_of(state_of_handle(handle), mirrored=mirrored))


def _kind_of(state: RemoteState, *, mirrored: bool) -> type[DistributedValues]:
    if not mirrored:
        return RemotePerReplica
    named = _class_named(state.type_name)
    if issubclass(named, Mapping):
        return RemoteMapping
    return RemoteSequence if issubclass(named, Sequence) and not issubclass(named, str | bytes) else RemoteMirrored


class RemoteMethod:
    """A method of the object behind a handle; calling it calls the method on every replica."""

    def __init__(self, handle: Any, path: tuple[tuple[str, Any], ...]) -> None:
        self._handle = handle
        self._path = path
        self.__name__ = str(path[-1][1])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return state_of_handle(self._handle).operations.run(self._handle, "call", args, kwargs, self._path)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return follow, (self._handle, self._path)  # on a replica it is the method itself

    def __repr__(self) -> str:
        return f"<method {self.__name__!r} of a {state_of_handle(self._handle).type_name} on the engines>"


def _class_named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    found = sys.modules.get(module or "builtins")
    return getattr(found, attribute, object)
