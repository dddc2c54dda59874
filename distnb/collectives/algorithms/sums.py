"""Differentiable sums and means of tensors over the replicas, packed into few messages. Sparse tensors go
separately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import torch_device
from distnb.collectives.algorithms.flat_packs import Pack, Slot
from distnb.compat import torch_internals
from distnb.options import ReduceOp

if TYPE_CHECKING:
    from distnb.collectives.algorithms.aggregation import Aggregation
    from distnb.collectives.group.interface import Group

__all__ = ["all_reduce", "combine", "is_sparse", "sum_sparse", "wire_dtype"]

# Below this number of elements, latency counts and bytes do not: everything is sent as float64.
_SMALL = 65536


def all_reduce(
    aggregation: Aggregation, op: ReduceOp, tensors: Sequence[torch.Tensor], layout: object = None
) -> list[torch.Tensor]:
    """Combine tensors differentiably: their gradients are the sums or means of the upstream gradients. Sparse ones have
    none."""
    results = dict(enumerate(tensors))
    dense = [place for place, tensor in enumerate(tensors) if not is_sparse(tensor)]
    totals = _apply_all_reduce(aggregation, op, layout, *[tensors[place] for place in dense]) if dense else ()
    results.update(zip(dense, totals, strict=True))
    for place in results.keys() - set(dense):
        (results[place],) = combine(aggregation, op, [tensors[place]])
    return list(results.values())


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, aggregation: Aggregation, op: ReduceOp, layout: object, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.aggregation, ctx.op = aggregation, op
        return tuple(combine(aggregation, op, tensors, layout))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        # By the same Function, so that second derivatives are right, too.
        return None, None, None, *_apply_all_reduce(ctx.aggregation, ctx.op, None, *upstream)


_apply_all_reduce: Any = _AllReduce.apply


def combine(
    aggregation: Aggregation, op: ReduceOp, tensors: Sequence[torch.Tensor], layout: object = None
) -> list[torch.Tensor]:
    """Return the elementwise sum or mean of each tensor over all replicas.

    Several tensors are sent in one message per kind of number, or in as many packs as the strategy's option says. Half
    precision is summed in single precision. Of sparse tensors only the entries are sent. The tensors have the same
    shapes, dtypes and layouts on all replicas, and are not modified. The repr of `layout` must be equal on all
    replicas, too.
    """
    with torch.no_grad():
        results: dict[int, torch.Tensor] = {}
        by_kind: dict[torch.dtype, list[int]] = {}
        small = len(tensors) > 1 and sum(tensor.numel() for tensor in tensors) <= _SMALL
        for place, tensor in enumerate(tensors):
            if is_sparse(tensor):
                with aggregation.communicating():
                    total = sum_sparse(aggregation.group, tensor)
                results[place] = total / aggregation.group.size if op is ReduceOp.MEAN else total
            else:
                by_kind.setdefault(wire_dtype(tensor.dtype, small), []).append(place)
        for dtype, places in by_kind.items():
            for pack in aggregation.packs.cut([tensors[place].numel() * dtype.itemsize for place in places]):
                chosen = [places[index] for index in pack]
                alone = len(tensors) == 1 and layout is None
                combined = _combine_pack(aggregation, op, [tensors[each] for each in chosen], dtype, layout, alone)
                results.update(zip(chosen, combined, strict=True))
        return [results[place] for place in range(len(tensors))]


def wire_dtype(dtype: torch.dtype, small: bool) -> torch.dtype:
    """Return the dtype in which a kind of number is summed. `small` means several small tensors."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.int64
    if small or dtype in (torch.float64, torch.complex128):
        return torch.float64
    return torch.float32


def _combine_pack(
    aggregation: Aggregation,
    op: ReduceOp,
    tensors: Sequence[torch.Tensor],
    wire: torch.dtype,
    layout: object,
    alone: bool,
) -> list[torch.Tensor]:
    device = torch_device(aggregation.group.device)
    real = [torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach() for tensor in tensors]
    if alone:
        # Always a copy: the sum must not be written into the user's tensor.
        totals = [real[0].to(device, wire, copy=True).contiguous()]
        aggregation.all_reduce(totals[0], op)
    else:
        aggregation.group.note_pack(tensors, layout)
        pack = Pack([Slot(shape=tuple(tensor.shape), dtype=wire, device=device) for tensor in real])
        pack.fill(real)
        aggregation.all_reduce(pack.flat, op)
        totals = [view.clone() for view in pack.views]
    return [
        (torch.view_as_complex(total) if tensor.is_complex() else total).to(tensor.device, tensor.dtype)
        for total, tensor in zip(totals, tensors, strict=True)
    ]


# -- sparse rows -------------------------------------------------------------------------------------------------------


def is_sparse(value: object) -> bool:
    """Return whether it is a sparse (COO) tensor."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def sum_sparse(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a sparse (COO) tensor of equal shape and dtype on all replicas, coalesced, without a graph.

    Raises:
        StructureError: The replicas' tensors differ in shape or dtype.
    """
    with torch.no_grad():
        local = tensor.detach().coalesce()
        group.note_pack([local], f"sparse {local.sparse_dim()}")
        indices = torch.cat(group.all_gather_uneven(local.indices().t().contiguous()))
        values = torch.cat(group.all_gather_uneven(local.values()))
        total = torch_internals.sparse_tensor(indices.t(), values, local.shape)
        return total.coalesce()
