"""Whole values in place of the shards of Keras's objects, while replica 0 saves, loads or pickles them.

with whole_values(model):         all replicas gather: replica 0 gets the values, the others empty tensors
    model.load_weights(path)      on replica 0
    values = state_of(model)
share_state(group, model, values) all replicas keep their parts
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import torch

from distnb.checkpoint.tensor_slices import is_sharded
from distnb.collectives.group.interface import Group
from distnb.keras import keras_internals
from distnb.objects.keras_archives import without_time
from distnb.runtime import contexts
from distnb.runtime.reduction.gathering import broadcast_tree
from distnb.runtime.this_process import this_process
from distnb.sharded.keras.torch_layers import buffers_in, tracked_in, wrappers_in

__all__ = ["WholeArchive", "fill", "share_state", "shards_in", "state_of", "whole_copy", "whole_values"]

State = Mapping[tuple[str, int], torch.Tensor]
"""Tensors of a model by their kinds and positions."""


def shards_in(value: Any) -> list[torch.Tensor]:
    """Return the sharded tensors that a Keras layer, optimizer or variable holds, in order."""
    return [tensor for each in _variables_in(value) if is_sharded(tensor := keras_internals.tensor_of(each))]


def _variables_in(value: Any) -> list[Any]:
    if isinstance(value, keras.Variable):
        return [value]
    if isinstance(value, keras.optimizers.Optimizer):
        return list(value.variables)
    if not isinstance(value, keras.layers.Layer):
        return []
    weights = [variable for wrapper in wrappers_in(value) for variable in wrapper.variables]
    return [*weights, *_variables_in(getattr(value, "optimizer", None))]


@contextmanager
def whole_values(value: Any) -> Iterator[bool]:
    """Return a context in which a Keras object holds whole values instead of shards. All replicas call this.

    Replica 0 gets the values, in host memory; the others get tensors without memory. What is written to them is lost.

    Yields:
        Whether there are shards.

    Raises:
        ContextError: Replica 0 is alone, in a callback.
    """
    if not shards_in(value):
        yield False
        return
    contexts.require_all_replicas()
    from distnb.sharded.whole_copies import whole_copies  # loads FSDP

    is_layer = isinstance(value, keras.layers.Layer)
    wrappers = wrappers_in(value) if is_layer else []
    variables = {id(each): each for each in _variables_in(value) if is_sharded(keras_internals.tensor_of(each))}
    tensors = [keras_internals.tensor_of(each) for each in variables.values()]
    modules = [wrapper.module for wrapper in wrappers]
    copies = whole_copies(*modules, *tensors, gradients=False)
    wholes = {id(tensor): whole for tensor, whole in zip(tensors, copies[len(modules) :], strict=True)}
    tables = [keras_internals.tracked_tensors(each) for each in tracked_in(value)] if is_layer else []
    before = [dict(table) for table in tables]
    try:
        for wrapper, module in zip(wrappers, copies[: len(modules)], strict=True):
            keras_internals.put_module(wrapper, module)
        for variable, tensor in zip(variables.values(), tensors, strict=True):
            keras_internals.put_tensor(variable, wholes[id(tensor)])
        for table in tables:
            table.update({name: wholes.get(id(tensor), tensor) for name, tensor in table.items()})
        yield True
    finally:
        for wrapper, module in zip(wrappers, modules, strict=True):
            keras_internals.put_module(wrapper, module)
        for variable, tensor in zip(variables.values(), tensors, strict=True):
            keras_internals.put_tensor(variable, tensor)
        for table, entries in zip(tables, before, strict=True):
            table.update(entries)


# -- values that replica 0 has changed ---------------------------------------------------------------------------------


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
        from distnb.sharded.parts import fill_part  # loads FSDP

        fill_part(target, value)
        return
    with torch.no_grad():
        target.copy_(value)


# -- copies for the notebook -------------------------------------------------------------------------------------------


class WholeArchive:
    """The archive as which Keras pickles an object. Its pickle is the object's."""

    def __init__(self, reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


def whole_copy(value: Any) -> Any:
    """Return a copy of a sharded Keras object with whole values, which can only be pickled. All replicas call this.

    Replica 0 gets the content. Return None for any other object.
    """
    if not shards_in(value):
        return None
    with whole_values(value):
        if isinstance(value, keras.Variable):
            return copy.copy(value)
        process = this_process.replica
        is_chief = process is None or process.rank == 0
        return WholeArchive(without_time(value.__reduce__()) if is_chief else (WholeArchive, (None,)))
