"""Statistics of a tensor, computed on its device with bounded work, so that only a few numbers are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from distnb.collectives.digests import digest
from distnb.compat import torch_internals
from distnb.wire.value_facts import BINS, Statistics

__all__ = ["MOST_ELEMENTS", "digest_of", "local_part", "norms", "statistics_of"]

MOST_ELEMENTS = 1 << 22
"""The number of elements read from a tensor, at most: a few milliseconds of work. A larger tensor is sampled."""

_MOST_IN_HISTOGRAM = 1 << 18
_BLOCKS = 1 << 10  # the blocks of a sample; neighbours in memory are read together, which is faster


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor without a graph: a DTensor's local part, or a sparse tensor's elements.

    Nothing is communicated.
    """
    with torch._C.DisableTorchFunctionSubclass():
        part = torch_internals.local_tensor(tensor)
        local: torch.Tensor = (tensor if part is None else part).detach()
        if local.layout is torch.sparse_coo:
            return torch_internals.sparse_parts(local)[1]
        if local.layout is not torch.strided:
            return local.values() if "sparse" in str(local.layout) else local.to_dense()
        return local.dequantize() if local.is_quantized else local


def statistics_of(tensor: torch.Tensor) -> Statistics | None:
    """Return statistics of a tensor from `local_part`, or None if it has no numbers (an empty or meta tensor)."""
    if not tensor.numel() or tensor.is_meta:
        return None
    with torch.no_grad():
        values = _as_floats(_some(tensor, MOST_ELEMENTS))
        sampled, nans, infinities = values.numel(), 0, 0
        low, high = map(float, torch.aminmax(values))
        if not math.isfinite(low) or not math.isfinite(high):
            nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
            values = values[values.isfinite()]
            if not values.numel():
                norm = math.nan if nans else math.inf
                return Statistics(
                    elements=tensor.numel(),
                    low=math.nan,
                    high=math.nan,
                    mean=math.nan,
                    norm=norm,
                    nans=nans,
                    infinities=infinities,
                    histogram=(),
                    sampled=sampled,
                )
            low, high = map(float, torch.aminmax(values))
        norm = float(_norm(values)) * math.sqrt(tensor.numel() / sampled)
        return Statistics(
            elements=tensor.numel(),
            low=low,
            high=high,
            mean=float(values.mean()),
            norm=math.nan if nans else math.inf if infinities else norm,
            nans=nans,
            infinities=infinities,
            histogram=_histogram(values, low, high),
            sampled=sampled,
        )


def _as_floats(values: torch.Tensor) -> torch.Tensor:
    if values.is_complex():
        return values.abs()
    if values.is_floating_point():
        return values if values.itemsize >= 4 else values.float()
    return values.double()


def _norm(values: torch.Tensor) -> torch.Tensor:
    """Return a norm in float64. It is computed in the values' own type, which is many times faster."""
    norm: torch.Tensor = torch.linalg.vector_norm(values).double()
    if values.dtype is torch.float32 and (norm.isinf() or not norm):  # the squares have overflowed or underflowed
        norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm


def _histogram(values: torch.Tensor, low: float, high: float) -> tuple[int, ...]:
    if not high > low or not math.isfinite(high - low):
        return ()
    some = _some(values, _MOST_IN_HISTOGRAM).double()
    places = ((some - low) * (BINS / (high - low))).long().clamp_(0, BINS - 1)
    return tuple(torch.bincount(places, minlength=BINS).tolist())


def _some(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a tensor's elements in one dimension, or a sample of about `most` in evenly spread blocks of memory."""
    count = tensor.numel()
    if count <= most:
        return tensor.reshape(-1)
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
        if not tensor.is_contiguous():  # a slice of a larger tensor
            step = math.ceil(count / most)
            axis = max(range(tensor.dim()), key=lambda each: tensor.shape[each])
            tensor = tensor.narrow(axis, 0, max(1, tensor.shape[axis] // step))
            return tensor.reshape(-1)[:most]
    blocks = min(_BLOCKS, most)
    whole = count // blocks
    return tensor.reshape(-1)[: whole * blocks].view(blocks, whole)[:, : most // blocks].reshape(-1)


def digest_of(tensor: torch.Tensor, most: int = MOST_ELEMENTS) -> int:
    """Return a digest of a tensor's elements, or of a sample of `most` of them; 0 if there are none.

    Elements on an accelerator are copied to the host.
    """
    if not tensor.numel() or tensor.is_meta:
        return 0
    return digest(_some(tensor, most))


def norms(tensors: Sequence[torch.Tensor], most: int = MOST_ELEMENTS) -> list[float]:
    """Return the Euclidean norms of many tensors, read from each device at once; nan for a meta tensor.

    At most `most` elements of each tensor are read. The norm of a larger tensor is estimated from the sample.
    """
    by_device: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(place)
    found = [math.nan] * len(tensors)
    with torch.no_grad():
        for device, places in by_device.items():
            if device.type == "meta":
                continue
            some = [_as_floats(_some(tensors[place], most)) for place in places]
            each = torch.stack([torch.linalg.vector_norm(values).double() for values in some]).tolist()
            for place, values, norm in zip(places, some, each, strict=True):
                if values.numel():
                    found[place] = norm * math.sqrt(tensors[place].numel() / values.numel())
                else:
                    found[place] = 0.0
    return found
