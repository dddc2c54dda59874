"""One strategy's way to bring tensors together, on one group of replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distnb.collectives.cross_device.base import CrossDeviceOps
from distnb.collectives.cross_device.nccl import NcclAllReduce
from distnb.collectives.cross_device.packs import Packs
from distnb.collectives.cross_device.replicas import Replicas
from distnb.errors import OptionError
from distnb.options import ReduceOp

if TYPE_CHECKING:
    from distnb.collectives.buckets import Started
    from distnb.collectives.group import Group

__all__ = ["Aggregation"]


class Aggregation:
    """Sums and means over the replicas, by the algorithm that a strategy was given.

    Args:
        group: The replicas.
        ops: The algorithm; None for the group's own.
        packs: How tensors that are reduced together are packed.

    Attributes:
        group, packs: As given.
        exact: Whether the group itself adds up, so that distnb's own marks may ride with the data.
    """

    def __init__(self, group: Group, ops: CrossDeviceOps | None = None, packs: Packs | None = None) -> None:
        self.group = group
        self.packs = packs or Packs()
        self.exact = ops is None or type(ops).reduce is NcclAllReduce.reduce
        self._ops = None if self.exact else ops
        self._replicas = Replicas(group)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        """Replace the tensor (contiguous, of real numbers) by the sum or mean over all replicas."""
        if self._ops is None or not tensor.numel():
            self.group.all_reduce(tensor, op.value.lower())
            return
        with torch.no_grad():
            given = tensor.detach()
            total = self._ops.reduce(op, given, self._replicas)
            if total is given:
                return
            if not isinstance(total, torch.Tensor) or total.shape != tensor.shape or total.dtype != tensor.dtype:
                got = f"{total.dtype}{list(total.shape)}" if isinstance(total, torch.Tensor) else repr(total)
                raise OptionError(
                    f"{type(self._ops).__name__}.reduce was given {tensor.dtype}{list(tensor.shape)} and returned "
                    f"{got}. It must return a tensor of the same shape and dtype."
                )
            tensor.copy_(total)

    def all_reduce_start(self, tensor: torch.Tensor) -> Started:
        """Begin to sum in place; an algorithm of the strategy's own has done so when this returns."""
        if self._ops is None:
            return self.group.all_reduce_start(tensor)
        self.all_reduce(tensor)
        return _DONE


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


_DONE = _Done()
