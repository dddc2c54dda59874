"""The gathering of the replicas' components by concatenation, and the broadcast of one replica's component."""

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
    """Return every replica's tensor in replica order. Sizes may differ only along `axis`, which counts from 0."""
    if tensor.ndim > _MAX_AXES:
        raise OptionError(f"{method} takes tensors of at most {_MAX_AXES} axes and got one of {tensor.ndim}.")
    group.process_group.note((method, f"axis={axis}", None, "cpu"))
    try:
        parts = group.all_gather_uneven(tensor.detach().to(torch_device(group.device)), axis)
    except StructureError as error:
        raise StructureError(f"{method} along axis {axis}: {error}") from None
    return [part.to(tensor.device) for part in parts]


def gather_tensor(group: Group, tensor: torch.Tensor, axis: int, method: str) -> torch.Tensor:
    """Concatenate the replicas' tensors along `axis`."""
    return torch.cat(_gathered_parts(group, tensor, axis, method), dim=axis)


class _AllGather(torch.autograd.Function):
    """The concatenation of the replicas' tensors.

    Its gradient is the sum over all replicas of their gradients for this replica's part.
    """

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
    """Concatenate the replicas' tensors of every leaf along an axis. Gradients flow through.

    Without an aggregation there is one replica: the leaves and the axis are checked, and the tree is returned.
    """
    leaves, shape = flatten(tree)
    tensors = [tensor_of(leaf, "all_gather") for leaf in leaves]
    axes = [checked_axis(axis, tensor, "all_gather") for tensor in tensors]
    if aggregation is None:
        return tree
    gather: Any = _AllGather.apply
    with aggregation.communicating():
        gathered = [gather(aggregation, one, tensor) for tensor, one in zip(tensors, axes, strict=True)]
    return unflatten(shape, gathered)


# -- broadcast of one replica's value ----------------------------------------------------------------------------------


def broadcast_bytes(group: Group, data: bytes | None, source: int) -> bytes:
    """Return the source replica's bytes on all replicas. The other replicas pass None."""
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
    """Return a new tensor with the source replica's values. Shapes and dtypes must be equal on all replicas."""
    with torch.no_grad():
        # Clone, because the elements of an expanded tensor share memory, so it cannot receive values.
        message = tensor.detach().to(torch_device(group.device)).clone(memory_format=torch.contiguous_format)
        if message.numel():
            group.broadcast(message, source)
        return message.to(tensor.device)


def broadcast_tree(group: Group, tree: Any, source: int) -> Any:
    """Return the source replica's structure on all replicas. The other replicas' argument is ignored.

    Tensors on the CPU stay there. Others are placed on the receiving replica's device.

    Raises:
        DistributedValueError: The structure has a value that cannot be pickled.
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
