"""What a checkpoint holds of Keras's models and optimizers: variables, in order; their names count layers.

In the notebook they may be handles: then it is done where they are.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distnb.errors import CheckpointError, OptionError
from distnb.runtime.this_process import this_process
from distnb.values import Mirrored

__all__ = ["is_of_keras", "is_state_of_keras", "restore", "state_of"]


def is_of_keras(value: Any) -> bool:
    """Whether it is a layer, a model or an optimizer of Keras. Loads no Keras."""
    if isinstance(value, Mirrored):
        return bool(_where_it_is(is_of_keras, value))
    keras: Any = sys.modules.get("keras")
    return keras is not None and isinstance(value, (keras.layers.Layer, keras.optimizers.Optimizer))


def _where_it_is(function: Callable[..., Any], handle: Any, *others: Any) -> Any:
    """Call a function with the object of a handle, on the replicas, as torch's functions are called."""
    return type(handle).__torch_function__(function, (), (handle, *others))


def is_state_of_keras(state: Any) -> bool:
    """Whether this is what `state_of` gives of a model."""
    return isinstance(state, Mapping) and isinstance(state.get("weights"), list)


def _parts(value: Any) -> dict[str, Sequence[Any]]:
    """The variables of a model, with those of the optimizer that it was compiled with; of an optimizer."""
    if not hasattr(value, "weights"):
        return {"optimizer": value.variables}
    optimizer = getattr(value, "optimizer", None)
    return {"weights": value.weights} | ({"optimizer": optimizer.variables} if optimizer is not None else {})


def state_of(value: Any, name: str) -> Mapping[str, list[torch.Tensor]]:
    """The values of its variables. Raises OptionError for one that Keras has not built yet."""
    if isinstance(value, Mirrored):
        state: Mapping[str, list[torch.Tensor]] = _where_it_is(state_of, value, name).component(0)
        return state
    if not value.built:
        raise OptionError(
            f"A checkpoint cannot hold {name}: Keras makes its variables when it sees the first batch. Save it after "
            "`fit`, or call `build`."
        )
    parts = _parts(value).items()
    if this_process.servers is not None:  # with parameter servers these are copies of what is there
        this_process.servers.read_anew([each.value for _, variables in parts for each in variables])
    return OrderedDict((part, [each.value.detach() for each in variables]) for part, variables in parts)


def restore(value: Any, state: Any, name: str) -> None:
    """Give it its values back.

    Raises:
        CheckpointError: It has other variables.
    """
    if isinstance(value, Mirrored):
        _where_it_is(restore_, value, state, name)
        return
    optimizer = getattr(value, "optimizer", None)
    if optimizer is not None and value.built and not optimizer.built:
        optimizer.build(value.trainable_variables)
    for part, variables in _parts(value).items():
        found = state.get(part) if isinstance(state, Mapping) else None
        here = [list(each.shape) for each in variables]
        there = [list(each.shape) for each in found] if isinstance(found, list) else None
        if there != here:
            raise CheckpointError(
                f"The checkpoint has variables of shapes {there} for the {part} of {name}, and here are {here}. A "
                "model that Keras has not built yet has none: call `build` first."
            )
    for part, variables in _parts(value).items():
        for variable, saved in zip(variables, state[part], strict=True):
            variable.assign(saved)


def restore_(value: Any, state: Any, name: str) -> None:
    """`restore`, by a name that says, as torch's do, that the first argument is changed: it is, where it is."""
    restore(value, state, name)
