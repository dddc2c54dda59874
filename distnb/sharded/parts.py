"""Parts of sharded tensors that a replica holds, made of whole ones."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from distnb.compat import torch_internals

__all__ = ["fill_part", "is_whole", "local_part", "part_of"]


def is_whole(value: Any, parameter: Any) -> bool:
    """Return whether a value is a whole tensor for a parameter of which this replica holds a part."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return False
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def part_of(whole: torch.Tensor, like: Any) -> DTensor:
    """Return this replica's part of a whole tensor, divided like another tensor, and on its device."""
    part = torch.empty_like(like, dtype=whole.dtype)
    fill_part(part, whole)
    return cast("DTensor", part)


def fill_part(part: Any, whole: torch.Tensor) -> None:
    """Copy this replica's part of a whole tensor to a sharded one, or all of it to an ordinary one."""
    if not isinstance(part, DTensor):
        part.detach().copy_(whole)
        return
    shape, offset = torch_internals.shape_and_offset_of_shard(part)
    window = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
    with torch.no_grad():
        local_part(part).copy_(whole[window])


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this replica's part of a tensor: an ordinary tensor itself."""
    own = torch_internals.local_tensor(tensor)
    return tensor if own is None else own
