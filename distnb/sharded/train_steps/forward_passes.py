"""Forward passes through sharded models: what is checked before, and freed afterwards.

FSDP gathers a unit's parameters before its forward pass, and frees them afterwards. It does not check that they are the
shards which it has made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from distnb.collectives.eager import always_eager
from distnb.compat import fsdp_internals, torch_internals
from distnb.errors import ContextError
from distnb.runtime import contexts
from distnb.sharded.making.initial_values import is_filled
from distnb.sharded.making.lost_values import lost_error, require_values
from distnb.sharded.parts import local_part
from distnb.values.structure import flatten, map_structure

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["ForwardPasses"]


class ForwardPasses:
    """The observation of forward passes for one strategy's sharded models.

    Args:
        group: Returns the current process group.
    """

    def __init__(self, group: Callable[[], Group]) -> None:
        self._group = group
        self._groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of each model
        self._unfilled: weakref.WeakSet[Any] = weakref.WeakSet()  # models that may have parameters without values

    def observe(self, unit: torch.nn.Module) -> None:
        """Observe the passes of a module that is about to become a unit."""
        unit.register_forward_hook(self._after_unit)

    def add(self, root: torch.nn.Module, *, is_filled: bool) -> None:
        """Observe the passes of a sharded model.

        Args:
            root: The model.
            is_filled: Whether all its parameters and buffers have values.
        """
        self._groups[root] = self._group().process_group
        if not is_filled:
            self._unfilled.add(root)
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_forward_hook(_after_forward, always_call=True)

    @property
    def models(self) -> list[Any]:
        """The sharded models."""
        return list(self._groups)

    def has_all_parts(self, root: Any) -> bool:
        """Return whether the replicas that hold the shards of a model are the current ones."""
        return self._groups.get(root) is self._group().process_group

    @always_eager
    def _before_forward(self, root: torch.nn.Module, inputs: Any) -> None:
        contexts.require_all_replicas()
        if any(isinstance(each, torch.Tensor) and each.is_meta for each in flatten(inputs)[0]):
            raise ContextError(
                f"A sharded {torch_internals.original_class(root).__name__} was called with tensors on the meta "
                "device, which have no values. Call it with ordinary tensors."
            )
        if root in self._unfilled:
            self._require_values(root)
        model = f"this {torch_internals.original_class(root).__name__}"
        if not self.has_all_parts(root):
            raise lost_error(model, divided=False)
        require_values(root.parameters(), model)
        name, value = fsdp_internals.adopt_changes(root)
        if isinstance(value, set):
            raise ContextError(
                f"The unit {name!r} of this sharded {torch_internals.original_class(root).__name__} has parameters of "
                f"several dtypes ({', '.join(sorted(map(str, value)))}), because the program has converted some of "
                "them. FSDP gathers tensors of one dtype. Convert all of the unit, or make the model with these dtypes "
                "in the scope: then each dtype has units of its own."
            )
        if name:
            raise ContextError(
                f"The parameter {name!r} of this sharded {torch_internals.original_class(root).__name__} is "
                f"{_description(value)} and not its own shard, because torch.func.functional_call or an assignment has "
                "replaced it. FSDP gathers only a model's own shards. Copy values (`with torch.no_grad(): "
                "parameter.copy_(value)`), or make the model in the scope of a MirroredStrategy."
            )
        if torch.is_inference_mode_enabled():
            fsdp_internals.make_gathered(root)

    @always_eager
    def _after_unit(self, unit: torch.nn.Module, _inputs: Any, outputs: Any) -> Any:
        """Check that a unit's pass has not changed parameters, and replace outputs that are views by copies.

        FSDP gathers a unit's parameters again when the backward pass reaches its outputs. It would not notice the pass
        if the program changed such a view in place (`x = layer(x); x += residual`).
        """
        changed = fsdp_internals.changed_in_forward(unit)
        if changed and self._group().size == 1:
            fsdp_internals.keep_changes(unit)
        elif changed:
            raise ContextError(
                f"The forward pass of this sharded {torch_internals.original_class(unit).__name__} has changed its "
                f"parameter {changed!r} in place. FSDP frees the whole parameter after the pass, so the change would "
                "be lost. Change parameters after optimizer.step(), or compute with a changed copy."
            )
        return map_structure(_without_base, outputs) if torch.is_grad_enabled() else outputs

    def _require_values(self, root: torch.nn.Module) -> None:
        """Raise ContextError if nothing has set a parameter or a buffer of a model made on the meta device."""
        tensors = [*root.named_parameters(), *root.named_buffers()]
        empty = [name for name, each in tensors if each.is_meta or not is_filled(local_part(each))]
        if empty:
            more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
            raise ContextError(
                f"This {torch_internals.original_class(root).__name__} was made on the meta device, and nothing has "
                f"set {', '.join(empty[:3])}{more}. Load values by distnb.load_safetensors(model, path) or "
                "distnb.Checkpoint(model=model).restore(path), give each module with parameters or buffers of its own "
                "a method reset_parameters, or make the module on an ordinary device."
            )
        self._unfilled.discard(root)


@always_eager
def _after_forward(root: torch.nn.Module, _inputs: Any, _outputs: Any) -> None:
    """Free what a pass has gathered that has ended with an error, which the program may catch."""
    if fsdp_internals.is_in_forward(root):
        fsdp_internals.reset(root)


def _without_base(leaf: Any) -> Any:
    is_view = isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch_internals.is_view(leaf)
    return leaf.clone() if is_view else leaf


def _description(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{'a shard' if isinstance(value, DTensor) else 'a tensor'} of shape {list(value.shape)}"
