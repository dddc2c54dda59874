"""Modules of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from distnb.checkpoint.states import keras_states
from distnb.checkpoint.states.base import Kind, TensorOutline, described, listed, misfit_of_tensor
from distnb.compat import torch_internals

__all__ = ["TorchModules"]


class TorchModules(Kind):
    """Modules, whose state must have the same names and shapes."""

    def covers(self, value: Any) -> bool:
        return isinstance(value, torch.nn.Module)

    def state(self, value: Any, name: str) -> Any:
        return value.state_dict()

    def misfits(self, value: Any, saved: Any, name: str) -> list[str]:
        if not isinstance(saved, Mapping):
            return [f"{name}: the checkpoint has {described(saved)}, but the object is a module."]
        if keras_states.is_state_of_keras(saved):
            return [f"{name}: the checkpoint has a model of Keras, but the object is a {type(value).__name__}."]
        if self.may_fail(value):
            return []
        own = _tensors_of(value)
        lacking, unknown = [key for key in own if key not in saved], [key for key in saved if key not in own]
        lines = []
        if lacking:
            lines.append(f"{name}: the checkpoint does not hold {listed(lacking)}.")
        if unknown:
            lines.append(f"{name}: the checkpoint holds {listed(unknown)}, which {type(value).__name__} does not have.")
        for key, tensor in own.items():
            there = saved.get(key)
            if isinstance(tensor, torch.Tensor) and isinstance(there, TensorOutline) and not is_lazy(tensor):
                misfit = misfit_of_tensor(tensor, there)
                lines += [f"{name}: {key} {misfit}."] if misfit else []
        return lines

    def may_fail(self, value: Any) -> bool:
        """Return whether a module loads its state with its own code, so that names in the state may differ."""
        return any(map(_has_own_loading, value.modules()))

    def restore(self, value: Any, state: Any, name: str) -> None:
        value.load_state_dict(state)


def _tensors_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the content of `state_dict()` without reading it: parameters may live on servers."""
    found: dict[str, Any] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        torch_internals.save_own(each, found, f"{path}." if path else "")
    return found


def _has_own_loading(module: torch.nn.Module) -> bool:
    if isinstance(module, LazyModuleMixin):
        return False
    if torch_internals.has_state_hooks(module):
        return True
    methods = ("state_dict", "load_state_dict", "_load_from_state_dict")
    makers = [cls for cls in type(module).__mro__ if any(method in vars(cls) for method in methods)]
    return not all(cls.__module__.startswith("torch.nn.") for cls in makers)
