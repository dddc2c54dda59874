"""Private names of torch's FSDP2. Importing this loads torch.distributed.fsdp, which takes a second or more."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from distnb.compat import torch_internals
from distnb.compat.versions import private_names

with private_names("torch"):
    import torch
    from torch import nn
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

__all__ = [
    "DefaultAllGather",
    "DefaultReduceScatter",
    "UnitGradients",
    "adopt_changes",
    "changed_in_forward",
    "copy_by",
    "discard_local_gradients",
    "has_local_gradients",
    "holds_gathered",
    "is_fsdps_attribute",
    "is_fsdps_hook",
    "is_in_forward",
    "keep_changes",
    "make_gathered",
    "names_of_units",
    "observe",
    "remove",
    "reset",
    "shards_of",
    "share_hooks",
]


def is_fsdps_attribute(name: str) -> bool:
    """Return whether an attribute of a module belongs to FSDP."""
    return name.startswith(("__composable_api_state_key", "_is_fsdp", "_fsdp"))


def is_fsdps_hook(hook: Any) -> bool:
    """Return whether a hook of a module belongs to FSDP."""
    return (getattr(hook, "__module__", "") or "").startswith("torch.distributed.fsdp.")


def remove(module: nn.Module) -> None:
    """Remove FSDP's attributes and class from a module, but not its hooks."""
    for name in list(filter(is_fsdps_attribute, vars(module))):
        del vars(module)[name]
    _module_state_mapping.pop(module, None)
    module.__class__ = torch_internals.original_class(module)


def _groups(module: Any) -> list[Any]:
    """Return the parameter groups of a sharded module alone: several in torch 2.13, at most one before."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _parameters(root: Any) -> list[Any]:
    """Return FSDP's descriptions of the parameters of a sharded model."""
    return [parameter for unit in _units(root) for group in _groups(unit) for parameter in group.fsdp_params]


def _units(root: Any) -> list[Any]:
    """Return the sharded modules in a model, with the model itself."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def adopt_changes(root: Any) -> tuple[str, Any]:
    """Have FSDP use a model's shards as they are now: a program may have converted, frozen or assigned them.

    Returns:
        The name and the value of a parameter that is no shard, or whose shard has another size; or the name and the
        dtypes of a unit that has several; or ("", None).
    """
    for unit in _units(root):
        for group in _groups(unit):
            if not group.is_sharded:
                continue
            for parameter in group.fsdp_params:
                if not _adopt(parameter):
                    module = parameter._module_info
                    return module.param_name, module.module._parameters.get(module.param_name)
            dtypes = _adopt_dtypes(group)
            if len(dtypes) > 1:
                return group._module_fqn or "", dtypes
    return "", None


def _adopt(parameter: Any) -> bool:
    """Have FSDP gather the memory of a shard. Return False if it cannot."""
    module = parameter._module_info
    shard = module.module._parameters.get(module.param_name)
    shared = zip(module.shared_modules, module.shared_param_names, strict=True)
    if any(other._parameters.get(name) is not shard for other, name in shared):
        return False
    if shard is not parameter.sharded_param:
        if not isinstance(shard, nn.Parameter) or getattr(shard, "_spec", None) != parameter._sharding_spec:
            return False
        parameter.reset_sharded_param()
    local = shard._local_tensor
    if shard.shape != parameter._orig_size or local.shape != parameter.sharded_size:
        return False
    gathered = parameter._sharded_param_data
    if local.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr() or local.is_meta:
        return True
    padded = parameter.padded_sharded_param_size.numel()
    if local.untyped_storage().nbytes() >= (local.storage_offset() + padded) * local.element_size():
        # Another model may gather the same shard: `reset_sharded_param` would copy it for this one.
        parameter._sharded_param_data = local.as_strided((padded,), (1,), local.storage_offset())
    else:
        parameter.reset_sharded_param()
    return True


def _adopt_dtypes(group: Any) -> set[Any]:
    """Have FSDP note which parameters of a group are trained, and return their dtypes.

    By itself FSDP does so in the first pass only.
    """
    kinds = [(each.sharded_param.requires_grad, each.sharded_param.dtype) for each in group.fsdp_params]
    dtypes = {dtype for is_trained, dtype in kinds if is_trained}
    if getattr(group, "_distnb_kinds", kinds) != kinds and len(dtypes) < 2:
        for each in group.fsdp_params:
            if each.sharded_param.dtype != each.orig_dtype and hasattr(each, "_unsharded_param"):
                del each._unsharded_param
                each.all_gather_outputs = []
        group._init_mp_dtypes()
    group._distnb_kinds = kinds
    return dtypes


def make_gathered(root: Any) -> None:
    """Make the tensors into which FSDP gathers a model's shards, unless they exist. All replicas must call this.

    Those made in inference mode could not be used in training.
    """
    with torch.inference_mode(False):
        for unit in _units(root):
            if not all(hasattr(each, "_unsharded_param") for group in _groups(unit) for each in group.fsdp_params):
                unit.unshard()
                unit.reshard()


def changed_in_forward(unit: Any) -> str:
    """Return the name of a whole parameter that was changed in place since the last call, or "" if none was.

    FSDP's own writes to the memory do not count.
    """
    changed = ""
    for group in _groups(unit):
        for parameter in group.fsdp_params:
            version = parameter._unsharded_param._version
            if version != getattr(parameter, "_distnb_version", 0):
                changed = changed or parameter._module_info.param_name
            parameter._distnb_version = version
    return changed


def keep_changes(unit: Any) -> None:
    """Copy the whole parameters of a unit to their shards, which hold all of them on a single replica."""
    for group in _groups(unit):
        for parameter in group.fsdp_params:
            parameter._sharded_param_data.copy_(parameter.all_gather_outputs[0])


class UnitGradients:
    """The gradients that a backward pass has computed for a unit on this replica, before FSDP reduces them.

    Args:
        group: FSDP's description of the unit's parameters.
        state: FSDP's description of the unit.

    Attributes:
        is_kept: Whether a pass keeps the unit's whole parameters until its end.
    """

    def __init__(self, group: Any, state: Any) -> None:
        self.is_kept = False
        self._group = group
        self._state = state

    @property
    def new(self) -> list[torch.Tensor]:
        """The gradients of this pass. Sparse ones are made dense, because FSDP divides rows."""
        found = []
        for each in self._trained():
            gradient = each._unsharded_param.grad
            if gradient is not None and gradient.is_sparse:
                gradient = each._unsharded_param.grad = gradient.to_dense()
            if gradient is not None:
                found.append(gradient)
        return found

    @property
    def is_reached(self) -> bool:
        """True if the pass has reached an output of the unit, which it then does on all replicas."""
        return bool(self._group._training_state is TrainingState.PRE_BACKWARD)

    def used(self) -> dict[Any, bool]:
        """Return whether each shard has a gradient of this pass, or one from under `no_sync`."""
        return {
            each.sharded_param: each._unsharded_param.grad is not None or each.unsharded_accumulated_grad is not None
            for each in self._trained()
        }

    def fill(self, shards: Collection[int]) -> None:
        """Set gradients of zero for shards with these `id()`s: all replicas must reduce the same ones."""
        for each in self._trained():
            if id(each.sharded_param) in shards:
                each._unsharded_param.grad = torch.zeros(
                    each._orig_size, dtype=each._unsharded_param.dtype, device=each.device
                )

    def set_apart(self) -> None:
        """Keep this pass's gradients apart from the next one's."""
        for each in self._trained():
            if each._unsharded_param.grad is not None:
                each.unsharded_accumulated_grad, each._unsharded_param.grad = each._unsharded_param.grad, None

    def keep(self) -> None:
        """Gather the unit's parameters for the whole of the pass that begins. All replicas must call this."""
        self.is_kept = True
        self._state._training_state = TrainingState.PRE_BACKWARD
        self._state._state_ctx.post_backward_final_callback_queued = True  # `release` does what the callback does
        self._group.pre_backward(False)

    def release(self) -> None:
        """Reduce gradients and free what is gathered, at the end of a pass, for all units of the model."""
        if self._state._state_ctx.post_backward_final_callback_queued:
            self._state._root_post_backward_final_callback()

    def belongs_to(self, shards: Collection[int]) -> bool:
        """Return whether the unit has one of the shards with these `id()`s."""
        return any(id(each.sharded_param) in shards for each in self._group.fsdp_params)

    def _trained(self) -> list[Any]:
        return [
            each
            for each in self._group.fsdp_params
            if each.sharded_param.requires_grad and hasattr(each, "_unsharded_param")
        ]


def observe(unit: Any, before: Callable[[UnitGradients], None], after: Callable[[UnitGradients], None]) -> None:
    """Call functions before and after FSDP handles the gradients of a unit, in each backward pass."""
    for group in _groups(unit):
        gradients, plain = UnitGradients(group, unit._get_fsdp_state()), group.post_backward

        def post_backward(*args: Any, gradients: UnitGradients = gradients, plain: Any = plain) -> None:
            if gradients.is_kept:
                return
            before(gradients)
            plain(*args)
            after(gradients)

        group.post_backward = post_backward


def copy_by(unit: Any, copied: Callable[[Any, dict[int, Any]], Any]) -> None:
    """Have a function make deep copies of sharded modules of the unit's class, given the memo. FSDP refuses them."""
    type(unit).__deepcopy__ = copied


def names_of_units(root: Any) -> list[str]:
    """Return the names of the sharded modules in a sharded module, inner ones first. It is not among them."""
    names = [name for name, part in root.named_modules() if isinstance(part, FSDPModule) and part is not root]
    return sorted(names, key=lambda name: -name.count("."))


def shards_of(root: Any) -> list[Any]:
    """Return the shards of a model, in an order that is equal on all replicas."""
    return [parameter.sharded_param for parameter in _parameters(root)]


def share_hooks(root: Any) -> None:
    """Have a pass call the hooks of a model's shards: `register_hook` on a shard, which the pass does not reach."""
    for parameter in _parameters(root):
        hooks, gathered = parameter.sharded_param._backward_hooks, getattr(parameter, "_unsharded_param", None)
        if hooks is not None and gathered is not None and gathered._backward_hooks is not hooks:
            gathered._backward_hooks = hooks


def is_in_forward(root: Any) -> bool:
    """Return whether FSDP is in a forward pass of a model."""
    return bool(root._get_fsdp_state()._training_state is TrainingState.FORWARD)


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
    for group in (group for unit in _units(root) for group in _groups(unit)):
        group._all_gather_result = None  # a reset would wait for the work, which has failed
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
