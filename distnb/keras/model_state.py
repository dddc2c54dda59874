"""The tensors of a Keras model, and their values while replica 0 alone uses them.

with whole_values(model):         all replicas gather: replica 0 gets the values, the others empty tensors
    model.load_weights(path)      on replica 0
    values = state_of(model)
share_state(group, model, values) all replicas keep their parts

Replicas that hold whole models have nothing to gather. A feature by which each replica holds a part of a model adds to
the extension point "shards in Keras":

    whole values    a context in which a Keras object holds whole values instead of its shards; yields whether it did
    fill            copies this replica's part of a whole tensor to a sharded one
    optimizers      makes Keras's optimizers aware of shards; called once
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from distnb import features
from distnb.checkpoint.tensor_slices import is_sharded
from distnb.collectives.group.interface import Group
from distnb.keras import keras_internals
from distnb.runtime import contexts
from distnb.runtime.reduction.gathering import broadcast_tree

__all__ = ["State", "buffers_in", "fill", "share_state", "state_of", "whole_values"]

State = Mapping[tuple[str, int], torch.Tensor]
"""Tensors of a model by their kinds and positions."""


def whole_values(value: Any) -> AbstractContextManager[bool]:
    """Return a context in which a Keras object holds whole values instead of shards. All replicas call this.

    Replica 0 gets the values, in host memory; the others get tensors without memory. What is written to them is lost.
    The context yields whether there are shards.

    Raises:
        ContextError: Replica 0 is alone, in a callback, and there are shards.
    """
    gathered = features.find("shards in Keras", "whole values")
    found: AbstractContextManager[bool] = nullcontext(False) if gathered is None else gathered(value)
    return found


def state_of(model: Any) -> dict[tuple[str, int], torch.Tensor]:
    """Return the tensors of a model's variables, of its optimizer's, and of the buffers in its torch modules.

    Their keys are positions, because names in Keras may differ between replicas.
    """
    optimizer = getattr(model, "optimizer", None)
    kinds: dict[str, Iterable[torch.Tensor]] = {
        "model": [each.value for each in model.variables],
        "optimizer": [each.value for each in optimizer.variables] if optimizer is not None else [],
        "buffer": buffers_in(model),
    }
    return {(kind, place): each for kind, tensors in kinds.items() for place, each in enumerate(tensors)}


def share_state(group: Group, model: Any, values: State | None) -> None:
    """Set values of a model that replica 0 has in `whole_values`. All replicas call this, and keep their parts.

    Args:
        group: The replicas.
        model: The model.
        values: The values by the keys of `state_of`, on replica 0.
    """
    here = state_of(model)
    for name in broadcast_tree(group, values and list(values), 0):
        fill(here[name], broadcast_tree(group, values and values[name].detach().cpu(), 0))


def fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value to a tensor. If this replica holds a part of the tensor, the value may be whole.

    Raises:
        ContextError: Replica 0 is alone, in a callback.
    """
    if is_sharded(target) and not is_sharded(value):
        contexts.require_all_replicas()
        features.require("shards in Keras", "fill")(target, value)
        return
    with torch.no_grad():
        target.copy_(value)


def buffers_in(layer: Any) -> list[torch.Tensor]:
    """Return the buffers of the torch modules in a Keras layer that torch would save, such as running statistics."""
    found: dict[int, torch.Tensor] = {}
    for wrapper in keras_internals.wrappers_in(layer):
        saved = wrapper.module.state_dict().keys()
        found |= {id(buffer): buffer for name, buffer in wrapper.module.named_buffers() if name in saved}
    return list(found.values())
