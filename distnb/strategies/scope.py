"""What was made in a strategy's scope, as an engine sees it."""

from __future__ import annotations

from typing import Any

import torch

from distnb.collectives.gradients import parameter_groups
from distnb.options import StrategySpec, VariableAggregation
from distnb.runtime import spmd
from distnb.runtime.consistency import sync_check
from distnb.runtime.scopes import foreign_libraries, metric_binding
from distnb.runtime.scopes.registration import ParameterKey, parameters_of
from distnb.runtime.this_process import this_process
from distnb.strategies.base import resolve
from distnb.variables.variable import SyncOnReadVariable

__all__ = [
    "Origin",
    "drift_report",
    "is_apart",
    "is_mirrored",
    "is_read_together",
    "origin_of",
    "read_together",
    "register_restored",
]


_MADE = (torch.Tensor, torch.nn.Module)


def is_mirrored(value: Any) -> bool:
    """Whether an object was made in the scope of a strategy of several replicas, so that its replicas are kept equal.

    Of a module or an optimizer, Keras's too, every trainable parameter must be. What is one value only when it is read
    (see `is_read_together`) counts as well.
    """
    if _is_metric(value):
        return value.distributed_available_fn is metric_binding.aggregates_here
    if is_read_together(value) or foreign_libraries.is_shared(value):
        return True
    parameters = parameters_of(value) or foreign_libraries.tensors_in(value)
    if not parameters:
        process = this_process.replica
        return isinstance(value, torch.nn.Module) and process is not None and process.strategy_of(value) is not None
    trainable = [parameter for parameter in parameters if parameter.requires_grad] or parameters
    return all(map(parameter_groups.find_mirror, trainable))


def is_read_together(value: Any) -> bool:
    """Whether replicas hold parts of a sync-on-read variable or a metric, of which only reading makes one value."""
    if metric_binding.is_shared(value):
        return True
    process, variable = this_process.replica, foreign_libraries.variable_in(value)
    if process is None or not isinstance(variable, SyncOnReadVariable):
        return False
    return variable.aggregation is not VariableAggregation.NONE and process.runs(variable.distribute_strategy)


def is_apart(value: Any) -> bool:
    """Whether an object's components are different things, even while equal: a variable's without aggregation."""
    variable = foreign_libraries.variable_in(value)
    return isinstance(variable, SyncOnReadVariable) and variable.aggregation is VariableAggregation.NONE


def read_together(value: Any) -> Any:
    """What an object is outside replicas. All of them call this with theirs; most objects are what they are."""
    variable = foreign_libraries.variable_in(value)
    if not is_read_together(value):
        return value
    return variable.read_value() if variable is not None else metric_binding.aggregated(value)


def drift_report(value: Any) -> str:
    """Whether the replicas hold the same bits of an object, in words. All of them call this with theirs."""
    assert this_process.replica is not None, "only a replica is asked"
    return sync_check.drift_report(this_process.replica.group, value)


Origin = tuple[StrategySpec, list[ParameterKey | None]]
"""The strategy in whose scope something was made, and what all replicas call its parameters."""


def origin_of(value: Any) -> Origin | None:
    """Where a module, optimizer or parameter was made, for a replica that gets a copy; None if in no scope."""
    process = this_process.replica
    if process is None or not is_mirrored(value):
        return None
    parameters = parameters_of(value)
    found = (process.strategy_of(each) for each in [*parameters, value] if isinstance(each, _MADE))
    strategy = next((each for each in found if each is not None), foreign_libraries.strategy_of_shared(value))
    if strategy is None:
        return None
    return strategy.spec, list(map(process.runtime_of(strategy).registration.place_of, parameters))


def register_restored(value: Any, origin: Origin | None) -> None:
    """Keep in sync what was copied to this engine from another replica, where `origin_of` told of it."""
    if is_mirrored(value) and _is_metric(value):
        metric_binding.bind(value)
    elif origin is not None:
        spec, places = origin
        spmd.register_restored(resolve(spec), value, places)


def _is_metric(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) and getattr(value, "distributed_available_fn", None) is not None
