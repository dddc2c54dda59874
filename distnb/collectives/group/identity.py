"""What torch asks a process group about itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from distnb.collectives.group.backends import Backends
from distnb.collectives.group.eager import methods_always_eager

__all__ = ["GroupIdentity"]

# For the type checker it is anything: torch's stubs have overloads that only the old interface used.
_ProcessGroup: Any = dist.ProcessGroup


@methods_always_eager
class GroupIdentity(_ProcessGroup):  # type: ignore[misc]
    """Name, rank, size, devices and backends of a group. C++ is told no backends: it could go around the guard.

    Args:
        rank, size: Who is who.
        label: The name until torch gives another.
        backend_name: What torch's `get_backend` says.
        device_types: The types of device whose tensors the group carries.
    """

    def __init__(self, rank: int, size: int, label: str, backend_name: str, device_types: Sequence[str]) -> None:
        super().__init__(rank, size)
        self._size = size
        self._backend_name = backend_name
        self._devices = [torch.device(kind) for kind in device_types]
        self._group_name = label
        self._group_desc = "undefined"

    def _ready(self) -> Backends:
        """The connected backends."""
        raise NotImplementedError

    @property
    def _device_types(self) -> list[torch.device]:
        return list(self._devices)

    def _get_backend(self, device: torch.device) -> Any:
        transport = self._ready()
        kind = "cpu" if device.type in transport.staged else device.type
        if kind not in transport.backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return transport.backends[kind]

    def _get_backend_name(self) -> str:
        return self._backend_name

    name = _get_backend_name

    def getBackendName(self) -> str:
        """What C++ is told. No name that it knows: it would take the group for one of its own classes."""
        return "distnb"

    # C++ keeps the names in its backends, of which it knows none here.
    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    def getGroupName(self) -> str:
        """What C++ asks for the name."""
        return self._group_name

    def getGroupDesc(self) -> str:
        """What C++ asks for the description."""
        return self._group_desc
