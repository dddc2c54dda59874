"""Functions and classes that travel by value, and the global names that their code reads.

A function defined in the notebook has the notebook's namespace as its globals. On an engine it gets the engine's
one namespace instead, and the names that it reads travel as names of their own: so a new value is seen.
"""

from __future__ import annotations

import dis
import enum
import functools
import importlib
import linecache
import os
import sys
import types
from typing import Any

import cloudpickle

from distnb.wire.immutables import is_importable

__all__ = ["CodeNames", "fill_cell", "names_of_code", "reduce_code", "repeated_attributes", "source_of"]

_DYNAMIC = frozenset({"eval", "exec", "globals", "locals", "vars"})
_GLOBAL_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"})


class CodeNames:
    """What a code object, those nested in it included, may ask of its globals.

    Attributes:
        names: Global names that it reads or deletes, or assigns after a `global` statement.
        attributes: Every other name in it, to tell which submodules it uses.
        dynamic: It calls eval, exec, globals, locals or vars: it may read anything.
    """

    __slots__ = ("attributes", "dynamic", "names")

    def __init__(self, names: frozenset[str], attributes: frozenset[str]) -> None:
        self.names = names
        self.attributes = attributes
        self.dynamic = bool(names & _DYNAMIC)


@functools.lru_cache(maxsize=4096)
def names_of_code(code: types.CodeType) -> CodeNames:
    """The names that a code object uses."""
    names: set[str] = set()
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_READS or (instruction.opname == "STORE_GLOBAL"):
            names.add(instruction.argval)
    attributes.update(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_of_code(constant)
            names |= inner.names
            attributes |= inner.attributes
    return CodeNames(frozenset(names), frozenset(attributes))


def source_of(code: types.CodeType) -> tuple[str, str] | None:
    """(file name, text) of a code object whose source is in no file, as that of a notebook cell."""
    name = code.co_filename
    entry = linecache.cache.get(name)
    if entry is None or len(entry) != 4 or os.path.exists(name):
        return None
    return name, "".join(entry[2])


# -- reducing ----------------------------------------------------------------------------------------------------------


def reduce_code(pickler: Any, obj: Any, user_ns: dict[str, Any]) -> Any:
    """How to pickle a function, class, cell or caching wrapper by value; NotImplemented for all else.

    Args:
        pickler: The running pickler: a cloudpickle one, for what it does better.
        user_ns: The one namespace of this process; the pickler sends it as a reference.
    """
    if isinstance(obj, types.FunctionType):
        return NotImplemented if is_importable(obj) else _reduce_function(obj, user_ns)
    if type(obj) is types.CodeType:
        return _reduce_code_object(obj)
    if isinstance(obj, type):
        return _reduce_class(pickler, obj)
    if type(obj) is types.CellType:
        return _reduce_cell(obj)
    if type(obj) is functools._lru_cache_wrapper and not is_importable(obj):
        limits = obj.cache_parameters()
        return _make_cache, (obj.__wrapped__, limits["maxsize"], limits["typed"])
    if type(obj) is functools.cached_property:
        return _make_cached_property, (obj.attrname,), obj.func, None, None, _fill_cached_property
    return NotImplemented


def _reduce_code_object(code: types.CodeType) -> Any:
    """As cloudpickle does, with tuples made anew: the code's own, of its constants, are not objects that users have."""
    make, args, *rest = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return (make, tuple([(*part,) if type(part) is tuple else part for part in args]), *rest)


def _reduce_function(function: types.FunctionType, user_ns: dict[str, Any]) -> Any:
    globals_ = _globals_of(function, user_ns)
    args = (function.__code__, globals_, function.__name__, function.__closure__)
    state = {
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__annotations__": function.__annotations__,
        "__doc__": function.__doc__,
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__dict__": function.__dict__ or None,
    }
    return _make_function, args, state, None, None, _fill_function


def _globals_of(function: types.FunctionType, user_ns: dict[str, Any]) -> dict[str, Any] | str:
    """What the function's names are looked up in; the name of an importable module for that module's globals.

    A name, since an object that stood for the module would be one of the engine's own: it would travel as a handle.
    """
    found = function.__globals__
    if found is user_ns:
        return user_ns
    module = sys.modules.get(found.get("__name__", ""))
    if module is not None and vars(module) is found and module.__name__ != "__main__":
        return module.__name__
    # Made by exec in a dict of its own: the names that the code reads travel in it.
    names = names_of_code(function.__code__).names
    return {name: value for name, value in found.items() if name in names and name != "__builtins__"}


def _make_function(code: types.CodeType, globals_: dict[str, Any] | str, name: str, closure: Any) -> types.FunctionType:
    if isinstance(globals_, str):
        globals_ = vars(importlib.import_module(globals_))
    globals_.setdefault("__builtins__", __builtins__)
    return types.FunctionType(code, globals_, name, None, closure)


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    attributes = state.pop("__dict__")
    if attributes:
        function.__dict__.update(attributes)
    for name, value in state.items():
        setattr(function, name, value)


def _reduce_class(pickler: Any, cls: type) -> Any:
    reduced = cloudpickle.Pickler.reducer_override(pickler, cls)
    if not isinstance(reduced, tuple) or len(reduced) < 6:
        return reduced
    # cloudpickle would look its own table up for a class of this origin; here identity is the graph's business.
    make, args, (attributes, slots), *rest = reduced
    # Pickling an instance leaves a cache in its class; it must not look like a change.
    attributes.pop("__slotnames__", None)
    attributes.update(repeated_attributes(cls))
    if "__slots__" in attributes and len(args) == 6:
        # They can only be given when the class is made; cloudpickle sets them afterwards, to no effect.
        type_, name, bases, keywords, *others = args
        args = (type_, name, bases, {**keywords, "__slots__": attributes.pop("__slots__")}, *others)
        for member in [key for key, value in attributes.items() if type(value) is types.MemberDescriptorType]:
            del attributes[member]
    return (make, (*args[:-2], None, args[-1]), (attributes, slots), *rest)


def repeated_attributes(cls: type) -> dict[str, Any]:
    """A class's own attributes that are the very objects that it would inherit: cloudpickle leaves them out."""
    if isinstance(cls, enum.EnumMeta):
        return {}
    inherited: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        inherited.update(vars(base))
    return {
        name: value
        for name, value in vars(cls).items()
        if name in inherited and inherited[name] is value and not name.startswith("__")
    }


def _reduce_cell(cell: types.CellType) -> Any:
    try:
        content = (cell.cell_contents,)
    except ValueError:
        return _make_cell, ()
    # As state, so that a function may stand in its own cell.
    return _make_cell, (), content, None, None, fill_cell


def _make_cell() -> types.CellType:
    return types.CellType()


def fill_cell(cell: types.CellType, content: tuple[Any]) -> None:
    """Give a cell its content."""
    cell.cell_contents = content[0]


def _make_cached_property(name: str | None) -> Any:
    made: Any = functools.cached_property(_make_cell)  # type: ignore[arg-type]  # its code is set afterwards
    made.attrname = name
    return made


def _fill_cached_property(cached: Any, function: Any) -> None:
    cached.func = function
    cached.__doc__ = function.__doc__


def _make_cache(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize=maxsize, typed=typed)(function)
