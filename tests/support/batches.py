"""The slices of a batch that replicas should get, by a plain cut, for comparison."""

from __future__ import annotations

from typing import Any

from distnb.input.cutting import count_examples, cut, map_leaves, slice_bounds

__all__ = ["split_batch"]


def split_batch(batch: Any, replicas: int) -> list[Any]:
    """Return the slices of a whole batch for all replicas, in their order."""
    count = count_examples(batch)
    bounds = [slice_bounds(count, replicas, replica_id) for replica_id in range(replicas)]
    return [map_leaves(batch, count, lambda leaf, at=at: cut(leaf, *at)) for at in bounds]  # type: ignore[misc]
