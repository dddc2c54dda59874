"""Keras's optimizers of sharded parameters: each replica keeps its part of the slots, such as momentums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distnb.checkpoint.tensor_slices import is_sharded
from distnb.compat import patches
from distnb.keras import keras_internals
from distnb.runtime import contexts
from distnb.runtime.this_process import this_process
from distnb.strategies.sharded import not_elementwise
from distnb.variables.elementwise import is_elementwise

__all__ = ["install"]


def install() -> None:
    """Make Keras's optimizers aware of sharded parameters from now on. Idempotent."""
    patches.wrap("keras.optimizers:Optimizer.build", _build)
    patches.wrap("keras.optimizers:Optimizer.add_variable_from_reference", _add_slot)


def _build(plain: Callable[..., None], optimizer: Any, variables: Sequence[Any]) -> None:
    """Shard the models of the scope before their optimizer makes slots. Refuse an optimizer that needs whole tensors.

    Raises:
        OptionError: The optimizer's update of an element depends on the others.
    """
    process, innermost = this_process.replica, contexts.innermost()
    if process is not None and innermost is not None and process.runs(innermost[0]):
        process.runtime_of(innermost[0]).before_optimizer()
    sharded = [each for each in variables if is_sharded(keras_internals.tensor_of(each))]
    if sharded and not is_elementwise(type(optimizer)):
        raise not_elementwise(optimizer)
    plain(optimizer, variables)


def _add_slot(plain: Callable[..., Any], optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Add a variable like a parameter. Keep this replica's part of it, if the parameter is sharded."""
    made = plain(optimizer, reference_variable, *args, **kwargs)
    parameter = keras_internals.tensor_of(reference_variable)
    if is_sharded(parameter):
        from distnb.sharded.parts import part_of  # loads FSDP

        part = part_of(keras_internals.tensor_of(made), parameter.detach())
        keras_internals.put_tensor(made, torch.nn.Parameter(part, requires_grad=False))
    return made
