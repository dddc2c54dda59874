"""Keeping torch.compile's tracer out of our own functions, without importing it: that takes seconds."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from distnb.compat import torch_internals

__all__ = ["always_eager", "methods_always_eager"]

_F = TypeVar("_F", bound=Any)
_C = TypeVar("_C", bound=type)


def methods_always_eager(cls: _C) -> _C:
    """Apply `always_eager` to every method that a class defines, since C++ calls them while the tracer is at work."""
    for member in vars(cls).values():
        if isinstance(member, FunctionType):
            always_eager(member)
    return cls


def always_eager(function: _F) -> _F:
    """Have a function, and all that it calls, run as plain Python where torch.compile's tracer meets it.

    `torch.compiler.disable` means the same, but imports the compiler.
    """
    torch_internals.never_trace(function)
    return function
