"""Private names of matplotlib: addresses and counters in its pickles. Importing this loads no matplotlib."""

from __future__ import annotations

import copyreg
import sys
from typing import Any

from distnb.compat.versions import private_names

__all__ = ["is_registry", "is_transform", "reduce_registry", "reduce_transform", "update_transform"]


def is_transform(kind: type) -> bool:
    """Return whether a class is a transform that matplotlib's own rule pickles."""
    node = _node()
    return node is not None and issubclass(kind, node) and kind.__getstate__ is node.__getstate__


def _node() -> Any:
    return getattr(sys.modules.get("matplotlib.transforms"), "TransformNode", None)


def reduce_transform(transform: Any) -> Any:
    """Reduce a transform without the transforms that depend on it, which it holds by their addresses in this process.

    These register with it where they are opened. Otherwise the order of these addresses would decide in which order
    objects are pickled, and replicas would number them differently.
    """
    with private_names("matplotlib"):
        state = {**vars(transform), "_parents": {}}
    return copyreg.__newobj__, (type(transform),), state, None, None, _fill_transform  # type: ignore[attr-defined]


def _fill_transform(transform: Any, state: dict[str, Any]) -> None:
    vars(transform).update(state)
    _register(transform)


def update_transform(transform: Any, state: dict[str, Any]) -> None:
    """Give a transform other attributes. The transforms that depend on it stay."""
    parents = transform._parents
    vars(transform).clear()
    vars(transform).update(state, _parents=parents)
    _register(transform)


def _register(transform: Any) -> None:
    transform.set_children(*(part for part in vars(transform).values() if isinstance(part, _node())))


def is_registry(kind: type) -> bool:
    """Return whether a class is that of the registries of callbacks."""
    return kind is getattr(sys.modules.get("matplotlib.cbook"), "CallbackRegistry", None)


def reduce_registry(registry: Any) -> Any:
    """Reduce a registry of callbacks. The number of its next callback does not depend on the pickles made before."""
    with private_names("matplotlib"):
        state = registry.__getstate__()
        numbers = [number for each in state["callbacks"].values() for number in each]
        state["_cid_gen"] = max(numbers, default=-1) + 1
    return copyreg.__newobj__, (type(registry),), state  # type: ignore[attr-defined]
