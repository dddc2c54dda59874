"""all_reduce and all_gather of nested structures, as `ReplicaContext` offers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import torch_device
from distnb.collectives.gradients.aggregated import mark_aggregated
from distnb.errors import DistributedValueError
from distnb.options import ReduceOp
from distnb.runtime.reduction import differentiable
from distnb.runtime.reduction.gathering import checked_axis
from distnb.runtime.reduction.rules import python_number, tensor_of
from distnb.runtime.reduction.sparse_sums import beside_sparse
from distnb.values.structure import flatten, unflatten

if TYPE_CHECKING:
    from distnb.collectives.algorithms.aggregation import Aggregation

__all__ = ["all_gather_tree", "all_reduce_tree"]


def all_reduce_tree(aggregation: Aggregation, op: ReduceOp, tree: Any) -> Any:
    """Reduce every leaf over the replicas, all in one go. None stays None: gradients of unused parameters are."""
    every, shape = flatten(tree)
    places = [place for place, leaf in enumerate(every) if leaf is not None]
    if not places:
        return tree
    leaves = [every[place] for place in places]
    tensors = []
    for leaf in leaves:
        tensor = tensor_of(leaf, "all_reduce", torch_device(aggregation.group.device), sparse=True)
        if tensor.dtype is torch.bool:
            raise DistributedValueError(
                f"all_reduce {op.name} of booleans is not defined. Convert them first: value.long() counts."
            )
        if op is ReduceOp.MEAN and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.float64)
        tensors.append(tensor)
    # Which leaves are None must be the same everywhere, or others would be added up in their place.
    layout = None if len(leaves) == len(every) else places
    results = beside_sparse(
        aggregation, op, tensors, lambda dense: differentiable.all_reduce(aggregation, op, dense, layout)
    )
    for result in results:
        mark_aggregated(result)
    for place, result, leaf in zip(places, results, leaves, strict=True):
        every[place] = python_number(result, leaf)
    return unflatten(shape, every)


def all_gather_tree(aggregation: Aggregation | None, tree: Any, axis: int) -> Any:
    """Gather every leaf along an axis; without replicas only check that this could be done."""
    leaves, shape = flatten(tree)
    tensors = [tensor_of(leaf, "all_gather") for leaf in leaves]
    axes = [checked_axis(axis, tensor, "all_gather") for tensor in tensors]
    if aggregation is None:
        return tree
    with aggregation.communicating():
        pairs = zip(tensors, axes, strict=True)
        gathered = [differentiable.all_gather(aggregation, tensor, one) for tensor, one in pairs]
    return unflatten(shape, gathered)
