"""Metrics by which other processes count, such as workers of parameter servers.

Their counts are kept next to a metric's own states, and combined with these when the metric is read, as the
states of replicas are: torchmetrics gives the metric its own states back afterwards. So any metric will do, also one
whose combined states cannot be updated any more, such as PearsonCorrCoef's.
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
_lock = threading.RLock()  # contributions arrive on another thread than the one that reads and resets


class Contribution(NamedTuple):
    """The counts of a process by a metric.

    Attributes:
        updates: How often it was updated.
        states: By name.
        attributes: Attributes other than states that `update` has set, such as a dtype.
    """

    updates: int
    states: Mapping[str, Any]
    attributes: Mapping[str, Any]


@dataclass
class _Counted:
    """The counts of other processes by a metric.

    Attributes:
        parts: By state, values that are yet to be combined; of a listed state, its elements.
        stacked: By state, earlier values: many small tensors take more memory than one.
    """

    updates: int = 0
    parts: dict[str, list[Any]] = field(default_factory=dict)
    stacked: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, metric: Any, given: Contribution) -> None:
        """Add a contribution. Values that can be combined already are."""
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
        """Return the values of a state, as those of so many replicas; a listed one has one value, a list."""
        parts = self.parts.get(name, [])
        return [list(parts)] if listed else [*(each for block in self.stacked.get(name, ()) for each in block), *parts]

    def combine(self, metric: Any) -> None:
        """Set a metric's states to what it and others have counted."""
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


# -- where the metric is counted by ------------------------------------------------------------------------------------


def check(root: Any) -> None:
    """Raise CannotTravelError for a metric that depends on the order of all updates: processes have none."""
    import torchmetrics

    for each in root.modules():
        if isinstance(each, torchmetrics.wrappers.Running):
            raise CannotTravelError(
                f"{type(root).__name__} is over the latest updates, and workers have no order among them. Use it on "
                "the coordinator, with the results of functions; or a metric of all updates, such as "
                "distnb.metrics.Mean, that you reset."
            )
        if isinstance(each, torchmetrics.regression.NormalizedRootMeanSquaredError):
            raise CannotTravelError(
                "torchmetrics combines NormalizedRootMeanSquaredError over two processes at most. Count by "
                "MeanSquaredError in scheduled functions, and divide its root."
            )


def reset(root: Any) -> None:
    """Have a metric, and those in it, count from nothing."""
    root.reset()
    for _, metric in _within(root):
        if updates(metric):
            metric.reset()


def note_attributes(root: Any) -> None:
    """Note the attributes of a metric, and of those in it, other than states, before they are updated."""
    for _, metric in _within(root):
        vars(metric)["_distnb_attributes"] = _attributes(metric)


def contribution(root: Any) -> dict[str, Contribution] | None:
    """Return what a metric, and those in it, have counted since `reset`, by path; None if that is nothing."""
    import torchmetrics

    for module in root.modules():
        if isinstance(module, torchmetrics.MetricCollection):
            module.values(copy_state=False)  # those that share a state get it now
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
    """Find the metrics in a metric, itself included, that have a state, with their paths."""
    import torchmetrics

    for path, module in root.named_modules():
        states = default_states(module) if isinstance(module, torchmetrics.Metric) else {}
        if states and states.keys() <= vars(module).keys():  # a wrapper's may be those of a metric in it
            yield path, module


# -- where it is read --------------------------------------------------------------------------------------------------


def add(root: Any, given: Mapping[str, Contribution]) -> None:
    """Add what another process has counted by a metric, and those in it."""
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
    """Take the place of torchmetrics' `_sync_dist`."""
    with _lock:
        counted: _Counted = vars(metric)[metric_binding.COUNTED]
        counted.combine(metric)
