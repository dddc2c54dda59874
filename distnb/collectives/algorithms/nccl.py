"""The all-reduce by NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distnb.collectives.algorithms.base import PackedOps
from distnb.errors import OptionError
from distnb.options import ReduceOp

if TYPE_CHECKING:
    import torch

    from distnb.collectives.algorithms.replicas import Replicas

__all__ = ["NcclAllReduce"]


class NcclAllReduce(PackedOps):
    """NCCL's all-reduce, which the default algorithm uses where it can, and which this one requires.

    Args:
        num_packs: Into so many messages the gradients of each dtype go, and the tensors of one reduce; 0 for one
            message each. With 1 nothing is sent before the backward pass has ended.

    Raises:
        OptionError: `num_packs` is negative; a strategy whose replicas have no GPU each raises it when it is made.
    """

    def reduce_implementation(self, op: ReduceOp, tensor: torch.Tensor, replicas: Replicas) -> torch.Tensor:
        """Implement `CrossDeviceOps.reduce_implementation`."""
        return replicas.all_reduce(tensor, op)

    @property
    def is_groups_own(self) -> bool:  # type: ignore[override]
        """True, unless a subclass adds up otherwise."""
        return type(self).reduce_implementation is NcclAllReduce.reduce_implementation

    def check(self, devices: Sequence[str], nccl: bool) -> None:
        """Raise OptionError unless NCCL connects the replicas."""
        if not nccl:
            raise OptionError(
                f"{self!r} needs a GPU of its own for each replica, and the replicas have {', '.join(devices)}. Use "
                "HierarchicalCopyAllReduce() or ReductionToOneDevice(), or leave cross_device_ops out."
            )
