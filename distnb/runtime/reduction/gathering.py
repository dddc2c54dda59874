"""Bringing the replicas' components together: concatenated, or one replica's for all."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch.serialization import default_restore_location

from distnb.accelerators import torch_device
from distnb.collectives.algorithms.sums import all_reduce
from distnb.errors import DistributedValueError, OptionError, StructureError
from distnb.options import ReduceOp
from distnb.runtime.reduction.reducing import checked_axis, tensor_of
from distnb.values.structure import flatten, map_structure, unflatten

if TYPE_CHECKING:
    from distnb.collectives.algorithms.aggregation import Aggregation
    from distnb.collectives.group.interface import Group

__all__ = ["all_gather_tree", "broadcast_bytes", "broadcast_like", "broadcast_tree", "gather_tensor"]

_MAX_AXES = 13


def _gathered_parts(group: Group, tensor: torch.Tensor, axis: int, method: str) -> list[torch.Tensor]:
    """Every replica's tensor, in replica order; they may differ in size along `axis` (from 0) only."""
    if tensor.ndim > _MAX_AXES:
        raise OptionError(f"{method} takes tensors of at most {_MAX_AXES} axes and got one of {tensor.ndim}.")
    group.note(f"{method} along axis {axis}", ())
    try:
        parts = group.all_gather_uneven(tensor.detach().to(torch_device(group.device)), axis)
    except StructureError as error:
        raise StructureError(f"{method} along axis {axis}: {error}") from None
    return [part.to(tensor.device) for part in parts]


def gather_tensor(group: Group, tensor: torch.Tensor, axis: int, method: str) -> torch.Tensor:
    """Concatenate the replicas' tensors along `axis`."""
    return torch.cat(_gathered_parts(group, tensor, axis, method), dim=axis)


class _AllGather(torch.autograd.Function):
    """Concatenation; its gradient is the sum, over the replicas, of their gradients for this replica's part."""

    @staticmethod
    def forward(ctx: Any, aggregation: Aggregation, axis: int, tensor: torch.Tensor) -> torch.Tensor:
        parts = _gathered_parts(aggregation.group, tensor, axis, "all_gather")
        ctx.aggregation, ctx.axis, ctx.size = aggregation, axis, tensor.shape[axis]
        ctx.begin = sum(part.shape[axis] for part in parts[: aggregation.group.rank])
        return torch.cat(parts, dim=axis)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        (total,) = all_reduce(ctx.aggregation, ReduceOp.SUM, [upstream])
        return None, None, total.narrow(ctx.axis, ctx.begin, ctx.size)


def all_gather_tree(aggregation: Aggregation | None, tree: Any, axis: int) -> Any:
    """Concatenate every leaf along an axis, open to autograd; without replicas only check that this could be done."""
    leaves, shape = flatten(tree)
    tensors = [tensor_of(leaf, "all_gather") for leaf in leaves]
    axes = [checked_axis(axis, tensor, "all_gather") for tensor in tensors]
    if aggregation is None:
        return tree
    gather: Any = _AllGather.apply
    with aggregation.communicating():
        gathered = [gather(aggregation, one, tensor) for tensor, one in zip(tensors, axes, strict=True)]
    return unflatten(shape, gathered)


# -- one replica's value for all ---------------------------------------------------------------------------------------


def broadcast_bytes(group: Group, data: bytes | None, source: int) -> bytes:
    """Bytes of the source replica; the others give None."""
    device = torch_device(group.device)
    length = torch.tensor([len(data or b"")], dtype=torch.int64, device=device)
    group.broadcast(length, source)
    message = torch.empty(int(length), dtype=torch.uint8, device=device)
    if data:
        message.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if message.numel():
        group.broadcast(message, source)
    return bytes(message.cpu().numpy().tobytes())


def broadcast_like(group: Group, tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Return a new tensor with the source replica's values; shapes and dtypes must be equal on all."""
    with torch.no_grad():
        # New memory: an expanded tensor shares its elements' and cannot be written to.
        message = tensor.detach().to(torch_device(group.device)).clone(memory_format=torch.contiguous_format)
        if message.numel():
            group.broadcast(message, source)
        return message.to(tensor.device)


def broadcast_tree(group: Group, tree: Any, source: int) -> Any:
    """Return a whole structure of the source replica; the others' argument is only a placeholder.

    Tensors land on the receiving replica's device of the same type.
    """
    data = None
    if group.rank == source:
        written = io.BytesIO()
        try:
            torch.save(
                map_structure(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree), written
            )
        except Exception as error:
            raise DistributedValueError(
                f"broadcast cannot send this value: {error}. Give tensors and plain Python values."
            ) from error
        data = written.getvalue()
    received = broadcast_bytes(group, data, source)
    if group.rank == source:
        return tree
    device = str(torch_device(group.device))

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else default_restore_location(storage, device)

    return torch.load(io.BytesIO(received), map_location=place, weights_only=False)
