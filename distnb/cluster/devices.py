"""The devices of this machine, and their assignment to engines.

GPUs are counted through NVML, the driver's own library. That starts no process, does not import torch, and does not
initialise CUDA in the notebook, which would cost GPU memory there and make forking unsafe. `tpu_chips.py` counts TPU
chips. Devices of any other type are counted by torch's module for it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from distnb.accelerators import count
from distnb.cluster import tpu_chips
from distnb.errors import OptionError, StartError
from distnb.topology import Device, parse_device

__all__ = ["available_gpus", "check_count", "further_devices", "gpu_ids", "plan_devices", "why_no_gpu"]

_DEFAULT_CPU_ENGINES = 2
_MOST_ENGINES = 256
_UUID_NBYTES = 96


def plan_devices(
    n: int | None = None,
    devices: str | Sequence[str | Device] | None = None,
    *,
    oversubscribe: bool = False,
    gpus: int | None = None,
) -> tuple[Device, ...]:
    """Return the device of each engine.

    Without arguments there is one engine per GPU, or two on the CPU. CPU engines are numbered (`cpu:0`, `cpu:1`), and
    all of them share the machine's cores.

    Args:
        n: The number of engines.
        devices: Their devices, as a sequence or as comma-separated text, in any spelling that `parse_device` reads. A
            bare type of accelerator ("tpu") means all devices of that type, or the first `n`.
        oversubscribe: Let several engines share one device.
        gpus: The number of GPUs of a machine that this process cannot examine. Such a machine has only these and the
            CPU. None for this machine.

    Raises:
        OptionError: The numbers or names are invalid.
        StartError: This machine does not have the requested devices. The message lists its devices.

    Example:
        >>> [str(device) for device in plan_devices(3, gpus=0)]
        ['cpu:0', 'cpu:1', 'cpu:2']
        >>> [str(device) for device in plan_devices(devices="/gpu:0,/gpu:1", gpus=2)]
        ['cuda:0', 'cuda:1']
    """
    check_count("n", n)
    if n is not None and n > _MOST_ENGINES:
        raise OptionError(f"n={n}: one machine can run at most {_MOST_ENGINES} engines. Give fewer.")
    machine = _Machine(gpus)
    named = _read_names(devices, None if oversubscribe else n, machine)
    if named is None:
        return _plan_by_count(n, machine.count("cuda"), oversubscribe)
    if n is not None and n != len(named) and not (oversubscribe and len(set(named)) == 1):
        raise OptionError(
            f"n={n} engines were asked for with {len(named)} device(s) ({_list(named)}). "
            "Name one device per engine, or leave out one of the two."
        )
    if n is not None and n != len(named):
        named = named * n
    for device in named:
        machine.check(device)
    tpu_chips.check_named(named)
    duplicates = sorted({device for device in named if named.count(device) > 1})
    if duplicates and not oversubscribe:
        raise OptionError(
            f"{_list(duplicates)} appears more than once in {_list(named)}. Name each device once; "
            "oversubscribe=True lets several engines share one (replicas then communicate through host memory)."
        )
    return named


def further_devices(
    count: int, used: Sequence[Device], *, oversubscribe: bool = False, gpus: int | None = None
) -> tuple[Device, ...]:
    """Return the devices of further engines on a machine: free ones, of the type of the engines that it has.

    Args:
        count: The number of further engines.
        used: The devices of the machine's engines. Without engines, the new ones are on GPUs, if it has any.
        oversubscribe: Let engines share devices if there are not enough free ones.
        gpus: See `plan_devices`.

    Raises:
        StartError: There are not enough free devices.

    Example:
        >>> [str(device) for device in further_devices(2, [Device("cpu", 0), Device("cpu", 2)], gpus=0)]
        ['cpu:1', 'cpu:3']
    """
    machine = _Machine(gpus)
    kind = used[0].type if used else "cuda" if machine.count("cuda") else "cpu"
    there = _MOST_ENGINES if kind == "cpu" else machine.count(kind)
    free = [device for index in range(there) if (device := Device(kind, index)) not in used]
    if len(free) >= count:
        return tuple(free[:count])
    if not oversubscribe or not there:
        raise StartError(
            f"{_count(count, 'further engine')} need {_count(count, 'free device')} of type {kind}, but "
            f"{len(free) or 'none'} of {there} {'is' if len(free) == 1 else 'are'} free (engines have {_list(used)}). "
            "A cluster that was started with oversubscribe=True lets engines share devices."
        )
    every = [Device(kind, index) for index in range(there)]
    return tuple(free + [every[index % there] for index in range(count - len(free))])


def check_count(name: str, count: object) -> None:
    """Raise OptionError unless a number of engines is None, or a whole number of at least 1."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise OptionError(f"{name}={count!r}: give a whole number, 1 or more.")


def _read_names(
    devices: str | Sequence[str | Device] | None, n: int | None, machine: _Machine
) -> tuple[Device, ...] | None:
    if devices is None:
        return None
    if isinstance(devices, str):
        devices = [part for part in devices.split(",") if part.strip()]
    elif not isinstance(devices, Sequence):
        raise OptionError(
            f"devices={devices!r}: give a list of device names, such as ['cuda:0', 'cuda:1'], or comma-separated text."
        )
    if not devices:
        raise OptionError(
            "devices is empty. Name at least one device, or leave it out for one engine per GPU, or two on the CPU."
        )
    named = tuple(parse_device(device) for device in devices)
    if len(named) == 1 and isinstance(devices[0], str) and devices[0].strip().isalpha() and named[0].type != "cpu":
        kind = named[0].type
        return tuple(Device(kind, index) for index in range(n or machine.count(kind) or 1))
    return named


def _plan_by_count(n: int | None, gpus: int, oversubscribe: bool) -> tuple[Device, ...]:
    if gpus == 0:
        return tuple(Device("cpu", index) for index in range(n or _DEFAULT_CPU_ENGINES))
    if n is None or n <= gpus:
        return tuple(Device("cuda", index) for index in range(n or gpus))
    if not oversubscribe:
        names = _list(Device("cuda", index) for index in range(gpus))
        on_cpu = ",".join(f"cpu:{index}" for index in range(n))
        raise StartError(
            f"{n} engines were asked for but this machine has {_count(gpus)} ({names}). Ask for at most {gpus}, "
            f"name CPU devices (devices={on_cpu!r}), or let engines share GPUs (oversubscribe=True)."
        )
    return tuple(Device("cuda", index % gpus) for index in range(n))


class _Machine:
    """The devices of a machine: this one, or one that this process cannot examine, with a known number of `gpus`."""

    def __init__(self, gpus: int | None) -> None:
        self._here = gpus is None
        self._counts: dict[str, int] = {} if gpus is None else {"cuda": gpus}

    def count(self, kind: str) -> int:
        """Return the number of accelerators of a type."""
        if kind not in self._counts:
            counters = {"cuda": available_gpus, "tpu": tpu_chips.chips}
            self._counts[kind] = counters.get(kind, lambda: count(kind))() if self._here else 0
        return self._counts[kind]

    def check(self, device: Device) -> None:
        """Raise an error if the machine does not have a device."""
        if device.type == "cpu":
            if device.index >= _MOST_ENGINES:
                raise OptionError(
                    f"{device} does not exist. CPU engines are numbered cpu:0 to cpu:{_MOST_ENGINES - 1}."
                )
            return
        if device.index < self.count(device.type):
            return
        if not self._here and device.type != "cuda":
            raise StartError(f"{device}: engines on other machines run on CPU and CUDA devices. {self._inventory()}")
        why = f" {tpu_chips.why_none()}" if device.type == "tpu" and tpu_chips.why_none() else ""
        raise StartError(f"There is no {device} on this machine.{why} {self._inventory()}")

    def _inventory(self) -> str:
        names = [f"{kind}:{index}" for kind, number in self._counts.items() for index in range(number)]
        if not names:
            return f"It has the CPU only (cpu:0, cpu:1, …): {why_no_gpu()}."
        gpus = self._counts.get("cuda")
        accelerators = f"{_count(gpus)} ({', '.join(names)})" if gpus == len(names) else ", ".join(names)
        return f"It has {accelerators} and the CPU (cpu:0, cpu:1, …)."


def why_no_gpu() -> str:
    """Return the reason why engines have no GPU on this machine, for the middle of a sentence."""
    if not _torch_has_cuda():
        return "the installed PyTorch is a build without CUDA"
    if _physical_gpus() is None:
        return "no NVIDIA driver was found"
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}"
    return "the NVIDIA driver reports no GPU"


def _count(number: int, thing: str = "GPU") -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _list(devices: object) -> str:
    return ", ".join(str(device) for device in devices)  # type: ignore[attr-defined]


def available_gpus() -> int:
    """Return the number of GPUs that an engine would see: those in CUDA_VISIBLE_DEVICES, if torch can use them."""
    return len(gpu_ids())


def gpu_ids() -> tuple[str, ...]:
    """Return the GPUs that an engine would see, in its order, by identifiers that all processes of a machine share."""
    identifiers = _physical_gpus() or ()
    if not identifiers or not _torch_has_cuda():
        return ()
    return tuple(
        identifiers[int(entry)]
        if entry.isdigit()
        else next((each for each in identifiers if each.startswith(entry)), entry)  # CUDA accepts a unique beginning
        for entry in _visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), len(identifiers))
    )


def _visible_gpus(setting: str | None, physical: int) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES that CUDA uses: indices, or the beginnings of identifiers.

    CUDA reads the entries up to the first that does not name a GPU. If an entry is repeated, it finds no GPU at all.
    """
    if setting is None:
        return [str(index) for index in range(physical)]
    seen: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit():
            if int(entry) >= physical:
                break
            entry = str(int(entry))
        elif not entry.startswith(("GPU-", "MIG-")):
            break
        if entry in seen:
            return []
        seen.append(entry)
    return seen


@cache
def _physical_gpus() -> tuple[str, ...] | None:
    """Return the driver's identifier of each GPU, such as "GPU-2b1d8f7e-…", or None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    count = ctypes.c_uint()
    found: list[str] = []
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))  # 0 if it fails
    for index in range(count.value):
        device, text = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_NBYTES)
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        status = nvml.nvmlDeviceGetUUID(device, text, _UUID_NBYTES)
        found.append(text.value.decode() if status == 0 else f"GPU {index}")
    nvml.nvmlShutdown()
    return tuple(found)


@cache
def _torch_has_cuda() -> bool:
    """Return whether the installed torch was built with CUDA. Check its files, because importing it takes a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()
