"""An all-reduce along a tree: tensors are copied from replica to replica and added up, and the sum is copied back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distnb.collectives.algorithms.base import PackedOps
from distnb.options import ReduceOp

if TYPE_CHECKING:
    import torch

    from distnb.collectives.algorithms.replicas import Replicas

__all__ = ["HierarchicalCopyAllReduce", "tree"]

Level = list[tuple[int, int]]


def tree(size: int) -> list[Level]:
    """Return the edges of a binomial tree with replica 0 at its root: (child, parent), the lowest level first.

    In each level half of those replicas that still hold a sum give it to a neighbour, so that replicas that are close
    to each other (on one machine) are added up first.

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
    """Sums along a tree of copies: about 2 log2(replicas) steps, in each of which whole tensors are copied.

    Good for small tensors on many replicas, and where copies between neighbours are cheap. Large tensors on many
    replicas travel less far in a ring.

    Args:
        num_packs: Into so many messages the gradients of each dtype go, and the tensors of one reduce; 0 for one
            message each.

    Raises:
        OptionError: `num_packs` is negative.
    """

    def reduce_implementation(self, op: ReduceOp, tensor: torch.Tensor, replicas: Replicas) -> torch.Tensor:
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
