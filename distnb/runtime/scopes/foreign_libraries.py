"""Other libraries whose objects need help on replicas, and the modules of ours that know them, loaded when needed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from distnb.compat import accelerate_internals, lightning_internals
from distnb.variables.variable import Variable

__all__ = ["begin_program", "is_shared", "prepare", "restore_shared", "strategy_of_shared", "tensors_in", "variable_in"]

_KEEPERS = {"keras": "distnb.keras.replica_state"}
_prepared: dict[str, Any] = {}
_STRATEGY = "_distnb_strategy"


def prepare() -> None:
    """Have each library that is loaded know of replicas, from its next object on. Idempotent."""
    for library in _KEEPERS.keys() - _prepared.keys():
        loaded: Any = sys.modules.get(library)
        if loaded is not None and _computes_with_torch(loaded):
            keeper: Any = importlib.import_module(_KEEPERS[library])
            keeper.install()
            _prepared[library] = keeper


def _computes_with_torch(library: Any) -> bool:
    """Return whether a library that has several backends has torch's; False while it is being imported."""
    backend = getattr(library, "backend", None)
    return getattr(backend, "backend", lambda: None)() == "torch"


def begin_program(size: int, rank: int) -> None:
    """Undo what libraries keep of an earlier program's processes.

    Keras would share out what later programs train. Accelerate and Lightning would go on with as many processes as
    there were, and with another rank.
    """
    accelerate_internals.renew(size, rank)
    lightning_internals.renew(rank)
    own: Any = getattr(sys.modules.get("keras"), "distribution", None)
    if own is not None and own.distribution() is not None:
        own.set_distribution(None)


def is_shared(value: Any) -> bool:
    """Return whether replicas share an object that is no module: each has a part, and reading combines them."""
    return strategy_of_shared(value) is not None


def strategy_of_shared(value: Any) -> Any:
    """Return the strategy whose replicas share an object, or None."""
    try:
        own: Any = object.__getattribute__(value, "__dict__")  # whatever the object's class does when it is asked
    except AttributeError:
        return None
    return own.get(_STRATEGY)


def variable_in(value: Any) -> Variable | None:
    """Return the variable of ours that another library's variable holds; one of ours holds itself."""
    if isinstance(value, Variable):
        return value
    held = (keeper.variable_in(value) for keeper in _prepared.values())
    return next((each for each in held if isinstance(each, Variable)), None)


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors of another library's variable, or optimizer; none of any other object."""
    return [tensor for keeper in _prepared.values() for tensor in keeper.tensors_in(value)]


def restore_shared(value: Any, strategy: Any) -> bool:
    """Have this replica share an object that was copied from another one. Return False if it is none of these."""
    prepare()
    return any(keeper.restore(value, strategy) for keeper in _prepared.values())
