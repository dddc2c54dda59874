"""Plain copies of sharded objects: modules, optimizers and tensors whose shards are gathered, one after another.

All replicas take part in the gathering. Replica 0 gets the values, in host memory; the others get tensors without
memory, since nobody reads them.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distnb.accelerators import device_memory
from distnb.collectives.gradients.optimizer_steps import optimized
from distnb.compat import torch_internals
from distnb.runtime.this_process import this_process
from distnb.sharded.keras import library_objects
from distnb.sharded.making.lost_values import lost_error, require_values
from distnb.sharded.meshes import strategy_of
from distnb.sharded.plain_modules import plain_attributes

__all__ = ["copy_module", "holds_shards", "whole_copies"]


def holds_shards(value: Any) -> bool:
    """Return whether a value is a sharded tensor, a module with sharded parameters, or an optimizer of such.

    A program's own DTensors, on a mesh of its own, do not count.
    """
    tensors = [*(library_objects.shards_in(value) or _tensors(value))]
    return any(strategy_of(each) is not None for each in tensors)


def whole_copies(*values: Any, gradients: bool = True) -> list[Any]:
    """Return plain copies of objects, which share what the objects share. All replicas call this.

    The copies of other libraries' objects share nothing.

    Args:
        values: The objects.
        gradients: Whether to copy the gradients of parameters.

    Raises:
        StaleHandleError: Replicas with shards have ended or left.
    """
    process = this_process.replica
    keeps = process is None or process.rank == 0
    memo: dict[int, Any] = {}
    for value in values:
        copied = library_objects.whole_copy(value)
        if copied is not None:
            memo[id(value)] = copied
            continue
        tensors = _tensors(value, gradients)
        sharded = [each for each in tensors if isinstance(each, DTensor) and id(each) not in memo]
        is_tensor = isinstance(value, torch.Tensor)
        what = "this tensor" if is_tensor else f"this {torch_internals.original_class(value).__name__}"
        if process is not None and any(each.device_mesh.size() != process.size for each in sharded):
            raise lost_error(what, divided=False)
        require_values(sharded, what)
        _announce(value, sharded)
        for each in sharded:
            memo[id(each)] = _gathered(each, keeps)
        for each in sharded:
            if each.is_leaf:
                memo[id(each)].grad = memo.get(id(each.grad))
    for value in values:
        if isinstance(value, torch.nn.Module) and id(value) not in memo:
            copy_module(value, memo)
    return [copy.deepcopy(value, memo) for value in values]


def _tensors(value: Any, gradients: bool = True) -> Iterable[torch.Tensor]:
    """Return the tensors of a value that may be sharded, in an order that is equal on all replicas."""
    inner: list[torch.Tensor] = []
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        parameters = list(value.parameters())
    elif isinstance(value, torch.optim.Optimizer):
        parameters = optimized(value)
        states = [value.state[each] for each in parameters if each in value.state]
        inner = [part for state in states for part in state.values() if isinstance(part, torch.Tensor)]
    else:
        return []
    return [*parameters, *(each.grad for each in parameters if gradients and each.grad is not None), *inner]


def _gathered(shard: DTensor, keeps: bool) -> torch.Tensor:
    with torch.no_grad():
        whole = shard.full_tensor()
        plain = whole.cpu() if keeps else torch.empty_like(whole, device="meta")
    if isinstance(shard, torch.nn.Parameter):
        return torch.nn.Parameter(plain, requires_grad=shard.requires_grad)
    return plain.requires_grad_(shard.requires_grad and shard.is_leaf)


def _announce(value: Any, sharded: list[DTensor]) -> None:
    """Print a notice on replica 0 if a value is larger than the memory of the device, or than half of the host's."""
    process = this_process.replica
    if process is None or process.rank != 0:
        return
    nbytes = sum(each.numel() * each.element_size() for each in sharded)
    memory = device_memory()
    holds = memory[1] if memory is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if nbytes > holds:
        kind = torch_internals.original_class(value).__name__
        place = "the device" if memory is not None else "half of the host's memory"
        print(
            f"distnb: gathering the whole {kind} in host memory: {nbytes / 1e9:,.1f} GB, more than {place} "
            f"({holds / 1e9:,.1f} GB).",
            file=sys.stderr,
        )


def copy_module(root: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Copy a module into `memo`, with its original classes, and without the hooks of FSDP and distnb."""
    modules = [each for each in root.modules() if id(each) not in memo]
    for each in modules:
        cls: Any = torch_internals.original_class(each)
        memo[id(each)] = cls.__new__(cls)
    for each in modules:
        plain = memo[id(each)]
        for key, value in plain_attributes(each, "distnb.").items():
            plain.__dict__[key] = copy.deepcopy(value, memo)
