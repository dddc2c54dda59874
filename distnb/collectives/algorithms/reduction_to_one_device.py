"""A reduction on one device: one replica receives all tensors, adds them up, and sends the sum to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distnb.collectives.algorithms.base import CrossDeviceOps
from distnb.errors import OptionError
from distnb.options import ReduceOp
from distnb.topology import Device, parse_device

if TYPE_CHECKING:
    import torch

    from distnb.collectives.group.interface import Group

__all__ = ["ReductionToOneDevice"]

_HOST = "cpu:0"


class ReductionToOneDevice(CrossDeviceOps):
    """A reduction that gathers tensors on one device, adds them up there, and copies the result to all replicas.

    Args:
        reduce_to_device: The device of the replica that adds up, or "cpu" for the host memory of replica 0. None means
            replica 0's device.
        accumulation_fn: A function of a list of tensors, one per replica in replica order, that returns their
            elementwise sum in the same shape and dtype. None adds them up one after another. Each tensor may be a
            concatenation of several (see `CrossDeviceOps.reduce_implementation`).

    Raises:
        OptionError: `reduce_to_device` is not a device, or `accumulation_fn` cannot be called; or, when a strategy is
            made, no replica has that device.
    """

    def __init__(
        self,
        reduce_to_device: str | Device | None = None,
        accumulation_fn: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise OptionError(f"accumulation_fn={accumulation_fn!r}: give a function of a list of tensors, or None.")
        self.reduce_to_device = None if reduce_to_device is None else str(parse_device(reduce_to_device))
        self.accumulation_fn = accumulation_fn

    def reduce_implementation(self, op: ReduceOp, tensor: torch.Tensor, replicas: Group) -> torch.Tensor:
        """Implement `CrossDeviceOps.reduce_implementation`."""
        where = self._replica(tuple(map(str, replicas.devices)))
        parts = replicas.gather(tensor, where)
        if parts is not None:
            if self.reduce_to_device == _HOST:
                parts = [part.cpu() for part in parts]
            tensor.copy_(self._accumulate(parts))
            if op is ReduceOp.MEAN:
                tensor.div_(replicas.size)
        return replicas.broadcast(tensor, where)

    def _accumulate(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if self.accumulation_fn is None:
            total = parts[0]
            for part in parts[1:]:
                total.add_(part)
            return total
        from distnb.collectives.algorithms.checked_results import require_like

        like = parts[0]
        what = f"accumulation_fn was given {len(parts)} tensors, {like.dtype}{list(like.shape)} each,"
        total = self.accumulation_fn(parts)
        require_like(total, like, what, "their elementwise sum, in")
        return total

    def _replica(self, devices: Sequence[str]) -> int:
        """Return the replica that adds up."""
        return devices.index(self.reduce_to_device) if self.reduce_to_device in devices else 0

    def check(self, devices: Sequence[str], nccl: bool) -> None:
        """Raise OptionError if the device is neither a replica's nor host memory."""
        where = self.reduce_to_device
        if where is not None and where not in devices and where != _HOST:
            raise OptionError(
                f"reduce_to_device={where!r} is the device of no replica; they have {', '.join(devices)}. Name one of "
                "these, or 'cpu' for the host memory of replica 0, or leave it out."
            )

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and other.reduce_to_device == self.reduce_to_device
            and other.accumulation_fn == self.accumulation_fn
        )

    def __hash__(self) -> int:
        return hash((type(self), self.reduce_to_device, self.accumulation_fn))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(reduce_to_device={self.reduce_to_device!r}, "
            f"accumulation_fn={getattr(self.accumulation_fn, '__name__', self.accumulation_fn)})"
        )
