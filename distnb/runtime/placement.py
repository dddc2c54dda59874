"""The replica's device as the place where new tensors land."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from distnb.errors import OptionError
from distnb.topology import Device

__all__ = ["checked_device", "placed_on", "torch_device", "use_device"]

_NOWHERE_ELSE = nullcontext()


def torch_device(device: Device) -> torch.device:
    """The device as torch names it. The CPU has no index: tensors on `cpu:0` say that they are on `cpu`."""
    return torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.index)


def use_device(device: Device) -> None:
    """Make it the current device of its type in this process, so that `cuda` means this one."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index)


def placed_on(device: Device) -> AbstractContextManager[Any]:
    """A context in which new tensors and modules land on the device.

    On the CPU this does nothing at all, since torch's own mode for it sees every single torch call.
    """
    return _NOWHERE_ELSE if device.type == "cpu" else torch_device(device)


def checked_device(device: Device) -> None:
    """Refuse a device that this process does not have.

    Raises:
        OptionError: It lists those that there are.
    """
    if device.type == "cpu":
        return
    there = ["cpu:0", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if device.type == "cuda" and str(device) not in there:
        raise OptionError(f"There is no device {device} here. The devices are {', '.join(there)}.")
