"""FSDP's collectives in memory that the replicas of one machine share. Where they share none, FSDP's own are used.

FSDP computes the tensors of a collective in memory that it asks for, so nothing is copied for the communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from distnb.collectives.eager import methods_always_eager
from distnb.collectives.group.process_group import OWN, GuardedProcessGroup
from distnb.collectives.shared_memory.shared_sum import SHARDS, SharedSum, SharedWork
from distnb.collectives.verify.signature import of_tensors
from distnb.compat.fsdp_internals import DefaultAllGather, DefaultReduceScatter

__all__ = ["AllGather", "ReduceScatter"]

_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "mean"}


class AllGather(DefaultAllGather):
    """The gather of a unit's parameters.

    Args:
        group: The replicas over which the unit is divided.
    """

    def __init__(self, group: GuardedProcessGroup) -> None:
        super().__init__()
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the parameters of all replicas."""
        numel, memory = math.prod(map(int, size)), _memory(self._group, device)
        room = None if memory is None else memory.common_room(numel, dtype)
        return super().allocate(size, dtype=dtype, device=device) if room is None else room

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Begin a gather. FSDP waits for the work, and deletes it when it has read the output."""
        if output_tensor.device.type == "cpu":
            key = of_tensors(f"{OWN}all_gather_shards", None, None, [output_tensor])
            work = group.start_sharded(key, input_tensor, output_tensor, SHARDS)
            if work is not None:
                return _Gather(work)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class ReduceScatter(DefaultReduceScatter):
    """The reduction of a unit's gradients.

    Args:
        group: The replicas over which the unit is divided.
    """

    def __init__(self, group: GuardedProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._is_input = False

    def begin(self) -> None:
        """Prepare for a reduction: FSDP asks for memory for its input, and then for its output, which it keeps."""
        self._is_input = True

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the gradients of this replica, or for its part of their sum."""
        is_input, self._is_input = self._is_input, False
        memory = _memory(self._group, device) if is_input else None
        room = None if memory is None else memory.room(math.prod(map(int, size)), dtype)
        return super().allocate(size, dtype=dtype, device=device) if room is None else room

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce gradients, and wait for the result."""
        if input_tensor.device.type == "cpu" and (name := _OPS.get(op)) is not None:
            key = of_tensors(f"{OWN}reduce_scatter", hash(op), None, [input_tensor])
            work = group.start_sharded(key, output_tensor, input_tensor, name)
            if work is not None:
                work.wait()
                return None
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _memory(group: GuardedProcessGroup, device: torch.device) -> SharedSum | None:
    return group.shared_memory("cpu") if device.type == "cpu" else None


@methods_always_eager
class _Gather(dist.Work):
    def __init__(self, work: SharedWork) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        return True
