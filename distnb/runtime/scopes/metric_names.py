"""Keras's names on torchmetrics' metrics: `update_state` in Keras's order, `result`, `reset_state`, `name`."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from distnb.errors import OptionError
from distnb.runtime import this_process
from distnb.runtime.reduction.sample_weight import fitting_weight
from distnb.values.distributed import PerReplica
from distnb.values.structure import has_distributed, select

__all__ = ["DefaultName", "reset_state", "result", "update_state"]

_NOT_GIVEN: Any = object()


def update_state(self: Any, *args: Any, **kwargs: Any) -> None:
    """Take in more values, in Keras's order.

    `update_state(y_true, y_pred, sample_weight=None)` for a metric that compares, whose own `update` takes (preds,
    target): its arguments (threshold, num_classes, …) say how predictions are read. `update_state(values,
    sample_weight=None)` for one that gathers values. Lists and arrays will do; a last axis of 1 that only one of y_true
    and y_pred has is dropped, and labels may be floating-point numbers.

    Raises:
        OptionError: Weights for a metric that weighs all examples alike.
    """
    if not _compares(self):
        values, weight, more = _gathered(*args, **kwargs)
    elif "preds" in kwargs:
        self.update(*args, **kwargs)  # in torchmetrics' words, which leave no doubt
        return
    else:
        values, weight, more = _compared(*args, **kwargs)
    process = this_process.replica()
    if process is None or not has_distributed((values, weight)):
        positional, named = _as_taken(self, values, weight)
    else:
        rank, size = process.rank, process.size
        taken = _as_taken(self, *select((values, weight), rank, size))
        # The metric itself takes the replica's component: outside replicas it wants distributed values.
        positional = tuple(PerReplica.own(rank, one, size) for one in taken[0])
        named = {name: PerReplica.own(rank, one, size) for name, one in taken[1].items()}
    self.update(*positional, **named, **more)


def result(self: Any) -> Any:
    """The same as `compute`."""
    return self.compute()


def reset_state(self: Any) -> None:
    """The same as `reset`."""
    self.reset()


class DefaultName:
    """The attribute `name` of a metric that was given none: its class's, in Keras's spelling."""

    def __get__(self, metric: Any, owner: type) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", (owner if metric is None else type(metric)).__name__).lower()


def _compared(y_true: Any, y_pred: Any, sample_weight: Any = None, **more: Any) -> tuple[Any, Any, dict[str, Any]]:
    return (y_true, y_pred), sample_weight, more


def _gathered(
    values: Any = _NOT_GIVEN, *others: Any, sample_weight: Any = None, **more: Any
) -> tuple[Any, Any, dict[str, Any]]:
    for name in ("value", "weight"):  # torchmetrics' words
        if name in more:
            given = more.pop(name)
            values, sample_weight = (given, sample_weight) if name == "value" else (values, given)
    if len(others) == 1 and sample_weight is None:
        sample_weight, others = others[0], ()
    return (*(() if values is _NOT_GIVEN else (values,)), *others), sample_weight, more


def _as_taken(metric: Any, values: tuple[Any, ...], weight: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of the metric's own `update`."""
    if _compares(metric):
        if weight is not None:
            raise _unweighted(metric)
        return _predicted_and_true(metric, *values), {}
    if weight is None:
        return values, {}
    device = getattr(metric, "device", None)
    first = torch.as_tensor(values[0], device=None if isinstance(values[0], torch.Tensor) else device)
    first = first if first.is_floating_point() else first.to(torch.get_default_dtype())
    fitting = fitting_weight(weight, first, f"{type(metric).__name__}.update_state", "values")
    if "weight" in _parameters(metric):
        return (first, *values[1:]), {"weight": fitting.expand(first.shape)}
    if isinstance(metric, _sum_metric()):
        return (first * fitting, *values[1:]), {}
    raise _unweighted(metric)


def _sum_metric() -> type:
    from torchmetrics import SumMetric

    return SumMetric


def _unweighted(metric: Any) -> OptionError:
    name = type(metric).__name__
    return OptionError(
        f"{name}.update_state got sample_weight, and torchmetrics' {name} weighs all examples alike. Leave out the "
        "examples that shall not count, or average values of your own: distnb.metrics.Mean().update_state(values, "
        "sample_weight)."
    )


def _predicted_and_true(metric: Any, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """What torchmetrics takes as (preds, target)."""
    true, predicted = _tensor(metric, y_true), _tensor(metric, y_pred)
    if not (isinstance(true, torch.Tensor) and isinstance(predicted, torch.Tensor)):
        return predicted, true
    if true.ndim == predicted.ndim + 1 and true.shape[-1] == 1:
        true = true.squeeze(-1)
    elif predicted.ndim == true.ndim + 1 and predicted.shape[-1] == 1:
        predicted = predicted.squeeze(-1)
    elif true.ndim == predicted.ndim and true.shape[-1:] == (1,) and predicted.shape[-1:] != (1,):
        true = true.squeeze(-1)  # labels [batch, 1] beside probabilities [batch, classes]
    if true.is_floating_point() and _classifies(metric):
        true = true.long()
    return predicted, true


def _tensor(metric: Any, value: Any) -> Any:
    """Numbers as a tensor; texts and other things as they are."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(value, device=getattr(metric, "device", None))
    except (TypeError, ValueError, RuntimeError):
        return value


def _compares(metric: Any) -> bool:
    """Whether a metric's `update` takes (preds, target); of a collection or a wrapper, what is in it decides."""
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
    signature = getattr(metric, "_update_signature", None) or inspect.signature(metric.update)
    return list(signature.parameters)


def _classifies(metric: Any) -> bool:
    """Whether a metric, or one within it, is a classification's, whose labels are whole numbers."""
    return any(
        cls.__module__.startswith("torchmetrics.classification")
        for each in metric.modules()
        for cls in type(each).__mro__
    )
