"""Arrays and tensors that lie in the same memory: what is done to one is done to the other."""

from __future__ import annotations

import sys
from typing import Any

from distnb.wire.digests import is_array, is_tensor

__all__ = ["covers", "memory_of"]


def memory_of(value: Any) -> int | None:
    """Where the memory begins that an array or tensor lies in; None for all else, and for what has no elements."""
    if is_array(value):
        return _memory_of_array(value)
    if is_tensor(value) and value.numel():
        return value.untyped_storage().data_ptr() or None
    return None


def _memory_of_array(array: Any) -> int | None:
    if array.size == 0:
        return None
    owner = array
    while type(owner.base) is type(array):
        owner = owner.base
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(owner.base, torch.Tensor):
        return owner.base.untyped_storage().data_ptr() or None
    address: int = owner.__array_interface__["data"][0]
    return address


def covers(base: Any, view: Any) -> bool:
    """Whether one array, whose bytes lie in a row, holds every element of another."""
    from numpy.lib.array_utils import byte_bounds

    if not base.flags.c_contiguous:
        return False
    (low, high), (first, last) = byte_bounds(base), byte_bounds(view)
    return bool(low <= first and last <= high)
