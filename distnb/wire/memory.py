"""Arrays, tensors and buffers that lie in the same memory: what is done to one is done to the other."""

from __future__ import annotations

import bisect
import sys
from array import array as items
from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

from distnb.wire.digests import is_array, is_tensor

__all__ = ["Regions", "Span", "covers", "extent", "is_buffer", "meet", "owner_of", "span_of", "start_of"]

Span = tuple[int, int]
"""Addresses: of the first byte, and of the one behind the last."""

K = TypeVar("K", bound=Hashable)


def is_buffer(value: Any) -> bool:
    """Whether a value is a plain container of bytes that arrays and tensors can be made on."""
    return type(value) is bytearray or type(value) is items


def owner_of(array: Any) -> Any:
    """What the memory of an array belongs to: the array itself or another, a buffer, or a tensor's storage."""
    owner = array
    while type(owner.base) is type(array):
        owner = owner.base
    base = owner.base
    if type(base) is memoryview:
        base = base.obj
    if is_buffer(base):
        return base
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(base, torch.Tensor):
        return base.untyped_storage()
    return owner


def start_of(value: Any) -> int:
    """The address of the first byte of an array's or a buffer's elements, or of a tensor's or a storage's memory."""
    if is_array(value):
        address: int = value.__array_interface__["data"][0]
    elif type(value) is items:
        address = value.buffer_info()[0]
    elif type(value) is bytearray:
        import ctypes

        address = ctypes.addressof(ctypes.c_char.from_buffer(value)) if value else 0
    else:
        address = (value.untyped_storage() if is_tensor(value) else value).data_ptr()
    return address


def span_of(value: Any) -> Span | None:
    """The memory that an array, tensor or buffer lies in; None for all else, and for what has no elements."""
    if is_array(value):
        if value.size == 0:
            return None
        value = owner_of(value)
    elif is_tensor(value):
        if value.numel() == 0:
            return None
        value = value.untyped_storage()
    elif not is_buffer(value) or not len(value):
        return None
    if is_array(value):
        return extent(value)
    start = start_of(value)
    nbytes = len(value) * (value.itemsize if type(value) is items else 1) if is_buffer(value) else value.nbytes()
    return (start, start + nbytes) if start else None


def extent(value: Any) -> Span:
    """The bytes from the first to the last element of an array or tensor."""
    if is_array(value):
        from numpy.lib.array_utils import byte_bounds

        low, high = byte_bounds(value)
        return int(low), int(high)
    first = value.data_ptr()
    steps = ((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return first, first + (sum(steps) + 1) * value.element_size()


def meet(one: Span | None, other: Span | None) -> bool:
    """Whether two spans have a byte in common."""
    return one is not None and other is not None and one[0] < other[1] and other[0] < one[1]


def covers(whole: Any, part: Span) -> bool:
    """Whether the memory of an array, whose bytes lie in a row, a buffer, a tensor or a storage holds a span."""
    if is_array(whole):
        if not whole.flags.c_contiguous:
            return False
        low, high = extent(whole)
    else:
        found = (
            span_of(whole)
            if is_buffer(whole) or is_tensor(whole)
            else (start_of(whole), start_of(whole) + whole.nbytes())
        )
        if found is None:
            return False
        low, high = found
    return low <= part[0] and part[1] <= high


class Regions(Generic[K]):
    """Keys by the memory that they lie in. Spans that meet are of one region."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: dict[int, tuple[int, dict[K, None]]] = {}
        self._spans: dict[K, Span] = {}

    def __bool__(self) -> bool:
        return bool(self._spans)

    def _met(self, span: Span) -> list[int]:
        first = bisect.bisect_right(self._starts, span[0])
        if first and self._regions[self._starts[first - 1]][0] > span[0]:
            first -= 1
        return self._starts[first : bisect.bisect_left(self._starts, span[1])]

    def add(self, key: K, span: Span) -> None:
        """Note where a key lies."""
        keys: dict[K, None] = {}
        low, high = span
        for start in self._met(span):
            end, others = self._regions.pop(start)
            self._starts.remove(start)
            low, high = min(low, start), max(high, end)
            keys.update(others)
        keys[key] = None
        self._regions[low] = high, keys
        bisect.insort(self._starts, low)
        self._spans[key] = span

    def remove(self, key: K) -> None:
        """Forget a key, if it is there."""
        span = self._spans.pop(key, None)
        for start in () if span is None else self._met(span):
            keys = self._regions[start][1]
            keys.pop(key, None)
            if not keys:
                del self._regions[start]
                self._starts.remove(start)

    def near(self, span: Span) -> Iterable[K]:
        """The keys in the regions that a span meets."""
        return [key for start in self._met(span) for key in self._regions[start][1]]
