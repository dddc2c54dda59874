"""Checks of the arguments of Keras's methods: objects made outside a scope, parts of the data, distributed data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from distnb.compat import patches
from distnb.errors import ContextError, OptionError
from distnb.input.dataset import DistributedDataset
from distnb.keras.data import resolve_data
from distnb.runtime import contexts
from distnb.runtime.scopes.foreign_libraries import is_shared
from distnb.runtime.this_process import this_process
from distnb.values.structure import has_distributed

__all__ = ["install"]

_METHODS = ("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def install() -> None:
    """Install checks of `compile`, the loops, and `adapt`. Idempotent."""
    for name in _METHODS:
        patches.wrap(f"keras:Model.{name}", _model_method)
    for target in patches.PATCHES:
        if target.endswith(".adapt"):
            patches.wrap(target, _adapt)


def _model_method(plain: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    name = plain.__name__
    if this_process.is_one_of_several:
        _check_model(model, name, args, kwargs)
    elif name in ("fit", "evaluate", "predict"):
        bound = inspect.signature(plain).bind(model, *args, **kwargs)
        resolve_data(name, bound.arguments)
        return plain(*bound.args, **bound.kwargs)
    return plain(model, *args, **kwargs)


def _adapt(plain: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    if this_process.is_one_of_several:
        _check_adapt(layer, args, kwargs)
    return plain(layer, *args, **kwargs)


def _check_model(model: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise OptionError, in a scope, for a model or a metric that was made outside any scope."""
    process, innermost = this_process.replica, contexts.innermost()
    assert process is not None
    if innermost is None or innermost[1] is not None or not process.runs(innermost[0]):
        return
    strategy = innermost[0]
    owner = process.strategy_of(model)
    if owner is None:
        raise OptionError(
            f"The model {model.name!r} was made outside strategy.scope(), and model.{method} is called inside: every "
            "replica would train its own copy. Make the model within `with strategy.scope():`; to reuse trained "
            "weights, call model.set_weights(...) there."
        )
    if owner is not strategy:
        raise contexts.mixing(strategy, owner)
    if method == "compile":
        for metric in _metrics_in(model, args, kwargs):
            if not is_shared(metric):
                raise OptionError(
                    f"model.compile got the metric {metric.name!r}, which was made outside strategy.scope(). Make it "
                    "where the model is made, or give its name."
                )


def _metrics_in(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    given = inspect.signature(type(model).compile).bind_partial(model, *args, **kwargs).arguments
    for name in ("metrics", "weighted_metrics"):
        for leaf in keras.tree.flatten(given.get(name)):
            if isinstance(leaf, keras.metrics.Metric):
                yield leaf


def _check_adapt(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise an error if each replica would adapt a layer to its own part of the data."""
    name = layer.name
    if contexts.in_replica():
        raise ContextError(
            f"{name}.adapt was called in a function that strategy.run calls, where each replica has its own part of "
            "the data: the replicas' layers would differ. Call it outside strategy.run, with all of the data."
        )
    given = (*args, *kwargs.values())
    if has_distributed(given) or any(isinstance(each, DistributedDataset) for each in given):
        raise OptionError(
            f"{name}.adapt was given data that is distributed already: each replica would adapt the layer to its own "
            "part. Give it all of the data, the same on every replica, before it is distributed."
        )
