"""Private names of torchmetrics: states of metrics, and the methods that update, combine and group them.

Importing this loads no torchmetrics: `load` does, and checks its version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distnb.compat.versions import private_names

__all__ = [
    "default_states",
    "forget_result",
    "load",
    "merge_groups",
    "reductions",
    "replace_combine",
    "replace_merge_groups",
    "replace_wrap_update",
    "set_updates",
    "signature_of_update",
    "updates",
    "wrap_update",
]


def load() -> Any:
    """Import torchmetrics, and return it.

    Raises:
        LibraryVersionError: Its version is too old, or lacks a name.
    """
    with private_names("torchmetrics"):
        import torchmetrics

        wrap_update()
        merge_groups()
        torchmetrics.Metric._sync_dist  # noqa: B018  (it is there)
    return torchmetrics


def updates(metric: Any) -> int:
    """Return how often a metric was updated since its last reset."""
    count: int = metric._update_count
    return count


def set_updates(metric: Any, count: int) -> None:
    """Have a metric know how often it was updated."""
    metric._update_count = count


def forget_result(metric: Any) -> None:
    """Have a metric compute its result again when it is read next."""
    metric._computed = None


def default_states(metric: Any) -> dict[str, Any]:
    """Return the states of a metric that was just reset, by name; none of a wrapper."""
    states: dict[str, Any] = metric._defaults
    return states


def reductions(metric: Any) -> dict[str, Any]:
    """Return the function that combines the replicas' states, for each by name."""
    functions: dict[str, Any] = metric._reductions
    return functions


def signature_of_update(metric: Any) -> Any:
    """Return the signature of a metric's own `update`, or None if there is none."""
    return getattr(metric, "_update_signature", None)


def replace_combine(metric: Any, function: Callable[..., None]) -> None:
    """Replace how a metric's states are combined over processes."""
    metric._sync_dist = function


def wrap_update() -> Callable[..., Any]:
    """Return the function that wraps the `update` of each metric that is made."""
    from torchmetrics import Metric

    return Metric._wrap_update


def replace_wrap_update(function: Callable[..., Any]) -> None:
    """Replace that function."""
    from torchmetrics import Metric

    Metric._wrap_update = function  # type: ignore[method-assign]


def merge_groups() -> Callable[..., Any]:
    """Return the method by which a collection finds metrics that can share a state."""
    from torchmetrics import MetricCollection

    return MetricCollection._merge_compute_groups


def replace_merge_groups(function: Callable[..., None]) -> None:
    """Replace that method."""
    from torchmetrics import MetricCollection

    MetricCollection._merge_compute_groups = function  # type: ignore[method-assign]
