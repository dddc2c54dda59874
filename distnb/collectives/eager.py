"""Exclusion of functions from torch.compile's tracer, without importing it, which takes seconds."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from distnb.compat import torch_internals

__all__ = ["always_eager", "methods_always_eager"]

_F = TypeVar("_F", bound=Any)
_C = TypeVar("_C", bound=type)


def methods_always_eager(cls: _C) -> _C:
    """Apply `always_eager` to every method of a class, because C++ calls them while the tracer is active."""
    for member in vars(cls).values():
        if isinstance(member, FunctionType):
            always_eager(member)
    return cls


def always_eager(function: _F) -> _F:
    """Run a function and its callees as plain Python when torch.compile's tracer reaches it.

    `torch.compiler.disable` means the same, but imports the compiler.
    """
    torch_internals.never_trace(function)
    return function
