"""Keras's method names for torchmetrics metrics: `update_state` in Keras's order, `result`, `reset_state`, `name`."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from distnb.compat import patches, torchmetrics_internals
from distnb.errors import OptionError
from distnb.runtime.reduction.reducing import broadcastable_weight
from distnb.runtime.this_process import this_process
from distnb.values.distributed import PerReplica
from distnb.values.structure import has_distributed, select

__all__ = ["add_names"]


def add_names() -> None:
    """Add Keras's method names to torchmetrics' classes, unless they define them already. Loads torchmetrics."""
    import torchmetrics

    for cls, names in (("Metric", {**_KERAS, "name": _DefaultName()}), ("MetricCollection", _KERAS)):
        for name, value in names.items():
            if not hasattr(getattr(torchmetrics, cls), name):
                patches.replace(f"torchmetrics:{cls}.{name}", value)


def _update_state(self: Any, *args: Any, **kwargs: Any) -> None:
    """Update the metric with more values, in Keras's argument order.

    Call `update_state(y_true, y_pred)` for a metric that compares, whose own `update` takes (preds, target). The
    metric's own arguments (threshold, num_classes, …) define how predictions are interpreted. Call
    `update_state(values, sample_weight=None)` for a metric that gathers values. Lists and arrays are accepted. A last
    axis of size 1 that only one of y_true and y_pred has is dropped, and labels may be floating-point numbers.

    Raises:
        OptionError: `sample_weight` was given for a metric that gives all examples the same weight.
    """
    if _compares(self):
        if "preds" in kwargs:
            self.update(*args, **kwargs)  # torchmetrics' argument names are unambiguous
            return
        values, weight, more = _compared(*args, **kwargs)
    else:
        values, weight, more = _gathered(*args, **kwargs)
    process = this_process.replica
    if process is None or not has_distributed((values, weight)):
        positional, named = _own_arguments(self, values, weight)
    else:
        rank, size = process.rank, process.size
        own = _own_arguments(self, *select((values, weight), rank, size))
        # Outside replica contexts `update` requires distributed values, of which it takes this replica's component.
        positional = tuple(PerReplica.own(rank, one, size) for one in own[0])
        named = {name: PerReplica.own(rank, one, size) for name, one in own[1].items()}
    self.update(*positional, **named, **more)


# The lambdas look the methods up when they are called, because a subclass may override them.
_KERAS: dict[str, Any] = {
    "update_state": _update_state,
    "result": lambda self: self.compute(),
    "reset_state": lambda self: self.reset(),
    "reset_states": lambda self: self.reset(),
}


class _DefaultName:
    """The default of a metric's attribute `name`: its class's name in Keras's spelling, such as `mean_metric`."""

    def __get__(self, metric: Any, owner: type) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", (owner if metric is None else type(metric)).__name__).lower()


def _compared(y_true: Any, y_pred: Any, sample_weight: Any = None, **more: Any) -> tuple[Any, Any, dict[str, Any]]:
    return (y_true, y_pred), sample_weight, more


def _gathered(*values: Any, sample_weight: Any = None, **more: Any) -> tuple[Any, Any, dict[str, Any]]:
    values = (*values, *(more.pop(name) for name in ("values", "value") if name in more))
    weight = more.pop("weight", sample_weight)  # torchmetrics' name for it
    return (values[:1], values[1], more) if len(values) == 2 and weight is None else (values, weight, more)


def _own_arguments(metric: Any, values: tuple[Any, ...], weight: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments for the metric's own `update`.

    Raises:
        OptionError: There are weights, and the metric gives all examples the same weight.
    """
    from torchmetrics import SumMetric

    compares, name = _compares(metric), type(metric).__name__
    if weight is None:
        return (_predicted_and_true(metric, *values) if compares else values), {}
    if not compares and ("weight" in _parameters(metric) or isinstance(metric, SumMetric)):
        first = _tensor(metric, values[0])
        first = first if first.is_floating_point() else first.to(torch.get_default_dtype())
        fitting = broadcastable_weight(weight, first, f"{name}.update_state", "values")
        if isinstance(metric, SumMetric):
            return (first * fitting, *values[1:]), {}
        return (first, *values[1:]), {"weight": fitting.expand(first.shape)}
    raise OptionError(
        f"{name}.update_state got sample_weight, and torchmetrics' {name} gives all examples the same weight. Leave "
        "out the examples that should not count, or average your own values: "
        "distnb.metrics.Mean().update_state(values, sample_weight)."
    )


def _predicted_and_true(metric: Any, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Return (preds, target), torchmetrics' arguments."""
    true, predicted = _tensor(metric, y_true), _tensor(metric, y_pred)
    if not (isinstance(true, torch.Tensor) and isinstance(predicted, torch.Tensor)):
        return predicted, true
    if predicted.ndim == true.ndim + 1 and predicted.shape[-1] == 1:
        predicted = predicted.squeeze(-1)
    elif true.ndim > 1 and true.shape[-1] == 1 and (true.ndim > predicted.ndim or predicted.shape[-1:] != (1,)):
        true = true.squeeze(-1)  # also labels [batch, 1] with probabilities [batch, classes]
    # torchmetrics' classification metrics require integer labels.
    classes = (cls.__module__ for each in metric.modules() for cls in type(each).__mro__)
    if true.is_floating_point() and any(name.startswith("torchmetrics.classification") for name in classes):
        true = true.long()
    return predicted, true


def _tensor(metric: Any, value: Any) -> Any:
    """Return numbers as a tensor, and other values, such as strings, unchanged."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(value, device=getattr(metric, "device", None))
    except (TypeError, ValueError, RuntimeError):
        return value


def _compares(metric: Any) -> bool:
    """Return whether a metric's `update` takes (preds, target). For a collection or a wrapper, check its content.

    Raises:
        OptionError: A collection has both kinds of metrics.
    """
    import torchmetrics

    if isinstance(metric, torchmetrics.MetricCollection):
        kinds = {_compares(each) for each in metric.values(copy_state=False)}
        if len(kinds) > 1:
            raise OptionError(
                "update_state of a MetricCollection got metrics that compare (y_true, y_pred) and metrics that gather "
                f"values: {', '.join(map(str, metric.keys()))}. Make a collection of each kind."
            )
        return kinds == {True}
    names = [name for name in _parameters(metric) if name not in ("args", "kwargs")]
    if not names:
        inner = next((each for each in metric.modules() if each is not metric and hasattr(each, "update")), None)
        return inner is not None and _compares(inner)
    return len(names) > 1 and names[0].startswith("preds") and names[1].startswith("target")


def _parameters(metric: Any) -> list[str]:
    signature = torchmetrics_internals.signature_of_update(metric) or inspect.signature(metric.update)
    return list(signature.parameters)
