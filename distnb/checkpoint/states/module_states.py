"""Modules of torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from distnb.checkpoint.states.base import Kind, TensorOutline, described, listed, misfit_of_tensor
from distnb.checkpoint.stored_tensors import whole
from distnb.checkpoint.tensor_slices import is_sharded, read_like, reshard
from distnb.compat import torch_internals
from distnb.values.structure import map_structure

__all__ = ["TorchModules", "load_tensors", "loads_itself", "tensors_of"]


class TorchModules(Kind):
    """Modules, whose state must have the same names and shapes."""

    def covers(self, value: Any) -> bool:
        return isinstance(value, torch.nn.Module)

    def state(self, value: Any, name: str) -> Any:
        return value.state_dict()

    def misfits(self, value: Any, saved: Any, name: str) -> list[str]:
        if not isinstance(saved, Mapping):
            return [f"{name}: the checkpoint has {described(saved)}, but the object is a module."]
        if isinstance(saved.get("weights"), list):
            return [f"{name}: the checkpoint has a model of Keras, but the object is a {type(value).__name__}."]
        if self.may_fail(value):
            return []
        own = tensors_of(value)
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
        return loads_itself(value)

    def restore(self, value: Any, state: Any, name: str) -> None:
        load_tensors(value, state, own_loading=self.may_fail(value))

    def holds_shards(self, value: Any) -> bool:
        reshard(value)
        return any(map(is_sharded, value.parameters()))


def loads_itself(module: torch.nn.Module) -> bool:
    """Return whether a module, or one in it, saves or loads its state with its own code."""
    return any(map(_has_own_loading, module.modules()))


def load_tensors(
    module: torch.nn.Module, state: Mapping[str, Any], *, own_loading: bool = False, strict: bool = True
) -> Any:
    """Load a state whose tensors may be in files. Of a sharded parameter, only this replica's part is read.

    Parameters on the meta device get memory.

    Args:
        module: The module.
        state: Its state. The names and shapes match, unless `own_loading`.
        own_loading: Whether the module loads its state with its own code, so that the names may differ.
        strict: Whether torch compares the names.

    Returns:
        The names that torch found missing or unexpected.
    """
    own = tensors_of(module)
    if own_loading:
        reads = {key: functools.partial(read_like, target=own.get(key)) for key in state}
        return module.load_state_dict({key: map_structure(reads[key], each) for key, each in state.items()}, strict)
    rest: dict[str, Any] = {}
    made: dict[int, Any] = {}
    assigned: dict[str, Any] = {}
    for key, each in state.items():
        target: Any = own.get(key)
        if isinstance(target, torch.Tensor) and target.is_meta and not is_lazy(target):
            if id(target) not in made:  # tied parameters stay tied
                made[id(target)] = _with_memory(each, target)
            assigned[key] = made[id(target)]
        elif is_sharded(target):
            target.detach().copy_(read_like(each, target))
        else:
            rest[key] = map_structure(whole, each)
    result = module.load_state_dict(rest, strict=strict and len(rest) == len(state))
    if assigned:
        module.load_state_dict(assigned, strict=False, assign=True)
    return result


def _with_memory(leaf: Any, target: torch.Tensor) -> torch.Tensor:
    read = read_like(leaf, target).to(target.dtype)
    if not is_sharded(read):
        read = read.to(torch.get_default_device(), copy=True)
    return torch.nn.Parameter(read, target.requires_grad) if isinstance(target, torch.nn.Parameter) else read


def tensors_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the content of `state_dict()` without reading it: parameters may live on servers."""
    reshard(module)
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
