"""`distnb check`: whether this machine can run engines, one line for each resource, with the cure if it cannot."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from packaging.requirements import Requirement

from distnb.cluster.devices import available_gpus, plan_devices, why_no_gpu
from distnb.cluster.local.capacity import ENGINE_NBYTES, check_capacity, this_machine
from distnb.cluster.local.open_files import raise_file_limit
from distnb.cluster.network import require_loopback
from distnb.cluster.package_versions import version_here
from distnb.errors import DistnbError, StartError

__all__ = ["Finding", "examine"]

_SHARED = "/dev/shm"
_SHARED_NBYTES = 256 * 2**20  # a container has 64 MiB by default, and a few batches of pictures fill it


class Finding(NamedTuple):
    """The state of one resource.

    Attributes:
        what: The resource in a word or two.
        facts: The state that was found; "" if the cure includes it.
        cure: The cure if engines could not run so; "" if they can.
    """

    what: str
    facts: str
    cure: str = ""


def examine(engines: int | None) -> Iterator[Finding]:
    """Examine this machine for a number of engines; None for as many as `%distnb start` starts."""
    count = engines or len(plan_devices())
    yield _versions()
    for what, look in _RESOURCES.items():
        try:
            yield Finding(what, look(count))
        except DistnbError as error:
            yield Finding(what, "", str(error))


def _versions() -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    names = ("distnb", "torch", "ipython", "ipykernel", "ipyparallel")
    facts = ", ".join([f"Python {python}", *(f"{name} {version_here(name) or 'missing'}" for name in names)])
    try:
        needed = [Requirement(text) for text in importlib.metadata.requires("distnb") or ()]
    except importlib.metadata.PackageNotFoundError:
        return Finding("versions", facts, "Install distnb into this environment: pip install distnb.")
    wrong = [
        f"{each.name}{each.specifier}"
        for each in needed
        if not each.marker and not each.specifier.contains(version_here(each.name) or "", prereleases=True)
    ]
    cure = f"pip install {' '.join(map(repr, wrong))}" if wrong else ""
    return Finding("versions", facts, cure)


def _cores(engines: int) -> str:
    capacity = this_machine()
    notices = check_capacity(engines, replace(capacity, memory_nbytes=sys.maxsize), oversubscribe=False)
    return notices[0] if notices else f"{capacity.cores} for {engines} engines"


def _memory(engines: int) -> str:
    capacity = this_machine()
    check_capacity(engines, replace(capacity, cores=engines, most_engines=None), oversubscribe=False)
    taken = f"{engines} engines take {engines * ENGINE_NBYTES / 2**30:.1f} GiB before any cell has run"
    return f"{capacity.memory_nbytes / 2**30:.1f} GiB free; {taken}"


def _shared_memory(engines: int) -> str:
    free = shutil.disk_usage(_SHARED).free if os.path.isdir(_SHARED) else 0
    if free < _SHARED_NBYTES:
        raise StartError(
            f"{_SHARED} has {free // 2**20:,} MiB. The workers of a DataLoader and NCCL use it. Enlarge it: `mount -o "
            f"remount,size=2G {_SHARED}`, or --shm-size=2g of a container."
        )
    return f"{free / 2**30:.1f} GiB free"


def _files(engines: int) -> str:
    raise_file_limit(engines)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return "no limit" if most == resource.RLIM_INFINITY else f"at most {most:,} in a process"


def _gpus(engines: int) -> str:
    gpus = available_gpus()
    if not gpus:
        return f"none ({why_no_gpu()}): replicas compute on the CPU"
    import torch

    if torch.cuda.device_count() != gpus:
        raise StartError(
            f"The driver has {gpus} GPUs, and torch finds {torch.cuda.device_count()}. Install a PyTorch for this "
            "driver's version of CUDA."
        )
    return ", ".join(torch.cuda.get_device_name(index) for index in range(gpus))


def _ports(engines: int) -> str:
    require_loopback()
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            raise StartError(f"No port of 127.0.0.1 can be opened: {error}. End programs that use ports.") from error
    return "the loopback interface is up, and has free ports"


_RESOURCES: dict[str, Callable[[int], str]] = {
    "cores": _cores,
    "memory": _memory,
    "/dev/shm": _shared_memory,
    "open files": _files,
    "GPUs": _gpus,
    "ports": _ports,
}
