"""Arrays and tensors as views: how they travel when something that they share memory with is there, or comes too.

What carries the memory is one of four: an array whose bytes lie in a row, a tensor or a tensor's storage, or a buffer
(`bytearray`, `array.array`). Whoever arrives later is laid out anew in the carrier's memory.
"""

from __future__ import annotations

import pickle
from typing import Any

from distnb.wire.digests import is_array, is_tensor
from distnb.wire.memory import covers, extent, is_buffer, start_of

__all__ = ["carrier_among", "reduce_view"]


def carrier_among(candidates: list[Any], value: Any) -> Any:
    """The first of several objects whose memory holds all elements of an array or tensor; None if none does."""
    span = extent(value)
    for other in candidates:
        if other is not value and _same_device(other, value) and covers(other, span):
            return other
    return None


def _same_device(other: Any, value: Any) -> bool:
    device = getattr(value, "device", None)
    there = getattr(other, "device", None)
    return str(there or "cpu") == str(device or "cpu")


def reduce_view(carrier: Any, value: Any, *, elements: bool) -> tuple[Any, ...]:
    """How to pickle an array or tensor as a view of a carrier.

    Args:
        elements: The carrier is there already, and its elements may be out of date: these are sent along.
    """
    if is_array(value):
        start = value.__array_interface__["data"][0] - start_of(carrier)
        args = (carrier, value.dtype, value.shape, value.strides, start)
        data = numpy_bytes(value) if elements else None
        return (_make_array, (*args, data))
    start = value.data_ptr() - start_of(carrier)
    plain = value.detach()
    # Clones: what lies in the carrier's memory would travel as a part of that.
    place = plain.dtype, tuple(plain.shape), plain.stride(), start
    return _make_tensor, (type(value), carrier, place, plain.clone() if elements else None)


def numpy_bytes(array: Any) -> Any:
    """An array's elements as a buffer to be pickled; not as an array, which would be taken for the view itself."""
    import numpy

    return pickle.PickleBuffer(numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8).data)


def _flat(carrier: Any) -> Any:
    """All bytes of a carrier's memory, as an array on it."""
    import numpy

    if is_array(carrier):
        return carrier.reshape(-1).view(numpy.uint8)
    if is_buffer(carrier):
        return numpy.frombuffer(carrier, dtype=numpy.uint8)
    import torch

    storage = carrier.untyped_storage() if is_tensor(carrier) else carrier
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def _make_array(carrier: Any, dtype: Any, shape: Any, strides: Any, start: int, data: Any) -> Any:
    import numpy

    try:
        view = numpy.ndarray(shape, dtype, _flat(carrier), start, strides)
    except (ValueError, TypeError, RuntimeError):  # the carrier lies elsewhere by now
        view = numpy.empty(shape, dtype)
    if data is not None and view.flags.writeable:
        view[...] = numpy.frombuffer(data, dtype=numpy.uint8).view(dtype).reshape(shape)
    return view


def _make_tensor(kind: type, carrier: Any, place: tuple[Any, ...], elements: Any) -> Any:
    import torch

    dtype, shape, stride, start = place
    try:
        if is_tensor(carrier) or isinstance(carrier, torch.UntypedStorage):
            storage = carrier.untyped_storage() if is_tensor(carrier) else carrier
        else:
            storage = torch.from_numpy(_flat(carrier)).untyped_storage()
        offset, rest = divmod(start, dtype.itemsize)
        if rest:
            raise RuntimeError("no element begins there")
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
        if elements is not None:
            tensor.copy_(elements)
    except (RuntimeError, ValueError):  # the carrier lies elsewhere by now
        tensor = torch.empty_strided(shape, stride, dtype=dtype) if elements is None else elements
    return torch.nn.Parameter(tensor, requires_grad=False) if kind is torch.nn.Parameter else tensor
