"""torchmetrics' metrics in strategies: made in a scope, each replica updates its own, and reading aggregates them.

A metric finds its replicas through functions of this module, never through a strategy: so it can be copied and sent,
and in a process without replicas it is a plain metric again. Every metric answers to Keras's names too: `update_state`
in Keras's order, `result`, `reset_state`, `name`.
"""

from __future__ import annotations

import functools
import gc
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

from distnb.errors import ContextError, OptionError
from distnb.runtime import contexts
from distnb.runtime.reduction.reducing import fitting_weight
from distnb.runtime.this_process import this_process
from distnb.values.distributed import PerReplica
from distnb.values.structure import has_distributed, select

__all__ = ["aggregates_here", "bind", "bind_all", "install"]


@functools.cache
def install() -> None:
    """From now on metrics that are made in a scope are bound to its replicas. Idempotent; loads torchmetrics."""
    import torchmetrics

    plain = torchmetrics.Metric.__init__

    @functools.wraps(plain)
    def init(metric: Any, *args: Any, name: str | None = None, **kwargs: Any) -> None:
        plain(metric, *args, **kwargs)
        if name is not None:
            metric.name = name
        process, innermost = this_process.replica, contexts.innermost()
        if process is not None and innermost is not None and innermost[1] is None and process.runs(innermost[0]):
            bind(metric)

    torchmetrics.Metric.__init__ = init  # type: ignore[assignment,method-assign]
    for cls in (torchmetrics.Metric, torchmetrics.MetricCollection):
        for name, method in _KERAS.items():
            if not hasattr(cls, name):
                setattr(cls, name, method)
    if not hasattr(torchmetrics.Metric, "name"):
        setattr(torchmetrics.Metric, "name", _DefaultName())  # noqa: B010 - torchmetrics declares none


def bind_all() -> None:
    """Bind every metric that there is: torchmetrics was loaded in the scope that has just ended."""
    import torchmetrics

    install()
    for each in gc.get_objects():
        if issubclass(type(each), torchmetrics.Metric) and "update" in vars(each):
            bind(each)


def bind(metric: Any) -> None:
    """Make a metric one that the replicas share: updated by each, aggregated when it is read."""
    if metric.distributed_available_fn is aggregates_here and getattr(metric.update, "_distnb", False):
        return
    metric.distributed_available_fn = aggregates_here
    metric.dist_sync_fn = _gather_state
    # Other replicas may have taken in more since: whether reading communicates must not depend on this one alone.
    metric.compute_with_cache = False
    plain = metric.update

    @functools.wraps(plain)
    def update(*args: Any, **kwargs: Any) -> Any:
        process = this_process.replica
        if process is not None and process.size > 1 and not contexts.in_replica():
            if not has_distributed((args, kwargs)):
                raise ContextError(
                    f"{type(metric).__name__}.update was called outside replicas with plain values. A metric that was "
                    "made in a scope is updated by each replica, with its own part: call update in the function that "
                    "strategy.run calls, or give it the PerReplica values that run returned."
                )
            args, kwargs = select((args, kwargs), process.rank, process.size)
        return plain(*args, **kwargs)

    update._distnb = True  # type: ignore[attr-defined]
    metric.update = update


def aggregates_here() -> bool:
    """Whether reading a metric here combines the replicas' states: wherever there are several. All of them read it."""
    process = this_process.replica
    return process is not None and process.size > 1


def _gather_state(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Every replica's tensor of a metric's state; they may differ in every size, and be missing."""
    process = this_process.replica
    assert process is not None
    states: list[torch.Tensor] = process.group.all_gather_object(state.detach().cpu())
    # torchmetrics puts an empty float vector where a replica saw nothing: next to labels it would make them floats.
    filled = [one for one in states if one.shape != (0,)]
    return [one.to(state.device) for one in filled or states[:1]]


# -- Keras's names -----------------------------------------------------------------------------------------------------


def _update_state(self: Any, *args: Any, **kwargs: Any) -> None:
    """Take in more values, in Keras's order.

    `update_state(y_true, y_pred)` for a metric that compares, whose own `update` takes (preds, target): its arguments
    (threshold, num_classes, …) say how predictions are read. `update_state(values, sample_weight=None)` for one that
    gathers values. Lists and arrays will do; a last axis of 1 that only one of y_true and y_pred has is dropped, and
    labels may be floating-point numbers.

    Raises:
        OptionError: Weights for a metric that weighs all examples alike.
    """
    if _compares(self):
        if "preds" in kwargs:
            self.update(*args, **kwargs)  # in torchmetrics' words, which leave no doubt
            return
        values, weight, more = _compared(*args, **kwargs)
    else:
        values, weight, more = _gathered(*args, **kwargs)
    process = this_process.replica
    if process is None or not has_distributed((values, weight)):
        positional, named = _as_taken(self, values, weight)
    else:
        rank, size = process.rank, process.size
        taken = _as_taken(self, *select((values, weight), rank, size))
        # The metric itself takes the replica's component: outside replicas it wants distributed values.
        positional = tuple(PerReplica.own(rank, one, size) for one in taken[0])
        named = {name: PerReplica.own(rank, one, size) for name, one in taken[1].items()}
    self.update(*positional, **named, **more)


# Not the methods themselves, which a metric of the user's may have in its own way.
_KERAS: dict[str, Callable[..., Any]] = {
    "update_state": _update_state,
    "result": lambda self: self.compute(),
    "reset_state": lambda self: self.reset(),
    "reset_states": lambda self: self.reset(),
}


class _DefaultName:
    """The attribute `name` of a metric that was given none: its class's, in Keras's spelling."""

    def __get__(self, metric: Any, owner: type) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", (owner if metric is None else type(metric)).__name__).lower()


def _compared(y_true: Any, y_pred: Any, sample_weight: Any = None, **more: Any) -> tuple[Any, Any, dict[str, Any]]:
    return (y_true, y_pred), sample_weight, more


def _gathered(*values: Any, sample_weight: Any = None, **more: Any) -> tuple[Any, Any, dict[str, Any]]:
    values = (*values, *(more.pop(name) for name in ("values", "value") if name in more))
    weight = more.pop("weight", sample_weight)  # torchmetrics' word
    return (values[:1], values[1], more) if len(values) == 2 and weight is None else (values, weight, more)


def _as_taken(metric: Any, values: tuple[Any, ...], weight: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of the metric's own `update`."""
    from torchmetrics import SumMetric

    compares, name = _compares(metric), type(metric).__name__
    if weight is None:
        return (_predicted_and_true(metric, *values) if compares else values), {}
    if not compares and ("weight" in _parameters(metric) or isinstance(metric, SumMetric)):
        first = _tensor(metric, values[0])
        first = first if first.is_floating_point() else first.to(torch.get_default_dtype())
        fitting = fitting_weight(weight, first, f"{name}.update_state", "values")
        if isinstance(metric, SumMetric):
            return (first * fitting, *values[1:]), {}
        return (first, *values[1:]), {"weight": fitting.expand(first.shape)}
    raise OptionError(
        f"{name}.update_state got sample_weight, and torchmetrics' {name} weighs all examples alike. Leave out the "
        "examples that shall not count, or average values of your own: distnb.metrics.Mean().update_state(values, "
        "sample_weight)."
    )


def _predicted_and_true(metric: Any, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """What torchmetrics takes as (preds, target)."""
    true, predicted = _tensor(metric, y_true), _tensor(metric, y_pred)
    if not (isinstance(true, torch.Tensor) and isinstance(predicted, torch.Tensor)):
        return predicted, true
    if predicted.ndim == true.ndim + 1 and predicted.shape[-1] == 1:
        predicted = predicted.squeeze(-1)
    elif true.shape[-1:] == (1,) and (true.ndim > predicted.ndim or predicted.shape[-1:] != (1,)):
        true = true.squeeze(-1)  # also labels [batch, 1] beside probabilities [batch, classes]
    # A classification's labels are whole numbers.
    classes = (cls.__module__ for each in metric.modules() for cls in type(each).__mro__)
    if true.is_floating_point() and any(name.startswith("torchmetrics.classification") for name in classes):
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
