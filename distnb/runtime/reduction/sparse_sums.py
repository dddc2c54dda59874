"""Sparse tensors among those that are summed or averaged over the replicas: of these only the entries travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from distnb.collectives.gradients.sparse_gradients import sum_entries
from distnb.options import ReduceOp

if TYPE_CHECKING:
    from distnb.collectives.algorithms.aggregation import Aggregation

__all__ = ["beside_sparse", "is_entries"]


def is_entries(value: object) -> bool:
    """Whether it is a sparse (COO) tensor."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def beside_sparse(
    aggregation: Aggregation,
    op: ReduceOp,
    tensors: Sequence[torch.Tensor],
    dense: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Combine tensors over the replicas, in the order given.

    Args:
        aggregation: The replicas, and how they communicate.
        op: SUM, or MEAN of floating-point tensors.
        tensors: Equal shapes, dtypes and layouts on every replica.
        dense: Combines those that are not sparse.
    """
    places = [place for place, tensor in enumerate(tensors) if not is_entries(tensor)]
    results = dict(zip(places, dense([tensors[place] for place in places]), strict=True)) if places else {}
    for place, tensor in enumerate(tensors):
        if place not in results:
            with aggregation.communicating():
                total = sum_entries(aggregation.group, tensor)
            results[place] = total / aggregation.group.size if op is ReduceOp.MEAN else total
    return [results[place] for place in range(len(tensors))]
