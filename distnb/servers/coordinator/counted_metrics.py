"""The counts that other processes, such as workers of parameter servers, contribute to this process's metrics.

The contributions are kept separate from a metric's own states. They are combined with these when the metric is read, as
the states of replicas are, and torchmetrics restores the metric's own states afterwards. This works for every metric,
including those whose combined states cannot be updated further, such as PearsonCorrCoef.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from distnb.compat import torchmetrics_internals
from distnb.compat.torchmetrics_internals import default_states, reductions, updates
from distnb.errors import CannotTravelError
from distnb.runtime.scopes import metric_binding
from distnb.values.structure import map_structure

__all__ = ["Contribution", "add", "check", "contribution", "note_attributes", "reset"]

_FOLD = 256
_SIMPLE = (bool, int, float, str, torch.dtype, torch.Tensor)
_lock = threading.RLock()  # contributions arrive on one thread; another reads and resets the metric


class Contribution(NamedTuple):
    """The counts that one process contributes to a metric.

    Attributes:
        updates: The number of updates.
        states: The states by name.
        attributes: Attributes other than states that `update` has set, such as a dtype.
    """

    updates: int
    states: Mapping[str, Any]
    attributes: Mapping[str, Any]


@dataclass
class _Counted:
    """The counts of all other processes for a metric.

    Attributes:
        updates: The number of updates.
        parts: By state, the values that are not combined yet. For a state that is a list, its elements.
        stacked: By state, earlier values, stacked because one tensor takes less memory than many small ones.
    """

    updates: int = 0
    parts: dict[str, list[Any]] = field(default_factory=dict)
    stacked: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, metric: Any, given: Contribution) -> None:
        """Add a contribution. Values with an associative reduction (sum, minimum, maximum) are combined at once."""
        self.updates += given.updates
        for name, reduction in reductions(metric).items():
            parts, value = self.parts.setdefault(name, []), given.states[name]
            if isinstance(default_states(metric)[name], list):
                parts.extend(value if isinstance(value, list) else [value])
            elif parts and _is_associative(reduction):
                parts[0] = reduction(torch.stack([parts[0], value]))
            else:
                parts.append(value)
            if not isinstance(default_states(metric)[name], list) and len(parts) == _FOLD:
                self.stacked.setdefault(name, []).append(torch.stack(parts))
                parts.clear()

    def of(self, name: str, listed: bool) -> list[Any]:
        """Return the values of a state, as if each came from a replica. A listed state has one value, a list."""
        parts = self.parts.get(name, [])
        return [list(parts)] if listed else [*(each for block in self.stacked.get(name, ()) for each in block), *parts]

    def combine(self, metric: Any) -> None:
        """Set a metric's states to the combination of its own and the other processes' counts."""
        own = None if metric_binding.is_untouched(metric) else metric_binding.states_of(metric)
        for name, reduction in reductions(metric).items():
            listed = isinstance(default_states(metric)[name], list)
            parts = map_structure(
                lambda leaf: leaf.to(metric.device) if isinstance(leaf, torch.Tensor) else leaf,
                self.of(name, listed) + ([] if own is None else [own[name]]),
            )
            setattr(metric, name, metric_binding.combined(parts, reduction, listed))


def _is_associative(reduction: Any) -> bool:
    from torchmetrics.utilities import dim_zero_max, dim_zero_min, dim_zero_sum

    return reduction in (dim_zero_max, dim_zero_min, dim_zero_sum)


# -- in a process that counts ------------------------------------------------------------------------------------------


def check(root: Any) -> None:
    """Raise CannotTravelError for a metric whose updates by several processes cannot be combined.

    Examples are metrics that depend on the order of all updates, which is undefined across processes.
    """
    import torchmetrics

    for each in root.modules():
        if isinstance(each, torchmetrics.wrappers.Running):
            raise CannotTravelError(
                f"{type(root).__name__} covers only the latest updates, and updates of different workers have no "
                "order. Use it on the coordinator, with the results of functions, or reset a metric of all updates, "
                "such as distnb.metrics.Mean."
            )
        if isinstance(each, torchmetrics.regression.NormalizedRootMeanSquaredError):
            raise CannotTravelError(
                "torchmetrics can combine NormalizedRootMeanSquaredError over two processes at most. Use "
                "MeanSquaredError in scheduled functions, and normalise its root yourself."
            )


def reset(root: Any) -> None:
    """Reset a metric and the metrics in it."""
    root.reset()
    for _, metric in _within(root):
        if updates(metric):
            metric.reset()


def note_attributes(root: Any) -> None:
    """Record the attributes, other than states, of a metric and the metrics in it, before they are updated."""
    for _, metric in _within(root):
        vars(metric)["_distnb_attributes"] = _attributes(metric)


def contribution(root: Any) -> dict[str, Contribution] | None:
    """Return the counts since `reset` of a metric and the metrics in it, by path, or None if there are none."""
    import torchmetrics

    for module in root.modules():
        if isinstance(module, torchmetrics.MetricCollection):
            module.values(copy_state=False)  # copies the state to the metrics of the collection that share it
    found = {}
    for path, metric in _within(root):
        if updates(metric):
            before = vars(metric).get("_distnb_attributes", {})
            new = {name: each for name, each in _attributes(metric).items() if before.get(name) is not each}
            states = {name: getattr(metric, name) for name in default_states(metric)}
            found[path] = Contribution(updates(metric), states, new)
    return found or None


def _attributes(metric: Any) -> dict[str, Any]:
    states = default_states(metric)
    return {
        name: value
        for name, value in vars(metric).items()
        if isinstance(value, _SIMPLE) and not name.startswith("_") and name not in states
    }


def _within(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path of each metric that has states in a metric, including the metric itself, and the metric."""
    import torchmetrics

    for path, module in root.named_modules():
        states = default_states(module) if isinstance(module, torchmetrics.Metric) else {}
        if states and states.keys() <= vars(module).keys():  # False for a wrapper that shows its inner metric's states
            yield path, module


# -- in the process that reads -----------------------------------------------------------------------------------------


def add(root: Any, given: Mapping[str, Contribution]) -> None:
    """Add another process's contribution to a metric and the metrics in it."""
    import torchmetrics

    metrics = dict(_within(root))
    with _lock:
        for path, each in given.items():
            metric = metrics[path]
            counted: _Counted | None = vars(metric).get(metric_binding.COUNTED)
            if counted is None:
                counted = vars(metric)[metric_binding.COUNTED] = _Counted()
                metric_binding.read_by(
                    metric, functools.partial(_has_counted, metric), functools.partial(_read, metric)
                )
            for name, value in each.attributes.items():
                if getattr(metric, name, None) is None:
                    setattr(metric, name, value)
            counted.add(metric, each)
        for module in root.modules():
            if isinstance(module, torchmetrics.Metric):
                torchmetrics_internals.forget_result(module)


def _has_counted(metric: Any) -> bool:
    return metric_binding.COUNTED in vars(metric)


def _read(metric: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
    """Combine a metric's counts. This replaces torchmetrics' `_sync_dist`."""
    with _lock:
        counted: _Counted = vars(metric)[metric_binding.COUNTED]
        counted.combine(metric)
