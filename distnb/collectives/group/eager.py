"""Keeping torch.compile's tracer out of our own functions, without importing it: that takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

__all__ = ["always_eager", "methods_always_eager"]

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)


def methods_always_eager(cls: _C) -> _C:
    """The same for every method that a class defines: C++ calls them while the tracer is at work."""
    for member in vars(cls).values():
        if isinstance(member, FunctionType):
            always_eager(member)
    return cls


def always_eager(function: _F) -> _F:
    """Have a function, and all that it calls, run as plain Python where torch.compile's tracer meets it.

    `torch.compiler.disable` means the same, but imports the compiler. Where torch lacks the means, the function
    is traced, which is slow and noisy but not wrong.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return function
    skip = getattr(getattr(eval_frame, "_FrameAction", None), "SKIP", None)
    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    if skip is not None and strategy is not None:
        eval_frame.set_code_exec_strategy(function.__code__, strategy(skip, skip))
    return function
