"""Aggregation that can itself be differentiated, for `backward(create_graph=True)`."""

from __future__ import annotations

from typing import Any

import torch

from distnb.collectives.gradients.buckets import Sums
from distnb.collectives.gradients.flat_packing import Pack, Slot

__all__ = ["reduce_with_graph"]


class _Reduce(torch.autograd.Function):
    """Sums tensors over the replicas. The gradient of a sum over replicas is the sum of the upstream gradients."""

    @staticmethod
    def forward(ctx: Any, sums: Sums, slots: list[Slot], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sums, ctx.slots = sums, slots
        return tuple(_sum(sums, slots, tensors))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *_Reduce.apply(ctx.sums, ctx.slots, *upstream))  # type: ignore[no-untyped-call]


def _sum(sums: Sums, slots: list[Slot], tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    summed: dict[int, torch.Tensor] = {}
    kinds = dict.fromkeys((slot.device, slot.dtype) for slot in slots)
    for kind in kinds:
        indices = [index for index, slot in enumerate(slots) if (slot.device, slot.dtype) == kind]
        pack = Pack([slots[index] for index in indices])
        pack.fill([tensors[index] for index in indices])
        sums.all_reduce(pack.wire)
        summed.update(zip(indices, (view.clone() for view in pack.views), strict=True))
    return [summed[index] for index in range(len(slots))]


def reduce_with_graph(sums: Sums, slots: list[Slot], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sum gradients over the replicas, keeping their history.

    Args:
        sums: Adds up over the replicas.
        slots: How the gradients look.
        gradients: This replica's, with zeros where it has none.
    """
    return list(_Reduce.apply(sums, slots, *gradients))  # type: ignore[no-untyped-call]
