"""Classes and functions of the notebook by value in what multiprocessing sends to processes that it does not fork.

A spawned process imports `__main__` to find what is pickled by name. In a kernel or an engine that is not the namespace
of the notebook, so the workers of a DataLoader would not find the class of its dataset.
"""

from __future__ import annotations

import types
from typing import Any

import cloudpickle

from distnb.compat import patches

__all__ = ["install", "open_by_value"]


def install() -> None:
    """Have this process send what is defined in `__main__` by value. Idempotent."""
    patches.replace("multiprocessing.reduction:ForkingPickler.reducer_override", _reduce)


def _reduce(pickler: Any, obj: Any) -> Any:
    if isinstance(obj, type | types.FunctionType) and getattr(obj, "__module__", "") == "__main__":
        return open_by_value, (cloudpickle.dumps(obj),)
    return NotImplemented


def open_by_value(data: bytes) -> Any:
    """Open a class or function in a spawned process, which sends instances of the class back in the same way."""
    install()
    return cloudpickle.loads(data)
