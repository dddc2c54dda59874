"""Mutable objects as nodes of a graph: what each holds itself, and how an existing one takes on another's content.

A node's state is shallow: the nodes it refers to stand in it as themselves. So an object that many others hold can
be brought up to date where it stands, and its holders see it.
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import logging
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle

from distnb.wire.code import repeated_attributes
from distnb.wire.digests import is_array, is_tensor
from distnb.wire.immutables import ATOMS, is_importable, is_plain

__all__ = ["FROZEN", "HOLDERS", "apply_state", "is_node", "state_of", "without_passing"]

FROZEN = "frozen"
"""The kind of a node that cannot take on another's content: a changed one is replaced."""

_LARGE_NBYTES = 1 << 16
_PAIR_AND_ARGUMENT = 2

HOLDERS = (tuple, types.MethodType)
"""Types of nodes that are nothing but what they hold, and cannot hold anything else later."""

_NO_NODES: frozenset[type] = ATOMS - {slice, str, bytes} | {
    classmethod,
    functools.cached_property,
    logging.Logger,
    memoryview,
    property,
    staticmethod,
    types.BuiltinFunctionType,
    types.CodeType,
    types.GetSetDescriptorType,
    types.MappingProxyType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    weakref.ref,
}


def is_node(value: Any) -> bool:
    """Whether a value has an identity that the other side must keep: it is mutable, or too large to send often."""
    kind = type(value)
    if kind in (list, dict, set):
        return True
    if kind in (str, bytes):
        return len(value) > _LARGE_NBYTES
    if kind in HOLDERS:
        # What holds nothing that can change is compared by value. Python's collector cannot be asked: it lets go of
        # tuples of arrays, or of code, after a while, and an object must not cease to be a node.
        return not is_plain(value)
    if kind in _NO_NODES or (kind is slice and is_plain(value)):
        return False
    if isinstance(value, type | types.FunctionType):
        return not is_importable(value)
    return not _is_library_constant(value)


def without_passing(nodes: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Nodes of a pickle, by their place in its memo, without the tuples that were only made for the way.

    Args:
        nodes: Pairs that nothing else refers to; emptied.
    """
    nodes.sort(key=lambda pair: pair[0])
    kept: list[tuple[int, Any]] = []
    while nodes:
        # What holds others comes after them. Its end lets them be seen as held by nobody, too.
        pair = nodes.pop()
        if type(pair[1]) not in HOLDERS or sys.getrefcount(pair[1]) > _PAIR_AND_ARGUMENT:
            kept.append(pair)
        del pair
    kept.reverse()
    return kept


def _is_library_constant(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(
        value, torch.dtype | torch.device | torch.Size | torch.UntypedStorage | torch.storage.TypedStorage
    ):
        return True
    return numpy is not None and isinstance(value, numpy.dtype | numpy.generic | numpy.ufunc)


def state_of(node: Any) -> tuple[str, Any]:
    """A node's kind and its shallow state, ready to be pickled.

    Returns:
        `(FROZEN, parts)` for a node that cannot be changed in place; the parts then only serve to compare it.
    """
    kind = type(node)
    taker = _STATES.get(kind)
    if taker is not None:
        return taker(node)
    if is_array(node):
        return "array", _array_parts(node)
    if is_tensor(node):
        # A clone: what lies in the memory of an object that is there would travel as a part of that.
        gradient = node.grad if node.is_leaf else None
        return "tensor", (node.detach().clone(), node.requires_grad, gradient, dict(vars(node)))
    if isinstance(node, types.FunctionType):
        return "function", _function_parts(node)
    if isinstance(node, type):
        return "class", _class_parts(node)
    if issubclass(kind, collections.Counter):
        return "mapping", list(node.items())
    return _reduced_state(node)


def _array_parts(node: Any) -> Any:
    # Bytes, not an array: the pickler would take a view for the very array that it shows.
    import pickle

    import numpy

    flat = numpy.ascontiguousarray(node).reshape(-1).view(numpy.uint8)
    return node.dtype, node.shape, pickle.PickleBuffer(flat.data)


def _function_parts(node: types.FunctionType) -> dict[str, Any]:
    return {
        "__code__": node.__code__,
        "__defaults__": node.__defaults__,
        "__kwdefaults__": node.__kwdefaults__ and dict(node.__kwdefaults__),
        "__annotations__": dict(node.__annotations__),
        "__doc__": node.__doc__,
        "__name__": node.__name__,
        "__qualname__": node.__qualname__,
        "__module__": node.__module__,
        "__dict__": dict(node.__dict__),
    }


def _class_parts(node: type) -> dict[str, Any]:
    from enum import EnumMeta

    if isinstance(node, EnumMeta):
        return {}
    state = cloudpickle.cloudpickle._class_getstate(node)[0]
    state.update(repeated_attributes(node))
    # Caches of abstract classes change by themselves; documents and modules do not change in practice.
    for name in (
        "_abc_impl",
        "__doc__",
        "__module__",
        "__slots__",
        "__slotnames__",
        "__dataclass_fields__",
        "__dict__",
        "__weakref__",
    ):
        state.pop(name, None)
    return {name: value for name, value in state.items() if type(value) is not types.MemberDescriptorType}


def _reduced_state(node: Any) -> tuple[str, Any]:
    reduced = _reduce(node)
    if not isinstance(reduced, tuple):
        return FROZEN, reduced
    _make, args, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
    if state is None and items is None and pairs is None:
        if not _is_bare(node, _make, args):
            return FROZEN, args
        state = {}  # it has none at the moment
    state = dict(state) if type(state) is dict else state
    parts = (state, None if items is None else list(items), None if pairs is None else list(pairs), setter)
    return "object", parts


def _is_bare(node: Any, make: Any, args: Any) -> bool:
    """Whether a node is one of a class with attributes, that has none at the moment."""
    kind = type(node)
    if getattr(make, "__name__", "") != "__newobj__" or len(args) != 1 or hasattr(kind, "__setstate__"):
        return False
    return hasattr(node, "__dict__") or bool(_slots_of(kind))


def _slots_of(kind: type) -> list[str]:
    import copyreg

    return copyreg._slotnames(kind)  # type: ignore[attr-defined, no-any-return]


def _reduce(node: Any) -> Any:
    import copyreg

    reducer = copyreg.dispatch_table.get(type(node)) or cloudpickle.Pickler._dispatch_table.get(type(node))
    return reducer(node) if reducer is not None else node.__reduce_ex__(5)


_STATES: dict[type, Callable[[Any], tuple[str, Any]]] = {
    list: lambda node: ("list", list(node)),
    dict: lambda node: ("mapping", list(node.items())),
    set: lambda node: ("set", list(node)),
    bytearray: lambda node: ("bytes", bytes(node)),
    array.array: lambda node: ("items", node.tobytes()),
    types.CellType: lambda node: ("cell", _cell_parts(node)),
    tuple: lambda node: (FROZEN, node),
    types.MethodType: lambda node: (FROZEN, (node.__func__, node.__self__)),
    str: lambda node: (FROZEN, node),
    bytes: lambda node: (FROZEN, node),
}


def _cell_parts(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


# -- taking on a state -----------------------------------------------------------------------------------------------


def apply_state(node: Any, kind: str, state: Any) -> None:
    """Give an existing node the content that `state_of` described on the other side."""
    _APPLIERS[kind](node, state)


def _apply_list(node: Any, state: Any) -> None:
    node[:] = state


def _apply_mapping(node: Any, state: Any) -> None:
    node.clear()
    # dict's own, so that a subclass such as Counter does not count.
    dict.update(node, state)


def _apply_set(node: Any, state: Any) -> None:
    node.clear()
    node.update(state)


def _apply_bytes(node: Any, state: Any) -> None:
    node[:] = state


def _apply_items(node: Any, state: Any) -> None:
    if len(node) * node.itemsize == len(state):  # it cannot be resized while an array lies in it
        memoryview(node).cast("B")[:] = state
        return
    del node[:]
    node.frombytes(state)


def _apply_cell(node: Any, state: Any) -> None:
    if state:
        node.cell_contents = state[0]
    else:
        with contextlib.suppress(ValueError):
            del node.cell_contents


def _apply_array(node: Any, state: Any) -> None:
    import numpy

    dtype, shape, data = state
    fresh = numpy.frombuffer(data, dtype=numpy.uint8).view(dtype).reshape(shape)
    if node.dtype == dtype and node.shape != shape and node.size == fresh.size:
        node.shape = shape
    if node.dtype != dtype or node.shape != shape:
        raise ValueError(
            f"an array of shape {node.shape} and dtype {node.dtype} cannot become one of shape {shape} and "
            f"dtype {dtype} in place"
        )
    if node.flags.writeable:
        node[...] = fresh
        return
    node.flags.writeable = True
    node[...] = fresh
    node.flags.writeable = False


def _apply_tensor(node: Any, state: Any) -> None:
    fresh, requires_grad, gradient, attributes = state
    if node.is_inference():  # such a tensor is changed in inference mode alone
        import torch

        with torch.inference_mode():
            node.copy_(fresh)
    elif node.shape == fresh.shape and node.dtype == fresh.dtype:
        node.data.copy_(fresh)
    else:
        node.data = fresh.to(node.device)
    if node.is_leaf:
        if node.requires_grad != requires_grad:
            node.requires_grad_(requires_grad)
        node.grad = gradient
    vars(node).clear()
    vars(node).update(attributes)


def _apply_function(node: Any, state: Any) -> None:
    for name, value in state.items():
        if name == "__dict__":
            node.__dict__.clear()
            node.__dict__.update(value)
        else:
            setattr(node, name, value)


def _apply_class(node: Any, state: Any) -> None:
    now = _class_parts(node)
    for name in now.keys() - state.keys():
        delattr(node, name)
    for name, value in state.items():
        if name not in now or now[name] is not value:
            setattr(node, name, value)


def _apply_object(node: Any, parts: Any) -> None:
    state, items, pairs, setter = parts
    if items is not None:
        if isinstance(node, list):
            node[:] = items
        else:
            node.clear()
            node.extend(items)
    if pairs is not None:
        node.clear()
        for key, value in pairs:
            node[key] = value
    if state is None:
        return
    if setter is not None:
        setter(node, state)
    elif hasattr(node, "__setstate__"):
        _forget_attributes(node, state)
        node.__setstate__(state)
    else:
        _set_attributes(node, state)


def _forget_attributes(node: Any, state: Any) -> None:
    # Most `__setstate__` only add to the attributes: what is gone on the other side must go here too.
    if type(state) is dict and isinstance(getattr(node, "__dict__", None), dict):
        for name in node.__dict__.keys() - state.keys():
            del node.__dict__[name]


def _set_attributes(node: Any, state: Any) -> None:
    slots: Any = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if hasattr(node, "__dict__"):
        node.__dict__.clear()
        node.__dict__.update(state or {})
    slots = slots or {}
    for name in _slots_of(type(node)):
        if name in slots:
            object.__setattr__(node, name, slots[name])
        else:
            with contextlib.suppress(AttributeError):
                object.__delattr__(node, name)


_APPLIERS: dict[str, Callable[[Any, Any], None]] = {
    "array": _apply_array,
    "bytes": _apply_bytes,
    "cell": _apply_cell,
    "class": _apply_class,
    "function": _apply_function,
    "items": _apply_items,
    "list": _apply_list,
    "mapping": _apply_mapping,
    "object": _apply_object,
    "set": _apply_set,
    "tensor": _apply_tensor,
}
