"""The special methods by which Python's operators reach an object that stands for another one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

__all__ = ["IN_PLACE", "special_methods"]

_BITWISE = ("and_", "or_", "xor", "lshift", "rshift")
_TWO_SIDED = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", *_BITWISE)
IN_PLACE = frozenset(f"i{name.rstrip('_')}" for name in _TWO_SIDED)
"""Names of the functions of `operator` that change their first argument, where it can be changed."""

Call = Callable[[Any, Callable[..., Any], tuple[Any, ...]], Any]


def special_methods(call: Call) -> dict[str, Callable[..., Any]]:
    """The methods of all arithmetic, by name. Comparisons and containers are not among them.

    Args:
        call: Told the object that an operator was used on, calls a function with arguments; that object is among them.
    """

    def straight(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *others: call(self, function, (self, *others))

    def reflected(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, other: call(self, function, (other, self))

    names = ["neg", "pos", "abs", "invert", *_TWO_SIDED, *sorted(IN_PLACE)]
    methods = {f"__{name.rstrip('_')}__": straight(getattr(operator, name)) for name in names}
    methods |= {f"__r{name.rstrip('_')}__": reflected(getattr(operator, name)) for name in _TWO_SIDED}
    return methods | {
        "__round__": straight(round),
        "__divmod__": straight(divmod),
        "__rdivmod__": reflected(divmod),
        "__bool__": straight(operator.truth),
    }
