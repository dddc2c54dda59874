"""The parts of a function, for a comparison that takes a microsecond."""

from __future__ import annotations

import operator
import types
import weakref
from contextlib import suppress
from typing import Any

from distnb.objects.plain import is_plain

__all__ = ["FunctionParts", "has_constant_parts"]

_CONSTANTS = frozenset({type(None), bool, int, float, str})


def has_constant_parts(value: Any) -> bool:
    """Return whether a value is a function of whose parts no other object can change any: it has no attributes, its
    defaults are immutable, and its closure holds numbers and strings."""
    if type(value) is not types.FunctionType or value.__dict__ or value.__kwdefaults__:
        return False
    contents = _contents(value)
    return is_plain(value.__defaults__) and contents is not None and all(type(each) in _CONSTANTS for each in contents)


def _contents(function: types.FunctionType) -> tuple[Any, ...] | None:
    """Return the contents of a function's closure, or None if one of its variables has no value."""
    try:
        return tuple([cell.cell_contents for cell in function.__closure__ or ()])
    except ValueError:
        return None


class FunctionParts:
    """The parts of a function that `has_constant_parts`; or also of another one, if `weakly` is True.

    Args:
        weakly: Whether to keep none of its defaults and of the objects in its closure alive.
    """

    def __init__(self, function: types.FunctionType, *, weakly: bool = False) -> None:
        self._code = function.__code__
        self._objects = [*(function.__defaults__ or ()), *(_contents(function) or ())]
        self._weakly: list[tuple[int, weakref.ref[Any]]] = []
        for place, each in enumerate(self._objects if weakly else ()):
            with suppress(TypeError):  # numbers, strings and a few others can have no weak reference
                self._weakly.append((place, weakref.ref(each)))
                self._objects[place] = None
        self._name, self._doc = function.__name__, function.__doc__
        self._annotations = function.__annotations__.copy()

    def are_of(self, function: types.FunctionType) -> bool:
        """Return whether a function has these parts, and no others."""
        objects = function.__defaults__ or ()
        if function.__closure__ is not None:
            contents = _contents(function)
            if contents is None:
                return False
            objects += contents
        if self._weakly:
            others = self._without_weak(objects)
            if others is None:
                return False
            objects = others
        return (
            function.__code__ is self._code
            and len(objects) == len(self._objects)
            and all(map(operator.is_, objects, self._objects))
            and function.__name__ == self._name
            and function.__doc__ == self._doc
            and function.__annotations__ == self._annotations
            and not (function.__kwdefaults__ or function.__dict__)
        )

    def _without_weak(self, objects: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the objects with None in the place of those kept weakly; None if one of these is another object."""
        found = [*objects]
        if len(found) != len(self._objects):
            return None
        for place, reference in self._weakly:
            if (known := reference()) is None or found[place] is not known:
                return None
            found[place] = None
        return (*found,)
