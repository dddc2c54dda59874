"""Private names of torchmetrics: states of metrics, and the method that combines them.

Importing this loads no torchmetrics: `load` does, and checks its version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from distnb.compat.versions import private_names

__all__ = [
    "default_states",
    "forget_result",
    "load",
    "reductions",
    "replace_combine",
    "set_updates",
    "signature_of_update",
    "updates",
]


@functools.cache
def load() -> Any:
    """Import torchmetrics, and return it.

    Raises:
        LibraryVersionError: Its version is too old, or lacks a name.
    """
    with private_names("torchmetrics"):
        import torchmetrics

        torchmetrics.Metric._sync_dist  # noqa: B018  (it is there)
    return torchmetrics


def updates(metric: Any) -> int:
    """Return the number of a metric's updates since its last reset."""
    count: int = metric._update_count
    return count


def set_updates(metric: Any, count: int) -> None:
    """Set the number of a metric's updates."""
    metric._update_count = count


def forget_result(metric: Any) -> None:
    """Make a metric compute its result again at the next read."""
    metric._computed = None


def default_states(metric: Any) -> dict[str, Any]:
    """Return the states of a newly reset metric by name, or {} for a wrapper."""
    states: dict[str, Any] = metric._defaults
    return states


def reductions(metric: Any) -> dict[str, Any]:
    """Return the functions that combine the replicas' states, by the states' names."""
    functions: dict[str, Any] = metric._reductions
    return functions


def signature_of_update(metric: Any) -> Any:
    """Return the signature of a metric's own `update`, or None if there is none."""
    return getattr(metric, "_update_signature", None)


def replace_combine(metric: Any, function: Callable[..., None]) -> None:
    """Replace the method that combines a metric's states over processes."""
    metric._sync_dist = function
