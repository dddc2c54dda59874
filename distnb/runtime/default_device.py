"""The replica's device as the place where new tensors land."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from distnb.accelerators import torch_device
from distnb.topology import Device

__all__ = ["placed_on"]

_NOWHERE_ELSE = nullcontext()


def placed_on(device: Device) -> AbstractContextManager[Any]:
    """A context in which new tensors and modules land on the device.

    On the CPU this does nothing at all, since torch's own mode for it sees every single torch call.
    """
    return _NOWHERE_ELSE if device.type == "cpu" else torch_device(device)
