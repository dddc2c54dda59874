"""Classes and functions of the notebook, sent by value to the processes that multiprocessing spawns.

A spawned process imports `__main__` to resolve names in pickles. In a kernel or an engine `__main__` is not the
notebook's namespace, so the workers of a DataLoader would not find the class of its dataset.
"""

from __future__ import annotations

import io
import types
from typing import Any

import cloudpickle

from distnb.compat import patches
from distnb.objects.code.definitions import CodePickler

__all__ = ["install", "open_by_value"]


def install() -> None:
    """Make this process send classes and functions of `__main__` by value. Idempotent."""
    patches.replace("multiprocessing.reduction:ForkingPickler.reducer_override", _reduce)


def _reduce(pickler: Any, obj: Any) -> Any:
    if isinstance(obj, type | types.FunctionType) and getattr(obj, "__module__", "") == "__main__":
        file = io.BytesIO()
        CodePickler(file, protocol=5).dump(obj)
        return open_by_value, (file.getvalue(),)
    return NotImplemented


def open_by_value(data: bytes) -> Any:
    """Open a class or function in a spawned process, and make the process send it by value, too."""
    install()
    return cloudpickle.loads(data)
