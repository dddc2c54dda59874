"""Where one global batch is cut, and how a batch of any structure is cut there.

The rule is one whatever the dataset: contiguous slices whose sizes differ by at most one, larger ones
first, replica 0 first.
"""

from __future__ import annotations

from typing import Any

import torch

from distnb.input.splitting.layout import count_examples, map_leaves

__all__ = ["cut", "slice_bounds", "slice_sizes", "split_batch"]


def slice_sizes(n: int, replicas: int) -> list[int]:
    """How many examples of a global batch each replica gets.

    Args:
        n: Examples in the global batch, 0 or more.
        replicas: Number of replicas, 1 or more.

    Returns:
        One size per replica.

    Example:
        >>> slice_sizes(8, 3), slice_sizes(6, 4), slice_sizes(2, 4)
        ([3, 3, 2], [2, 2, 1, 1], [1, 1, 0, 0])
    """
    base, extra = divmod(n, replicas)
    return [base + 1] * extra + [base] * (replicas - extra)


def slice_bounds(n: int, replicas: int, replica_id: int) -> tuple[int, int]:
    """First and one-past-last example of one replica's slice.

    Args:
        n: Examples in the global batch.
        replicas: Number of replicas.
        replica_id: Whose slice.

    Example:
        >>> slice_bounds(8, 3, 2)
        (6, 8)
    """
    base, extra = divmod(n, replicas)
    start = replica_id * base + min(replica_id, extra)
    return start, start + base + (replica_id < extra)


def cut(leaf: Any, start: int, stop: int) -> Any:
    """Examples `start` to `stop` of one leaf of a batch; tensors and arrays give views."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
        return leaf.narrow_copy(0, start, stop - start)  # sparse layouts have no views
    return leaf[start:stop]


def split_batch(batch: Any, num_replicas: int) -> list[Any]:
    """Cut a whole batch into the slices of all replicas.

    Args:
        batch: Any structure (dict, list, tuple, namedtuple, dataclass) of tensors, arrays, and lists with one item
            per example. None stays None.
        num_replicas: How many slices.

    Returns:
        One structure like the batch per replica, in replica order; a slice without examples has leaves of shape
        `(0, …)` and empty lists.

    Raises:
        StructureError: Leaves disagree about the number of examples, or one was never batched.

    Example:
        >>> split_batch({"x": torch.arange(3), "name": ["a", "b", "c"]}, 2)
        [{'x': tensor([0, 1]), 'name': ['a', 'b']}, {'x': tensor([2]), 'name': ['c']}]
    """
    count = count_examples(batch)
    bounds = [slice_bounds(count, num_replicas, replica_id) for replica_id in range(num_replicas)]
    return [map_leaves(batch, count, lambda leaf, at=at: cut(leaf, *at)) for at in bounds]  # type: ignore[misc]
