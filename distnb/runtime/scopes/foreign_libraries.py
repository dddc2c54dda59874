"""Support for objects of other libraries on replicas. distnb's modules for a library are loaded when it is used.

A feature adds a module to the extension point "libraries on replicas", under the library's name. The module prepares
the library (`install`), and knows its objects (`variable_in`, `tensors_in`, `restore`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable
from typing import Any

from distnb import features
from distnb.compat import accelerate_internals, lightning_internals
from distnb.variables.variable import Variable

__all__ = [
    "begin_program",
    "computes_with_torch",
    "is_prepared",
    "is_shared",
    "prepare",
    "restore_shared",
    "strategy_of_shared",
    "supports",
    "tensors_in",
    "variable_in",
]

_prepared: dict[str, Any] = {}
_STRATEGY = "_distnb_strategy"


def prepare() -> None:
    """Prepare each loaded library for replicas: objects that it makes from now on are handled. Idempotent."""
    if sys.modules.keys().isdisjoint(_libraries()):  # looks up each of the few names
        return
    for library in _loaded(name for name in features.names("libraries on replicas") if name not in _prepared):
        keeper = features.find("libraries on replicas", library)
        keeper.install()
        _prepared[library] = keeper


@functools.cache
def _libraries() -> frozenset[str]:
    return frozenset(features.names("libraries on replicas"))


def is_prepared(library: str) -> bool:
    """Return whether a library was prepared for replicas."""
    return library in _prepared


def supports(point: str) -> list[Any]:
    """Return the objects at an extension point whose names are libraries, for the loaded libraries.

    Libraries whose version distnb does not know are left out.
    """
    found = []
    for library in _loaded(features.names(point)):
        with contextlib.suppress(ImportError):
            found.append(features.find(point, library))
    return found


def _loaded(libraries: Iterable[str]) -> list[str]:
    """Return those libraries that are loaded and compute with torch."""
    return [name for name in libraries if name in sys.modules and computes_with_torch(sys.modules[name])]


def computes_with_torch(library: Any) -> bool:
    """Return whether a library with several backends uses torch. Return False while the library is being imported."""
    backend = getattr(library, "backend", None)
    return getattr(backend, "backend", lambda: None)() == "torch"


_KNOW_PROCESSES = frozenset({"keras", accelerate_internals.STATE, lightning_internals.RANKS})


def begin_program(size: int, rank: int) -> None:
    """Clear the information about processes that libraries keep from an earlier program.

    Otherwise Keras would distribute the training of later programs, and Accelerate and Lightning would use the old
    number of processes and the old rank.
    """
    if sys.modules.keys().isdisjoint(_KNOW_PROCESSES):  # looks up each of the few names
        return
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


def restore_shared(value: Any, strategy: Any) -> bool:
    """Mark an object copied from another replica as shared. Return False if no library has such shared objects."""
    prepare()
    return any(keeper.restore(value, strategy) for keeper in _prepared.values())
