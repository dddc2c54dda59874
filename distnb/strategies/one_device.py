"""Everything on one named device, in the calling process."""

from __future__ import annotations

from typing import ClassVar, Self

from distnb.options import StrategySpec
from distnb.strategies.base import Strategy
from distnb.topology import Device, parse_device

__all__ = ["OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """Computes on one device, where new tensors and modules of its scope and of `run` land.

    It goes through the same steps as a strategy of many replicas, which makes it the way to try a program.

    Args:
        device: torch's spelling (`cuda:1`) or TensorFlow's (`/gpu:1`).

    Raises:
        OptionError: The text is no device.
    """

    kind: ClassVar[str] = "one_device"

    def __new__(cls, device: str | Device) -> Self:
        return cls._of(StrategySpec(cls.kind, (str(parse_device(device)),)))

    def __repr__(self) -> str:
        return f"OneDeviceStrategy({self.spec.devices[0]!r})"
