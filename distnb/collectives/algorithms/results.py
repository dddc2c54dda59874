"""What comes out of the user's own functions that add up: whether it can be the result, and is it on all replicas."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from distnb.errors import OptionError

if TYPE_CHECKING:
    from distnb.collectives.algorithms.base import CrossDeviceOps
    from distnb.collectives.group.interface import Group

__all__ = ["confirm_equal", "unfit"]


def unfit(total: object, shape: torch.Size, dtype: torch.dtype) -> str | None:
    """What the result is instead of a dense tensor of this shape and dtype; None where it is one."""
    if not isinstance(total, torch.Tensor):
        return repr(total)
    dense = total.layout == torch.strided
    if dense and not total.is_meta and (total.shape, total.dtype) == (shape, dtype):
        return None
    layout = "" if dense else f" {str(total.layout).removeprefix('torch.')}"
    return f"{total.dtype}{list(total.shape)}{layout}{' without data' if total.is_meta else ''}"


def confirm_equal(group: Group, ops: CrossDeviceOps, total: torch.Tensor) -> None:
    """Compare a result bit by bit with the other replicas', all of which call this.

    Raises:
        OptionError: They differ.
    """
    data = total.cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    digest = hashlib.blake2b(data.tobytes(), digest_size=8).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(total.device)
    group.note(f"{type(ops).__name__}.reduce.finished", (total,))  # as replicas are told that are still in it
    all_of_them = group.all_gather(mine)
    unlike = [rank for rank, each in enumerate(all_of_them) if not torch.equal(each, all_of_them[0])]
    if unlike:
        raise OptionError(
            f"{type(ops).__name__}.reduce_implementation returned another result on replica "
            f"{', '.join(map(str, unlike))} than on replica 0. It must return the same bits on all of them, as "
            "`replicas.all_reduce(tensor, op)` does, or `replicas.broadcast(total)` at its end."
        )
