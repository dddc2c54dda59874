"""Whole values in place of the shards of Keras's objects, while replica 0 saves, loads or pickles them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from distnb.checkpoint.tensor_slices import is_sharded
from distnb.keras import keras_internals
from distnb.objects.keras_archives import without_time
from distnb.runtime import contexts
from distnb.runtime.inspection.device_objects import register_device_types
from distnb.runtime.this_process import this_process

__all__ = ["WholeArchive", "shards_in", "whole_copy", "whole_values"]


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
    weights = [variable for wrapper in keras_internals.wrappers_in(value) for variable in wrapper.variables]
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
    wrappers = keras_internals.wrappers_in(value) if is_layer else []
    variables = {id(each): each for each in _variables_in(value) if is_sharded(keras_internals.tensor_of(each))}
    tensors = [keras_internals.tensor_of(each) for each in variables.values()]
    modules = [wrapper.module for wrapper in wrappers]
    copies = whole_copies(*modules, *tensors, gradients=False)
    wholes = {id(tensor): whole for tensor, whole in zip(tensors, copies[len(modules) :], strict=True)}
    tables = [keras_internals.tracked_tensors(each) for each in keras_internals.tracked_in(value)] if is_layer else []
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


register_device_types(WholeArchive)
