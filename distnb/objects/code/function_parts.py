"""The parts of a simple function, for a comparison that takes a microsecond."""

from __future__ import annotations

import operator
import types

__all__ = ["FunctionParts"]


class FunctionParts:
    """The parts of a simple function (`is_simple`), for a comparison."""

    def __init__(self, function: types.FunctionType) -> None:
        self._code = function.__code__
        self._defaults = function.__defaults__ or ()
        self._name, self._doc = function.__name__, function.__doc__
        self._annotations = function.__annotations__.copy()

    def are_of(self, function: types.FunctionType) -> bool:
        """Return whether a function has these parts, and no others."""
        defaults = function.__defaults__ or ()
        return (
            function.__code__ is self._code
            and len(defaults) == len(self._defaults)
            and all(map(operator.is_, defaults, self._defaults))
            and function.__name__ == self._name
            and function.__doc__ == self._doc
            and function.__annotations__ == self._annotations
            and not (function.__kwdefaults__ or function.__closure__ or function.__dict__)
        )
