"""Tensors, and variables wherever they live."""

from __future__ import annotations

from typing import Any

import torch

from distnb.checkpoint.states.base import Kind, TensorOutline, described, misfit_of_tensor
from distnb.checkpoint.stored_tensors import whole
from distnb.checkpoint.tensor_slices import is_sharded, read_like
from distnb.runtime.this_process import this_process

__all__ = ["Tensors"]


class Tensors(Kind):
    """Tensors, variables and sharded variables."""

    def covers(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) or (hasattr(value, "assign") and hasattr(value, "read_value"))

    def state(self, value: Any, name: str) -> Any:
        return value.read_value() if hasattr(value, "read_value") else _now(value)

    def misfits(self, value: Any, saved: Any, name: str) -> list[str]:
        if not isinstance(saved, TensorOutline):
            return [f"{name}: the checkpoint has {described(saved)}, but the object is a tensor."]
        misfit = misfit_of_tensor(TensorOutline(tuple(value.shape), value.dtype), saved)
        return [f"{name} {misfit}."] if misfit else []

    def restore(self, value: Any, state: Any, name: str) -> None:
        if hasattr(value, "assign"):
            value.assign(whole(state))
        else:
            value.detach().copy_(read_like(state, value))

    def holds_shards(self, value: Any) -> bool:
        return is_sharded(value)


def _now(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's current value. The tensor may be a copy of a value that lives in another process."""
    if this_process.store is not None:
        this_process.store.refresh_copies([tensor])
    return tensor.detach()
