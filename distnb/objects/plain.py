"""Immutable values, which are sent as they are and compared by type and value."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import re
import sys
import types
import typing
import uuid
from typing import Any

__all__ = ["ATOMS", "is_importable", "is_plain", "same"]

ATOMS: frozenset[type] = frozenset(
    {
        bool,
        bytes,
        complex,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        float,
        fractions.Fraction,
        int,
        range,
        re.Pattern,
        slice,
        str,
        type(Ellipsis),
        type(None),
        type(NotImplemented),
        types.ModuleType,
        uuid.UUID,
    }
)
"""Types whose instances, with everything in them, are immutable. Modules count too, since they are sent by name."""

SCALARS = frozenset({type(None), bool, int, float})
"""The smallest of these types, which most calls that return a plain value return."""

_ALIASES = frozenset(
    map(type, (list[int], int | str, typing.Union[int, str], typing.Callable[[int], str], typing.List[int]))  # noqa: UP006, UP007
)
_TORCH_ATOMS = ("dtype", "device", "Size", "layout", "memory_format")
_LARGEST_NBYTES = 1 << 16  # the other side keeps larger strings and tuples, so they need not be sent again


_HEAP_TYPE = 1 << 9


def is_plain(value: Any) -> bool:
    """Return whether a value and everything in it is immutable, and it is small enough to be sent each time.

    No method of the value's own class is called, not even `__class__`, since the user's code may do anything.
    """
    kind = type(value)
    if kind is slice:
        return is_plain(value.start) and is_plain(value.stop) and is_plain(value.step)
    if kind in ATOMS:
        return kind not in (str, bytes) or len(value) <= _LARGEST_NBYTES
    if kind is frozenset or kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        own = frozenset if kind is frozenset else tuple
        try:
            return own.__len__(value) <= _LARGEST_NBYTES and all(map(is_plain, own.__iter__(value)))
        except RecursionError:
            return False
    return _is_plain_object(kind, value)


def _is_plain_object(kind: type, value: Any) -> bool:
    torch = sys.modules.get("torch")
    # The most frequent types come first, because a data set may hold many such objects.
    if kind in (list, dict, set) or (torch is not None and kind is getattr(torch, "Tensor", None)):
        return False
    if issubclass(kind, (types.FunctionType, type)):
        return is_importable(value)
    if kind in _ALIASES:  # `list[float]`, `int | str`, `typing.Callable[[int], str]`
        origin = typing.get_origin(value)
        return (origin is typing.Union or is_plain(origin)) and is_plain(value.__args__)
    if issubclass(kind, (enum.Enum, pathlib.PurePath)):
        return True
    if issubclass(kind, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)
    if torch is not None and issubclass(kind, tuple(getattr(torch, name) for name in _TORCH_ATOMS)):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic | numpy.dtype):
        return not issubclass(kind, numpy.void)
    strategies = sys.modules.get("distnb.strategies.base")
    return strategies is not None and issubclass(kind, strategies.Strategy)


def is_importable(value: Any) -> bool:
    """Return whether a function or class can be found by its module and qualified name in any process."""
    if isinstance(value, type) and not value.__flags__ & _HEAP_TYPE:
        return True  # a class defined in C, which every process has
    name = getattr(value, "__module__", None)
    if name is None or name == "__main__":
        return False
    found: Any = sys.modules.get(name)
    if found is None or getattr(found, "__spec__", None) is None:
        return False
    for part in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is value


def same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal in type and value at every level.

    1 and True differ, 0.0 and -0.0 differ, and NaN equals NaN.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if bool(one == other):
        return repr(one) == repr(other) if type(one) is complex or (one == 0 and type(one) is not int) else True
    return bool(one != one and other != other)
