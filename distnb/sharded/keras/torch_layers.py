"""The torch modules in Keras layers, which a ShardedStrategy divides, and the variables that Keras keeps for them.

keras.Sequential                  FSDP does not know it
  TorchModuleWrapper
    module: torch.nn.Linear       a root of FSDP
    variables                     hold the same parameters as the module; the optimizer updates them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from distnb.errors import ContextError
from distnb.keras import keras_internals

__all__ = ["modules_in", "put_parameters"]


def modules_in(value: Any) -> list[torch.nn.Module] | None:
    """Return the torch modules in a Keras layer, or None for any other object.

    Raises:
        ContextError: The layer has weights of Keras's own, its modules share parameters, or a torch module has Keras
            layers.
    """
    if not isinstance(value, keras.layers.Layer):
        _refuse_within(value)
        return None
    wrappers = keras_internals.wrappers_in(value)
    wrapped = {id(variable) for wrapper in wrappers for variable in wrapper.variables}
    own = next((each for each in value.weights if id(each) not in wrapped), None)
    if own is not None:
        raise ContextError(
            f"The weight {own.path!r} belongs to a Keras layer, and a ShardedStrategy divides torch modules only. Use "
            "torch modules in place of Keras's layers with weights, for example "
            "keras.layers.TorchModuleWrapper(torch.nn.Linear(64, 10)) in place of keras.layers.Dense(10), or make the "
            "model in the scope of a MirroredStrategy."
        )
    modules = list({id(wrapper.module): wrapper.module for wrapper in wrappers}.values())
    _refuse_shared(value, modules)
    return modules


def _refuse_within(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, keras.layers.Layer) and part.weights:
            raise ContextError(
                f"A {type(module).__name__} contains the Keras layer {name!r}, and a ShardedStrategy cannot divide it: "
                "FSDP would replace the parameters behind Keras's variables. Put torch modules into a Keras model "
                "(keras.layers.TorchModuleWrapper), not Keras layers into a torch module."
            )


def _refuse_shared(layer: Any, modules: list[torch.nn.Module]) -> None:
    owners: dict[int, torch.nn.Module] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if owners.setdefault(id(parameter), module) is not module:
                raise ContextError(
                    f"Two torch modules in {layer.name!r} share a parameter, {name!r} of a {type(module).__name__}. A "
                    "ShardedStrategy gathers it for one of them only. Put both into one torch module."
                )


def put_parameters(layer: Any, current: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the parameters that Keras's variables hold.

    Args:
        layer: A Keras layer.
        current: Returns the parameter in place of another one.
    """
    for wrapper in keras_internals.wrappers_in(layer):
        for variable in wrapper.variables:
            keras_internals.put_tensor(variable, current(keras_internals.tensor_of(variable)))
    keras_internals.track_again(keras_internals.tracked_in(layer))
