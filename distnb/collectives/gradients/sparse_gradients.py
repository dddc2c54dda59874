"""Sparse gradients (`Embedding(sparse=True)`): rows are gathered from all replicas, and added up."""

from __future__ import annotations

import torch

from distnb.collectives.gradients.buckets import ReducingGroup
from distnb.collectives.gradients.flat_packing import Slot
from distnb.collectives.group.interface import Group

__all__ = ["reduce_sparse", "sum_entries"]


def sum_entries(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a sparse (COO) tensor over the replicas, of equal shape and dtype on each: coalesced, without a graph.

    Raises:
        CollectiveMismatchError: The replicas' tensors differ in shape or dtype.
    """
    with torch.no_grad():
        local = tensor.detach().coalesce()
        group.note_pack([local], f"sparse {local.sparse_dim()}")
        indices = torch.cat(group.all_gather_uneven(local.indices().t().contiguous()))
        values = torch.cat(group.all_gather_uneven(local.values()))
        return torch.sparse_coo_tensor(indices.t(), values, local.shape, check_invariants=False).coalesce()


def reduce_sparse(group: ReducingGroup, slot: Slot, gradient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    """Sum one sparse gradient over the replicas.

    Args:
        group: The replicas.
        slot: The gradient's shape, dtype and device.
        gradient: This replica's; None where the parameter was not used. A dense one counts too.
        scale: Multiplies this replica's gradient; 0 counts as an empty one.

    Returns:
        A coalesced sparse tensor; None when no replica used the parameter.
    """
    with torch.no_grad():
        if gradient is None or scale == 0.0:
            # A gradient of an empty batch is an empty sum, and still a gradient: -1 says "none at all".
            rows = torch.full((0 if gradient is not None else 1, 1), -1, dtype=torch.int64, device=slot.device)
            values = torch.zeros((len(rows), *slot.shape[1:]), dtype=slot.dtype, device=slot.device)
        else:
            local = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
            rows = local.indices().t().contiguous()
            values = local.values() * scale
        all_rows = torch.cat(group.all_gather_uneven(rows))
        all_values = torch.cat(group.all_gather_uneven(values))
        real = all_rows[:, 0] >= 0
        if gradient is None and not bool(real.any()) and len(all_rows) == group.size:
            return None
        return torch.sparse_coo_tensor(
            all_rows[real].t(), all_values[real], slot.shape, check_invariants=False
        ).coalesce()
