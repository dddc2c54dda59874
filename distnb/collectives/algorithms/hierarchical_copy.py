"""An all-reduce along a tree: replicas send their tensors to a neighbour, which adds them up; the sum is copied
back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distnb.collectives.algorithms.base import PackedOps
from distnb.options import ReduceOp

if TYPE_CHECKING:
    import torch

    from distnb.collectives.group.interface import Group

__all__ = ["HierarchicalCopyAllReduce", "tree"]

Level = list[tuple[int, int]]


def tree(size: int) -> list[Level]:
    """Return the edges of a binomial tree with replica 0 at its root: (child, parent), the lowest level first.

    At each level half of the replicas that still hold a sum send it to a neighbour, so that tensors of replicas that
    are close to each other (on one machine) are added up first.

    Example:
        >>> tree(5)
        [[(1, 0), (3, 2)], [(2, 0)], [(4, 0)]]
    """
    levels = []
    step = 1
    while step < size:
        levels.append([(parent + step, parent) for parent in range(0, size - step, 2 * step)])
        step *= 2
    return levels


class HierarchicalCopyAllReduce(PackedOps):
    """An all-reduce along a tree, in about 2 log2(replicas) steps that each copy whole tensors.

    Suited to small tensors on many replicas, and to cheap copies between neighbours. For large tensors on many replicas
    a ring moves fewer bytes.

    Args:
        num_packs: The number of messages for the gradients of each dtype, and for the tensors of one reduce; 0 sends
            each tensor by itself.

    Raises:
        OptionError: `num_packs` is negative.
    """

    def reduce_implementation(self, op: ReduceOp, tensor: torch.Tensor, replicas: Group) -> torch.Tensor:
        """Implement `CrossDeviceOps.reduce_implementation`."""
        levels = tree(replicas.size)
        for level in levels:
            part = replicas.exchange(tensor, level)
            if part is not None:
                tensor = tensor.add_(part)
        if op is ReduceOp.MEAN and replicas.rank == 0:
            tensor = tensor.div_(replicas.size)
        for level in reversed(levels):
            total = replicas.exchange(tensor, [(parent, child) for child, parent in level])
            tensor = tensor if total is None else total
        return tensor
