"""Metrics: those of torchmetrics, which also accept Keras's method names, and a few short names.

A metric made in a strategy's scope is updated by each replica with its own slice, and aggregated over the replicas
wherever it is read (`compute()` or `result()`), in `strategy.run`, too, where all replicas read it together. Under the
default strategy it is a plain metric. Every metric of torchmetrics is available here by its own name:
`distnb.metrics.MulticlassAccuracy`. `update(preds, target)` is torchmetrics' own; `update_state(y_true, y_pred)` has
Keras's order, and Keras's `sample_weight` for metrics with weights. `name=` gives any metric a name.

Example:
    >>> mean = Mean()
    >>> mean.update_state([1.0, 3.0])
    >>> mean.update_state(6.0, sample_weight=2.0)
    >>> float(mean.result())
    4.0
"""

from __future__ import annotations

from typing import Any

import torchmetrics
import torchmetrics.classification
from torchmetrics import MaxMetric, MeanMetric, MinMetric, SumMetric

from distnb.errors import UnknownNameError
from distnb.runtime.scopes.metric_binding import install

__all__ = ["Max", "Mean", "Min", "Sum"]

install()


class _NamedFirst:
    """A metric whose first argument is its name, as in Keras."""

    def __init__(self, name: str | None = None, **options: Any) -> None:
        super().__init__(name=name, **options)  # type: ignore[call-arg]


class Mean(_NamedFirst, MeanMetric):
    """The mean of all values, weighted if weights are given; NaN before the first."""


class Sum(_NamedFirst, SumMetric):
    """The sum of all values."""


class Max(_NamedFirst, MaxMetric):
    """The largest value."""


class Min(_NamedFirst, MinMetric):
    """The smallest value."""


def __getattr__(name: str) -> Any:
    for module in (torchmetrics, torchmetrics.classification):
        if not name.startswith("_") and hasattr(module, name):
            return getattr(module, name)
    raise UnknownNameError("distnb.metrics", name, __dir__(), "It has its own metrics, and all of torchmetrics.")


def __dir__() -> list[str]:
    return sorted({*__all__, *torchmetrics.__all__})
