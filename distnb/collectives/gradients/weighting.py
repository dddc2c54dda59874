"""What a replica's gradients count in the aggregate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from distnb.collectives.gradients.buckets import Sums

__all__ = ["Weighting", "exact", "sum_of_weights", "weighting_of"]


class Weighting(NamedTuple):
    """What this replica's gradients count in the aggregate.

    Attributes:
        scale: Multiplies the gradients that the pass made; 0 for an empty slice, whatever they hold.
        local_scale: Multiplies parts that were gathered under no_sync.
        weight: The weight that rides with the bucket.
        divide_by_weight: Divide by the sum of the weights afterwards.
    """

    scale: float = 1.0
    local_scale: float = 1.0
    weight: float = 1.0
    divide_by_weight: bool = False


_SUM = Weighting()


def weighting_of(reduction: Literal["sum", "mean"], share: tuple[int, int | None] | None, replicas: int) -> Weighting:
    """What this replica's gradients count.

    Args:
        reduction: "sum", or "mean": weighted by the sizes of the replicas' slices.
        share: The size of this replica's slice, and of the whole batch where it is known; None where there is no
            distributed batch: then all replicas count alike.
        replicas: How many there are.
    """
    if reduction == "sum":
        return _SUM
    if share is None:
        return Weighting(1 / replicas, 1 / replicas)
    size, total = share
    if total is None:
        return Weighting(size, size, size, divide_by_weight=True)
    return Weighting(size / max(total, 1), 1 / replicas)


def exact(weighting: Weighting, group: Sums, device: torch.device) -> Weighting:
    """The same, with the weights summed apart from the gradients, whose own dtype would round them."""
    share = weighting.weight / sum_of_weights(group, weighting.weight, device)
    return Weighting(share, share)


def sum_of_weights(group: Sums, weight: float, device: torch.device) -> float:
    """The sum of all replicas' weights, exactly; 1 where all are zero."""
    total = torch.tensor([weight], dtype=torch.float64, device=device)
    group.all_reduce(total)
    return max(float(total), 1.0)
