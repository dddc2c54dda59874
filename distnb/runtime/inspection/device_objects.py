"""Device objects, which belong to a replica's devices and stay on the engines. All else is data.

After a cell, data that is equal on all replicas is copied to the notebook, which gets handles of the device objects.
A room whose objects belong to devices registers their classes. A library's classes are registered once it is loaded.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from distnb.objects.world_bound import is_world_bound
from distnb.runtime.scopes.foreign_libraries import supports
from distnb.values import DistributedValues

__all__ = ["is_device_object", "register_device_types"]

_types: list[type] = [
    torch.Tensor,
    torch.UntypedStorage,
    torch.TypedStorage,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    RemovableHandle,  # it undoes a change of a module
    DistributedValues,
]
if torch.distributed.is_available():
    _types.append(torch.distributed.ProcessGroup)

_DATASETS = "distnb.input."
_verdicts: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def register_device_types(*types: type) -> None:
    """Keep instances of these classes on the engines."""
    _types.extend(types)
    _verdicts.clear()


def is_device_object(obj: Any) -> bool:
    """Return whether an object belongs to a replica's devices: a tensor, a module, a trainer, a dataset."""
    kind = type(obj)
    verdict = _verdicts.get(kind)
    if verdict is None:
        supports("device types")  # loads the modules that register the classes of other libraries
        known = issubclass(kind, tuple(_types)) or kind.__module__.startswith(_DATASETS)
        verdict = _verdicts[kind] = known or is_world_bound(kind)
    return verdict or (kind is torch.Generator and obj.device.type != "cpu")
