"""Collectives that gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from distnb.options import ReduceOp
from distnb.runtime.reduction.gathering import gathered_parts
from distnb.runtime.reduction.packed_sums import combine_over_replicas

if TYPE_CHECKING:
    from distnb.collectives.algorithms.aggregation import Aggregation

__all__ = ["all_gather", "all_reduce"]


class _AllReduce(torch.autograd.Function):
    """Sum or mean; its gradient is the same operation on the upstream gradients."""

    @staticmethod
    def forward(
        ctx: Any, aggregation: Aggregation, op: ReduceOp, layout: object, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.aggregation, ctx.op = aggregation, op
        return tuple(combine_over_replicas(aggregation, op, tensors, layout))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        # Through the Function again, so that second derivatives are right too.
        return None, None, None, *_apply_all_reduce(ctx.aggregation, ctx.op, None, *upstream)


_apply_all_reduce: Any = _AllReduce.apply


class _AllGather(torch.autograd.Function):
    """Concatenation; its gradient is the sum, over the replicas, of their gradients for this replica's part."""

    @staticmethod
    def forward(ctx: Any, aggregation: Aggregation, axis: int, tensor: torch.Tensor) -> torch.Tensor:
        group = aggregation.group
        parts = gathered_parts(group, tensor, axis, "all_gather")
        ctx.aggregation, ctx.axis, ctx.size = aggregation, axis, tensor.shape[axis]
        ctx.begin = sum(part.shape[axis] for part in parts[: group.rank])
        return torch.cat(parts, dim=axis)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        (total,) = _apply_all_reduce(ctx.aggregation, ReduceOp.SUM, None, upstream)
        return None, None, total.narrow(ctx.axis, ctx.begin, ctx.size)


_apply_all_gather: Any = _AllGather.apply


def all_reduce(
    aggregation: Aggregation, op: ReduceOp, tensors: Sequence[torch.Tensor], layout: object = None
) -> list[torch.Tensor]:
    """The sum (or mean, for floating point) of each tensor over the replicas.

    Args:
        aggregation: The replicas, and how they add up.
        op: SUM or MEAN.
        tensors: Equal shapes and dtypes on every replica. Integers take part, gradients flow past them.
        layout: Must have an equal repr on all replicas, too.
    """
    return list(cast("tuple[torch.Tensor, ...]", _apply_all_reduce(aggregation, op, layout, *tensors)))


def all_gather(aggregation: Aggregation, tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The replicas' tensors concatenated along an axis (from 0), along which their sizes may differ."""
    return cast("torch.Tensor", _apply_all_gather(aggregation, axis, tensor))
