"""A plan of closures: what packing their function read, and the check that it would read the same again.

As a call plan does for `strategy.run` (`distnb/notebook/README.md`), it takes the place of the packing while nothing
has changed. The settings of models and optimizers are read each time, and their composition is compared.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distnb.objects.code.definitions import names_of_code
from distnb.objects.code.function_parts import FunctionParts
from distnb.objects.modes.environment import current_cell
from distnb.objects.plain import is_plain
from distnb.servers.coordinator.pickling import ClosurePickler, Reached

__all__ = ["ClosurePlan"]

_CONTAINERS = frozenset({bytearray, dict, frozenset, list, set, tuple})
_MISSING = object()


class ClosurePlan:
    """The plan of a function that was pickled by value.

    It keeps neither models nor data alive.

    Args:
        number: The number of the resource that the function has become.
        function: The function. The same `lambda` or `def` may make it again for each closure.
        pickler: The pickler that has pickled it.
    """

    def __init__(self, number: int, function: types.FunctionType, pickler: ClosurePickler) -> None:
        self.number = number
        self._moment = _moment()
        self._functions = [_FunctionRead(each, itself=each is not function) for each in pickler.functions]
        self._references = [(weakref.ref(obj), reference) for obj, reference in pickler.references]

    @staticmethod
    def is_for(function: types.FunctionType, pickler: ClosurePickler) -> bool:
        """Return whether a function that was pickled can have a plan: nothing that it reads can change in place."""
        if not pickler.is_constant or pickler.reached.inputs or function not in pickler.functions:
            return False
        return not any(each.__dict__ or each.__kwdefaults__ for each in pickler.functions) and all(
            type(value) not in _CONTAINERS or is_plain(value)
            for each in pickler.functions
            for value in _values_of(each)
        )

    def reached(
        self, function: types.FunctionType, reference: Callable[[Any, Reached], tuple[Any, ...] | None]
    ) -> Reached | None:
        """Return the resources that the function refers to; None if the plan does not hold.

        Args:
            reference: Returns the reference to an object, and adds what it reaches.
        """
        if self._moment != _moment():
            return None
        for each in self._functions:
            if not each.is_same(function):
                return None
        found = Reached()
        for known, expected in self._references:
            obj = known()
            if obj is None or reference(obj, found) != expected:
                return None
        return found


def _moment() -> tuple[int, int]:
    """Return the number of the cell, and of loaded modules. Between cells a module may have been loaded again."""
    return current_cell(), len(sys.modules)


class _FunctionRead:
    """A function as it was when it was pickled, with the values of its globals.

    Args:
        itself: Whether it must be this very function; False for one of the same parts.
    """

    def __init__(self, function: types.FunctionType, *, itself: bool) -> None:
        self._function = weakref.ref(function) if itself else None
        self._parts = FunctionParts(function, weakly=True)
        self._module = function.__module__
        self._constants: list[tuple[str, Any]] = []
        self._others: list[tuple[str, weakref.ref[Any]]] = []
        for name in names_of_code(function.__code__).names:
            value = function.__globals__.get(name, _MISSING)
            try:
                self._others.append((name, weakref.ref(value)))
            except TypeError:
                self._constants.append((name, value))

    def is_same(self, scheduled: types.FunctionType) -> bool:
        """Return whether the function is unchanged."""
        function = scheduled if self._function is None else self._function()
        if function is None or not self._parts.are_of(function) or function.__module__ != self._module:
            return False
        get: Callable[[str, Any], Any] = function.__globals__.get
        for name, value in self._constants:
            if get(name, _MISSING) is not value:
                return False
        for name, reference in self._others:
            if (other := reference()) is None or get(name, _MISSING) is not other:
                return False
        return True


def _values_of(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values that a function refers to."""
    namespace: Mapping[str, Any] = function.__globals__
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield _NO_VALUE
    yield from (namespace[name] for name in names_of_code(function.__code__).names if name in namespace)


_NO_VALUE: list[Any] = [None]
"""Stands for the content of a variable that has no value yet, which may get one: such a function has no plan."""
