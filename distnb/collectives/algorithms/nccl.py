"""The all-reduce by NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distnb.collectives.algorithms.base import PackedOps
from distnb.errors import OptionError
from distnb.options import ReduceOp

if TYPE_CHECKING:
    import torch

    from distnb.collectives.group.interface import Group

__all__ = ["NcclAllReduce"]


class NcclAllReduce(PackedOps):
    """NCCL's all-reduce. The default algorithm uses it if it can; this one requires it.

    Args:
        num_packs: The number of messages for the gradients of each dtype, and for the tensors of one reduce; 0 sends
            each tensor by itself. With 1 nothing is sent before the backward pass ends.

    Raises:
        OptionError: `num_packs` is negative; or, when a strategy is made, not every replica has a GPU of its own.
    """

    def reduce_implementation(self, op: ReduceOp, tensor: torch.Tensor, replicas: Group) -> torch.Tensor:
        """Implement `CrossDeviceOps.reduce_implementation`."""
        return replicas.all_reduce(tensor, op)

    @property
    def is_groups_own(self) -> bool:  # type: ignore[override]
        """True unless a subclass overrides `reduce_implementation`."""
        return type(self).reduce_implementation is NcclAllReduce.reduce_implementation

    def check(self, devices: Sequence[str], nccl: bool) -> None:
        """Raise OptionError unless NCCL connects the replicas."""
        if not nccl:
            raise OptionError(
                f"{self!r} needs a GPU of its own for each replica, and the replicas have {', '.join(devices)}. Use "
                "HierarchicalCopyAllReduce() or ReductionToOneDevice(), or leave cross_device_ops out."
            )
