"""Bringing the replicas' components together: concatenated, or one replica's for all."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import torch_device
from distnb.errors import DistributedValueError, OptionError, StructureError
from distnb.values.structure import flatten, unflatten

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = [
    "broadcast_bytes",
    "broadcast_like",
    "broadcast_tree",
    "checked_axis",
    "gather_tensor",
    "gathered_parts",
    "require_dense",
]

_MAX_RANK = 16
_DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)


def checked_axis(axis: object, tensor: torch.Tensor, method: str) -> int:
    """The axis as a number from 0.

    Raises:
        OptionError: It is no whole number or out of range, or the tensor has no axis.
    """
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise OptionError(f"{method} needs one whole number as axis and got {axis!r}.")
    if tensor.ndim == 0:
        raise OptionError(
            f"{method} along axis {axis}: the value is a scalar on each replica and has no axis. Give it one first "
            "(value.reshape(1)), or use reduce."
        )
    if not -tensor.ndim <= axis < tensor.ndim:
        raise OptionError(
            f"{method} along axis {axis}: the value has shape {tuple(tensor.shape)}, so axis is in [{-tensor.ndim}, "
            f"{tensor.ndim})."
        )
    return axis % tensor.ndim


def require_dense(tensor: torch.Tensor, method: str) -> None:
    """Raises NotImplementedError for a sparse tensor."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"{method} takes dense tensors and got a {tensor.layout} one. Use value.to_dense().")


def gathered_parts(group: Group, tensor: torch.Tensor, axis: int, method: str) -> list[torch.Tensor]:
    """Every replica's tensor, in replica order; they may differ in size along `axis`.

    Args:
        group: The replicas.
        tensor: This replica's tensor.
        axis: From 0.
        method: The user's call, for errors.

    Raises:
        StructureError: Dtypes, ranks, or sizes along another axis differ.
    """
    with torch.no_grad():
        shapes = _all_shapes(group, tensor, axis, method)
        sizes = [shape[axis] for shape in shapes]
        message = tensor.detach().to(torch_device(group.device))
        if tensor.dtype is torch.bool:
            message = message.view(torch.uint8)
        elif tensor.is_complex():
            message = torch.view_as_real(message)
        longest = max(sizes)
        if message.shape[axis] < longest:
            padded = message.new_zeros([longest if dim == axis else extent for dim, extent in enumerate(message.shape)])
            padded.narrow(axis, 0, message.shape[axis]).copy_(message)
            message = padded
        if message.numel() == 0:
            return [tensor.detach().new_empty(shape) for shape in shapes]
        parts = group.all_gather(message.contiguous())
        return [_restored(part.narrow(axis, 0, size), tensor) for part, size in zip(parts, sizes, strict=True)]


def _restored(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.dtype is torch.bool:
        part = part.contiguous().view(torch.bool)
    elif like.is_complex():
        part = torch.view_as_complex(part.contiguous())
    return part.to(like.device)


def _all_shapes(group: Group, tensor: torch.Tensor, axis: int, method: str) -> list[tuple[int, ...]]:
    if tensor.ndim > _MAX_RANK:
        raise OptionError(f"{method} takes tensors of at most {_MAX_RANK} axes and got one of {tensor.ndim}.")
    mine = [tensor.ndim, _DTYPES.index(tensor.dtype), axis, *tensor.shape, *[0] * (_MAX_RANK - tensor.ndim)]
    heads = group.all_gather(torch.tensor(mine, dtype=torch.int64, device=torch_device(group.device)))
    found = [head.tolist() for head in heads]
    shapes = [tuple(head[3 : 3 + head[0]]) for head in found]

    def fixed(head: list[int]) -> list[int]:
        return [extent for place, extent in enumerate(head) if place != 3 + axis]

    if any(fixed(head) != fixed(found[0]) for head in found):
        shown = "\n".join(
            f"  replica {r}: {_DTYPES[head[1]]}, shape {shape}, axis {head[2]}"
            for r, (head, shape) in enumerate(zip(found, shapes, strict=True))
        )
        raise StructureError(
            f"{method} along axis {axis}: only the sizes along that axis may differ between replicas.\n{shown}"
        )
    return shapes


def gather_tensor(group: Group, tensor: torch.Tensor, axis: int, method: str) -> torch.Tensor:
    """The replicas' tensors concatenated along `axis`."""
    return torch.cat(gathered_parts(group, tensor, axis, method), dim=axis)


# -- one replica's value for all ---------------------------------------------------------------------------------------


def broadcast_bytes(group: Group, data: bytes | None, source: int) -> bytes:
    """Bytes of the source replica; the others give None."""
    device = torch_device(group.device)
    length = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64, device=device)
    group.broadcast(length, source)
    count = int(length)
    if data is not None:
        message = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
            if count
            else torch.empty(0, dtype=torch.uint8)
        )
    else:
        message = torch.empty(count, dtype=torch.uint8, device=device)
    if count:
        group.broadcast(message, source)
    return bytes(message.cpu().numpy().tobytes())


def broadcast_like(group: Group, tensor: torch.Tensor, source: int) -> torch.Tensor:
    """A new tensor with what the source replica gives; shapes and dtypes must be equal on all."""
    with torch.no_grad():
        # New memory: an expanded tensor shares its elements' and cannot be written to.
        message = tensor.detach().to(torch_device(group.device)).clone(memory_format=torch.contiguous_format)
        if message.numel():
            group.broadcast(_as_bytes(message), source)
        return message.to(tensor.device)


def broadcast_tree(group: Group, tree: Any, source: int) -> Any:
    """A whole structure of the source replica; what the others give is only a place holder.

    Tensors travel raw, everything else pickled. Tensors land on the receiving replica's device of the same type.
    """
    sending = group.rank == source
    if not sending:
        model, kinds, rest = pickle.loads(broadcast_bytes(group, None, source))
        tensors = [_receive(group, kind, source) for kind in kinds]
        return _assembled(model, tensors, rest)
    leaves, shape = flatten(tree)
    tensors = [leaf for leaf in leaves if _is_plain_tensor(leaf)]
    # Place holders keep the containers picklable without their tensors.
    model = unflatten(shape, range(len(leaves)))
    rest = {place: leaf for place, leaf in enumerate(leaves) if not _is_plain_tensor(leaf)}
    kinds = [(tuple(tensor.shape), tensor.dtype, tensor.device.type) for tensor in tensors]
    try:
        head = pickle.dumps((model, kinds, rest))
    except Exception as error:
        raise DistributedValueError(
            f"broadcast cannot send this value: {error}. Give tensors and plain Python values."
        ) from error
    broadcast_bytes(group, head, source)
    for tensor in tensors:
        _send(group, tensor, source)
    return tree


def _is_plain_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _send(group: Group, tensor: torch.Tensor, source: int) -> None:
    if tensor.numel():
        with torch.no_grad():
            group.broadcast(_as_bytes(tensor.detach().to(torch_device(group.device)).contiguous()), source)


def _receive(group: Group, kind: tuple[Sequence[int], torch.dtype, str], source: int) -> torch.Tensor:
    shape, dtype, device_type = kind
    tensor = torch.empty(tuple(shape), dtype=dtype, device=torch_device(group.device))
    if tensor.numel():
        group.broadcast(_as_bytes(tensor), source)
    return tensor if tensor.device.type == device_type or device_type != "cpu" else tensor.cpu()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _assembled(model: Any, tensors: Sequence[torch.Tensor], rest: dict[int, Any]) -> Any:
    arrived = iter(tensors)
    places, shape = flatten(model)
    return unflatten(shape, [rest[place] if place in rest else next(arrived) for place in places])
