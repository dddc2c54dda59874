"""Operations on devices other than the CPU, through torch's own names for each type of device.

A type needs no code of its own here: torch knows its module (`torch.cuda`, `torch.xpu`, or that of an external
backend) and its c10d backend. Importing this loads no torch.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from distnb.errors import OptionError
from distnb.topology import Device

if TYPE_CHECKING:
    import torch

__all__ = [
    "allocated_nbytes",
    "c10d_backend",
    "check_available",
    "count",
    "device_of_rank",
    "free_share",
    "generator",
    "name_on_machine",
    "placed_on",
    "torch_device",
    "use",
]

_BOUND = ("tpu",)
"""Types of device of which a process has exactly one, chosen by its environment. The device's index in the process may
differ from its number on the machine.
"""
_NO_PLACEMENT = nullcontext()


def _module(kind: str) -> Any:
    """Return torch's module for a type of device, or None if torch has none."""
    import torch

    try:
        return torch.get_device_module(kind)
    except RuntimeError:  # torch does not know the type, or has no module for it
        return None


def torch_device(device: Device) -> torch.device:
    """Return torch's device object. The CPU gets no index, because torch reports CPU tensors on `cpu`."""
    import torch

    if device.type == "cpu":
        return torch.device("cpu")
    if device.type in _BOUND:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return torch.device(device.type, device.index)


def placed_on(device: Device) -> AbstractContextManager[Any]:
    """Return a context in which new tensors and modules are created on the device.

    On the CPU the context is empty, because torch's own mode for it intercepts every torch call.
    """
    return _NO_PLACEMENT if device.type == "cpu" else torch_device(device)


def use(device: Device) -> None:
    """Make the device the current one of its type in this process, so that the bare name of the type means it."""
    if device.type == "cpu":
        return
    module = _module(device.type)
    if module is None:
        raise OptionError(
            f"{device}: torch knows no device type {device.type!r} in this process. Is the package that brings it "
            "installed in this environment?"
        )
    if device.type not in _BOUND:
        module.set_device(device.index)


def check_available(device: Device) -> None:
    """Raise OptionError for a device that this process does not have."""
    if device.type == "cpu":
        return
    available = ["cpu:0", *(f"{device.type}:{index}" for index in _indices(device.type))]
    if str(device) not in available:
        raise OptionError(f"There is no device {device} here. The devices are {', '.join(available)}.")


def _indices(kind: str) -> range:
    import torch

    if kind in _BOUND:
        current = torch.accelerator.current_accelerator(check_available=True)
        if current is None or current.type != kind:
            return range(0)
        own: int = torch.accelerator.current_device_index()
        return range(own, own + 1)
    return range(count(kind))


def count(kind: str) -> int:
    """Return the number of devices of a type that torch finds from this process."""
    module = _module(kind)
    return 0 if module is None else int(module.device_count())


def device_of_rank(local_rank: int) -> Device:
    """Return the default device of one of several processes on a machine, chosen as programs of torchrun do."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or not (current.type in _BOUND or local_rank < torch.accelerator.device_count()):
        return Device("cpu", 0)
    return Device(current.type, local_rank)


def name_on_machine(device: Device) -> str:
    """Return a name of the device that differs from the names of the machine's other devices.

    Each process numbers the GPUs in its own CUDA_VISIBLE_DEVICES from 0. Slurm and Ray may give each process a list of
    its own.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device.type != "cuda" or device.index >= len(visible):
        return str(device)
    return f"cuda:{visible[device.index].strip() or device.index}"


def allocated_nbytes() -> int | None:
    """Return the number of bytes that torch has allocated on the process's current device.

    None if torch is not loaded or has not used a device yet (a query would initialise it, which can cost hundreds of
    megabytes), and for types that do not count.
    """
    torch = sys.modules.get("torch")
    current = None if torch is None else torch.accelerator.current_accelerator()
    module = None if current is None else _module(current.type)
    if torch is None or module is None or not (hasattr(module, "is_initialized") and module.is_initialized()):
        return None
    try:
        return int(torch.accelerator.memory_allocated())
    except (RuntimeError, NotImplementedError):
        return None


def device_memory() -> tuple[int, int] | None:
    """Return free and total memory of the process's current device, in bytes, over all processes.

    None if torch has not used a device yet, and for types that do not report it.
    """
    torch = sys.modules.get("torch")
    if torch is None or allocated_nbytes() is None:
        return None
    module = _module(torch.accelerator.current_accelerator().type)
    if not hasattr(module, "mem_get_info"):
        return None
    free, total = module.mem_get_info(torch.accelerator.current_device_index())
    return int(free), int(total)


def free_share() -> float:
    """Return the share of the current device's memory that this process can use, from 0 to 1; 1 if it is unknown.

    Memory that torch has reserved and does not use is free.
    """
    memory, allocated = device_memory(), allocated_nbytes()
    if memory is None or allocated is None:
        return 1.0
    import torch

    free, total = memory
    return (free + torch.accelerator.memory_reserved() - allocated) / total


class _ModuleGenerator:
    """Generator of a device, for types whose module has functions for its state but no generator objects."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def get_state(self) -> Any:
        return self._module.get_rng_state()

    def set_state(self, state: Any) -> None:
        self._module.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed(seed)


def generator(device: Device) -> Any:
    """Return the device's own random generator, with `get_state`, `set_state` and `manual_seed`.

    None if the type has none: on the CPU, and where random numbers are drawn on the host.
    """
    if device.type == "cpu":
        return None
    module = _module(device.type)
    if hasattr(module, "init"):
        module.init()  # CUDA has no generators before its initialisation
    if hasattr(module, "default_generators"):
        return module.default_generators[torch_device(device).index]
    return _ModuleGenerator(module) if hasattr(module, "set_rng_state") else None


def c10d_backend(kind: str) -> str | None:
    """Return the name of the c10d backend that carries tensors of a type between processes, each with its own device.

    None if torch knows none, or none that can be created without `init_process_group`. Tensors then go through host
    memory.
    """
    import torch.distributed as dist

    name = None if kind == "cpu" else dist.Backend.default_device_backend_map.get(kind)
    if name == "nccl":
        return name if dist.is_nccl_available() else None
    from distnb.compat.c10d_internals import has_plugin

    # An external backend registers a function that creates it. "fake" is torch's own backend that transfers nothing.
    return name if name is not None and name != "fake" and has_plugin(name) else None
