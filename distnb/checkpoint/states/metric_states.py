"""Metrics of torchmetrics: their aggregated states, which their own `state_dict()` omits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from distnb.checkpoint.states.base import Kind, TensorOutline, described, listed, misfit_of_tensor
from distnb.checkpoint.stored_tensors import whole
from distnb.compat.torchmetrics_internals import default_states
from distnb.runtime.scopes import metric_binding
from distnb.runtime.scopes.metric_binding import metrics_within
from distnb.values.structure import map_structure

__all__ = ["Metrics"]


class Metrics(Kind):
    """Metrics, collections of metrics, and wrappers. After a restore replica 0 has the state; the others are empty."""

    def covers(self, value: Any) -> bool:
        torchmetrics: Any = sys.modules.get("torchmetrics")
        return torchmetrics is not None and isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection))

    def state(self, value: Any, name: str) -> Any:
        return {"metrics": {path: metric_binding.whole_state(metric) for path, metric in metrics_within(value)}}

    def misfits(self, value: Any, saved: Any, name: str) -> list[str]:
        if not isinstance(saved, Mapping) or not isinstance(saved.get("metrics"), Mapping):
            return [f"{name}: the checkpoint has {described(saved)}, but the object is a metric."]
        lines = []
        for path, metric in metrics_within(value):
            called = f"{name}.{path}" if path else name
            if path not in saved["metrics"]:
                lines.append(f"{called}: the checkpoint does not hold this metric.")
                continue
            states, defaults = saved["metrics"][path]["states"], default_states(metric)
            if set(states) != set(defaults):
                lines.append(
                    f"{called}: the checkpoint has the states {listed(states)}, and {type(metric).__name__} has "
                    f"{listed(defaults)}."
                )
                continue
            for each, default in defaults.items():
                if isinstance(default, list) != isinstance(states[each], list):
                    lines.append(f"{called}: {each} is {described(states[each])} in the checkpoint.")
                elif isinstance(default, torch.Tensor) and isinstance(states[each], TensorOutline):
                    misfit = misfit_of_tensor(getattr(metric, each), states[each])
                    lines += [f"{called}: {each} {misfit}."] if misfit else []
        return lines

    def restore(self, value: Any, state: Any, name: str) -> None:
        for path, metric in metrics_within(value):
            metric_binding.set_whole_state(metric, map_structure(whole, state["metrics"][path]))
