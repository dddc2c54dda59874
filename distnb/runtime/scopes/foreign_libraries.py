"""Support for objects of other libraries on replicas. distnb's modules for a library are loaded when it is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from distnb.compat import accelerate_internals, lightning_internals
from distnb.variables.variable import Variable

__all__ = [
    "begin_program",
    "computes_with_torch",
    "is_shared",
    "modules_in",
    "prepare",
    "put_parameters",
    "restore_shared",
    "shards_in",
    "strategy_of_shared",
    "tensors_in",
    "variable_in",
    "whole_copy",
]

_KEEPERS = {"keras": "distnb.keras.replica_state"}
_prepared: dict[str, Any] = {}
_STRATEGY = "_distnb_strategy"


def prepare() -> None:
    """Prepare each loaded library for replicas: objects that it makes from now on are handled. Idempotent."""
    for library in _KEEPERS.keys() - _prepared.keys():
        loaded: Any = sys.modules.get(library)
        if loaded is not None and computes_with_torch(loaded):
            keeper: Any = importlib.import_module(_KEEPERS[library])
            keeper.install()
            _prepared[library] = keeper


def computes_with_torch(library: Any) -> bool:
    """Return whether a library with several backends uses torch. Return False while the library is being imported."""
    backend = getattr(library, "backend", None)
    return getattr(backend, "backend", lambda: None)() == "torch"


def begin_program(size: int, rank: int) -> None:
    """Clear the information about processes that libraries keep from an earlier program.

    Otherwise Keras would distribute the training of later programs, and Accelerate and Lightning would use the old
    number of processes and the old rank.
    """
    accelerate_internals.renew(size, rank)
    lightning_internals.renew(rank)
    own: Any = getattr(sys.modules.get("keras"), "distribution", None)
    if own is not None and own.distribution() is not None:
        own.set_distribution(None)


def is_shared(value: Any) -> bool:
    """Return whether an object that is not a module is shared: each replica has a part, and reading combines them."""
    return strategy_of_shared(value) is not None


def strategy_of_shared(value: Any) -> Any:
    """Return the strategy whose replicas share an object, or None."""
    try:
        own: Any = object.__getattribute__(value, "__dict__")  # bypasses a `__getattribute__` of the object's class
    except AttributeError:
        return None
    return own.get(_STRATEGY)


def variable_in(value: Any) -> Variable | None:
    """Return the distnb variable that another library's variable holds, or the value itself if it is one.

    Return None for all other values.
    """
    if isinstance(value, Variable):
        return value
    held = (keeper.variable_in(value) for keeper in _prepared.values())
    return next((each for each in held if isinstance(each, Variable)), None)


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors of another library's variable or optimizer; an empty list for any other object."""
    return [tensor for keeper in _prepared.values() for tensor in keeper.tensors_in(value)]


def modules_in(value: torch.nn.Module) -> list[torch.nn.Module] | None:
    """Return the torch modules that a layer of another library wraps, or None for an ordinary torch module.

    Raises:
        ContextError: The layer has parameters outside them.
    """
    found = (keeper.modules_in(value) for keeper in _prepared.values())
    return next((each for each in found if each is not None), None)


def put_parameters(layer: torch.nn.Module, current: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the parameters that a library keeps for the torch modules in its layer, after they were replaced there.

    Args:
        layer: The layer.
        current: Returns the parameter in place of another one.
    """
    for keeper in _prepared.values():
        keeper.put_parameters(layer, current)


def shards_in(value: Any) -> list[torch.Tensor]:
    """Return the sharded tensors in an object of another library; an empty list for any other object."""
    return [tensor for keeper in _prepared.values() for tensor in keeper.shards_in(value)]


def whole_copy(value: Any) -> Any:
    """Return a copy of another library's object with whole tensors in place of shards, which can be pickled.

    All replicas call this, and replica 0 gets the content. Return None for any other object.
    """
    copies = (keeper.whole_copy(value) for keeper in _prepared.values())
    return next((each for each in copies if each is not None), None)


def restore_shared(value: Any, strategy: Any) -> bool:
    """Mark an object copied from another replica as shared. Return False if no library has such shared objects."""
    prepare()
    return any(keeper.restore(value, strategy) for keeper in _prepared.values())
