"""What a checkpoint holds of Keras's models and optimizers: variables, in order; their names count layers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distnb.errors import CheckpointError, OptionError

__all__ = ["is_of_keras", "is_state_of_keras", "restore", "state_of"]


def is_of_keras(value: Any) -> bool:
    """Whether it is a layer, a model or an optimizer of Keras. Loads no Keras."""
    keras: Any = sys.modules.get("keras")
    return keras is not None and isinstance(value, (keras.layers.Layer, keras.optimizers.Optimizer))


def is_state_of_keras(state: Any) -> bool:
    """Whether this is what `state_of` gives, or torch's `state_dict()` of a Keras model."""
    if not isinstance(state, Mapping):
        return False
    return isinstance(state.get("weights"), list) or any("_torch_params." in str(name) for name in state)


def _parts(value: Any) -> dict[str, Sequence[Any]]:
    """The variables of a model, with those of the optimizer that it was compiled with; of an optimizer."""
    if not hasattr(value, "weights"):
        return {"optimizer": value.variables}
    optimizer = getattr(value, "optimizer", None)
    return {"weights": value.weights} | ({"optimizer": optimizer.variables} if optimizer is not None else {})


def state_of(value: Any, name: str) -> dict[str, list[torch.Tensor]]:
    """The values of its variables. Raises OptionError for one that Keras has not built yet."""
    if not value.built:
        raise OptionError(
            f"A checkpoint cannot hold {name}: Keras makes its variables when it sees the first batch. Save it after "
            "`fit`, or call `build`."
        )
    return {part: [each.value.detach() for each in variables] for part, variables in _parts(value).items()}


def restore(value: Any, state: Any, name: str) -> None:
    """Give it its values back.

    Raises:
        CheckpointError: It has other variables.
    """
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
