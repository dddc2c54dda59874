"""Private names of torch's FSDP2. Importing this loads torch.distributed.fsdp, which takes a second or more."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from distnb.compat.versions import private_names

with private_names("torch"):
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

__all__ = [
    "DefaultReduceScatter",
    "discard_local_gradients",
    "has_local_gradients",
    "holds_gathered",
    "is_fsdps_attribute",
    "is_fsdps_hook",
    "reset",
]


def is_fsdps_attribute(name: str) -> bool:
    """Return whether an attribute of a module belongs to FSDP."""
    return name.startswith(("__composable_api_state_key", "_is_fsdp", "_fsdp"))


def is_fsdps_hook(hook: Any) -> bool:
    """Return whether a hook of a module belongs to FSDP."""
    return (getattr(hook, "__module__", "") or "").startswith("torch.distributed.fsdp.")


def _groups(module: Any) -> list[Any]:
    """Return the parameter groups of a sharded module alone: several in torch 2.13, at most one before."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _parameters(root: Any) -> list[Any]:
    """Return FSDP's descriptions of the parameters of a sharded model."""
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    return [parameter for unit in units for group in _groups(unit) for parameter in group.fsdp_params]


def has_local_gradients(root: Any, of: Collection[int] | None = None) -> bool:
    """Return whether a sharded model has gradients that are not reduced yet, because they were made under no_sync.

    Args:
        root: The model.
        of: The `id()`s of the shards that count; None for all.
    """
    return any(
        parameter.unsharded_accumulated_grad is not None or _gathered_gradient(parameter) is not None
        for parameter in _parameters(root)
        if of is None or id(parameter.sharded_param) in of
    )


def holds_gathered(root: Any, tensor: Any) -> bool:
    """Return whether a tensor is one of the whole parameters that FSDP makes of a model's shards."""
    return any(getattr(parameter, "_unsharded_param", None) is tensor for parameter in _parameters(root))


def _gathered_gradient(parameter: Any) -> Any:
    gathered = getattr(parameter, "_unsharded_param", None)  # None before the first pass
    return None if gathered is None else gathered.grad


def discard_local_gradients(root: Any, of: Collection[int] | None = None) -> None:
    """Discard gradients that are not reduced yet: all, or those of shards with these ids."""
    for parameter in _parameters(root):
        if of is not None and id(parameter.sharded_param) not in of:
            continue
        parameter.unsharded_accumulated_grad = None
        if _gathered_gradient(parameter) is not None:
            parameter._unsharded_param.grad = None


def reset(root: Any) -> None:
    """Return a sharded model to the state between two steps, after a pass that has failed anywhere.

    Gradients that are not reduced yet are discarded. torch has a method for the rest from version 2.13 on.
    """
    if root._get_fsdp_state()._is_root is None:
        return  # it was never called, and FSDP has not prepared what a reset reads
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset(root._get_fsdp_state())
    discard_local_gradients(root)


def _reset(state: Any) -> None:
    context, streams = state._state_ctx, state._comm_ctx
    streams.all_gather_state = streams.reduce_scatter_state = None
    streams.post_forward_order.clear()
    for each in context.all_states or [state]:
        each._training_state = TrainingState.IDLE
        group = each._fsdp_param_group
        if group is not None:
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
