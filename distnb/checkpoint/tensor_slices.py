"""The replica's parts of sharded tensors (DTensors): to save them, and to restore them from whole or stored tensors.

FSDP2 shards a parameter along its first axis. With 3 replicas, a weight of 4 rows has parts of 2, 2 and 0 rows. This
module loads no code of DTensors, whose import takes long: a process that has one has loaded it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from distnb.checkpoint.stored_tensors import StoredTensor, whole
from distnb.compat import torch_internals
from distnb.errors import OptionError
from distnb.runtime.scopes.divided_objects import require_values

__all__ = ["TensorSlice", "is_sharded", "read_like", "reshard", "slice_of"]


class TensorSlice:
    """A part of a tensor, which this replica saves.

    It is an ordinary class, because a dataclass would be a container in structures.

    Attributes:
        local: The part.
        offset: The place of the part in the whole.
        shape: The shape of the whole.
        is_owned: Whether this replica writes the part. False: the part is empty, or another replica has the same.
    """

    __slots__ = ("is_owned", "local", "offset", "shape")

    def __init__(self, local: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...], is_owned: bool) -> None:
        self.local = local
        self.offset = offset
        self.shape = shape
        self.is_owned = is_owned

    def as_real(self) -> TensorSlice:
        """Return the part with real and imaginary parts along a new last axis."""
        real = torch.view_as_real(self.local.resolve_conj())
        return TensorSlice(real, (*self.offset, 0), (*self.shape, 2), self.is_owned)


def is_sharded(tensor: Any) -> bool:
    """Return whether a value is a DTensor."""
    return isinstance(tensor, torch.Tensor) and torch_internals.local_tensor(tensor) is not None


def slice_of(leaf: Any) -> Any:
    """Return this replica's part of a DTensor; return anything else as it is.

    Raises:
        OptionError: The DTensor is a sum that is not computed yet.
        StaleHandleError: Its values are lost.
    """
    if not is_sharded(leaf):
        return leaf
    require_values([leaf], "a tensor to save")
    if any(each.is_partial() for each in leaf.placements):
        raise OptionError(
            f"A checkpoint cannot hold a DTensor with the placements {leaf.placements}: it is a sum that is not "
            "computed yet. Call `redistribute` first."
        )
    local, (offset, _) = leaf.detach().to_local(), _place(leaf)
    coordinate = leaf.device_mesh.get_coordinate()
    if coordinate is None:  # this replica has no part
        return TensorSlice(local, (0,) * leaf.dim(), tuple(leaf.shape), False)
    copies = [number for number, each in zip(coordinate, leaf.placements, strict=True) if each.is_replicate()]
    is_owned = not any(copies) and (bool(local.numel()) or not (leaf.numel() or any(coordinate)))
    return TensorSlice(local, offset, tuple(leaf.shape), is_owned)


def read_like(leaf: Any, target: Any) -> Any:
    """Return a saved tensor for a target. If the target is sharded, the result is too, and only this part is read.

    Args:
        leaf: A tensor, also a sharded one, or a tensor in files.
        target: The tensor that receives it. None if there is none.
    """
    if not is_sharded(target) or tuple(leaf.shape) != tuple(target.shape):
        return whole(leaf)
    if is_sharded(leaf):
        return leaf
    from torch.distributed.tensor import DTensor

    local = target.detach().to_local()
    offset, shape = _place(target)
    if not local.numel():
        part = torch.empty(local.shape, dtype=leaf.dtype)
    elif isinstance(leaf, StoredTensor):
        part = leaf.read(offset, shape)
    else:
        window = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        part = leaf.detach()[window].clone()  # torch cannot pickle a DTensor whose part is a window on other memory
    device = torch.device(target.device_mesh.device_type) if local.is_meta else local.device
    return DTensor.from_local(
        part.to(device),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def _place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset and the shape of this replica's part."""
    shape, offset = torch_internals.shape_and_offset_of_shard(tensor)
    return tuple(offset), tuple(shape)


def reshard(module: torch.nn.Module) -> None:
    """Free the parameters that FSDP has gathered: after a forward pass, a root's parameters are no DTensors."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return
    for each in module.modules():
        if isinstance(each, fsdp.FSDPModule):
            each.reshard()
