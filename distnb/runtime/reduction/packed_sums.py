"""Sums and means of several tensors over the replicas in few messages, checked without a message of their own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from distnb.accelerators import torch_device
from distnb.errors import CollectiveMismatchError
from distnb.options import ReduceOp

if TYPE_CHECKING:
    from distnb.collectives.algorithms.aggregation import Aggregation

__all__ = ["combine_over_replicas"]

# Below this many elements a message's latency counts and its bytes do not: everything travels as float64.
_SMALL = 65536
# A mark of the pack's layout travels within it. Sums of marks must be exact, in float32 too.
_MARKS = 1 << 16


def combine_over_replicas(
    aggregation: Aggregation, op: ReduceOp, tensors: Sequence[torch.Tensor], layout: object = None
) -> list[torch.Tensor]:
    """The elementwise sum or mean of each tensor over all replicas.

    Several tensors travel in one message per kind of number, or in as many packs as the strategy was told. Half
    precision is added up in single precision.

    Args:
        aggregation: The replicas, and how they add up.
        op: SUM, or MEAN of floating-point tensors.
        tensors: The same number on each, with equal shapes and dtypes.
        layout: Must have an equal repr on all replicas, too.

    Returns:
        New tensors, in the dtypes and on the devices of those given.

    Raises:
        CollectiveMismatchError: The replicas' tensors differ in shape.
    """
    with torch.no_grad():
        if not tensors:
            return []
        if len(tensors) == 1 and layout is None:
            return [_combine_alone(aggregation, op, tensors[0])]
        by_kind: dict[torch.dtype, list[int]] = {}
        small = sum(tensor.numel() for tensor in tensors) <= _SMALL
        for place, tensor in enumerate(tensors):
            by_kind.setdefault(_wire_dtype(tensor.dtype, small), []).append(place)
        results: dict[int, torch.Tensor] = {}
        for dtype, places in by_kind.items():
            for pack in aggregation.packs.cut([tensors[place].numel() * dtype.itemsize for place in places]):
                chosen = [places[index] for index in pack]
                combined = _combine_pack(aggregation, op, [tensors[place] for place in chosen], dtype, layout)
                results.update(zip(chosen, combined, strict=True))
        return [results[place] for place in range(len(tensors))]


def _wire_dtype(dtype: torch.dtype, small: bool) -> torch.dtype:
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.int64
    if small or dtype in (torch.float64, torch.complex128):
        return torch.float64
    return torch.float32


def _combine_alone(aggregation: Aggregation, op: ReduceOp, tensor: torch.Tensor) -> torch.Tensor:
    dtype = tensor.dtype
    wire = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        wire = torch.int64
    # Always a copy: the sum must not be written into the user's tensor.
    message = tensor.detach().to(torch_device(aggregation.group.device), wire, copy=True).contiguous()
    aggregation.all_reduce(torch.view_as_real(message) if wire.is_complex else message, op)
    return message.to(tensor.device, dtype)


def _combine_pack(
    aggregation: Aggregation, op: ReduceOp, tensors: Sequence[torch.Tensor], wire: torch.dtype, layout: object
) -> list[torch.Tensor]:
    device = torch_device(aggregation.group.device)
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    parts = [tensor.detach().reshape(-1).to(device, wire) for tensor in real]
    if aggregation.exact:
        mark = float(zlib.crc32(repr(([tuple(tensor.shape) for tensor in tensors], layout)).encode()) % _MARKS)
        message = torch.cat([*parts, torch.tensor([mark], dtype=wire, device=device)])
        aggregation.all_reduce(message, op)
        _check_mark(float(message[-1]), mark * (aggregation.group.size if op is ReduceOp.SUM else 1), tensors)
    else:
        # An algorithm of the user's may round, and a mark with it.
        aggregation.group.note_pack(tensors, layout)
        message = torch.cat(parts)
        aggregation.all_reduce(message, op)
    return _cut_up(message, tensors, real)


def _check_mark(found: float, expected: float, tensors: Sequence[torch.Tensor]) -> None:
    # Where layouts differ, the mean of the marks differs from the mark of one replica at least: that one raises.
    if found != expected:
        raise CollectiveMismatchError(
            "The replicas reduced structures of tensors with different shapes; here they are "
            f"{[tuple(tensor.shape) for tensor in tensors]}. Give tensors of equal shapes on every replica."
        )


def _cut_up(message: torch.Tensor, tensors: Sequence[torch.Tensor], real: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The message's parts in the form of the tensors, of which `real` are views in real numbers."""
    combined = []
    begin = 0
    for tensor, flat in zip(tensors, real, strict=True):
        end = begin + flat.numel()
        piece = message[begin:end].view(flat.shape)
        if tensor.is_complex():
            piece = torch.view_as_complex(piece.contiguous())
        combined.append(piece.to(tensor.device, tensor.dtype, copy=True))
        begin = end
    return combined
