"""What was made in a strategy's scope, as an engine sees it."""

from __future__ import annotations

from typing import Any

import torch

from distnb.collectives.gradients import parameter_groups
from distnb.options import StrategySpec, VariableAggregation
from distnb.runtime import spmd
from distnb.runtime.consistency import sync_check
from distnb.runtime.scopes import metric_binding
from distnb.runtime.this_process import this_process
from distnb.strategies.base import resolve
from distnb.variables.variable import SyncOnReadVariable

__all__ = [
    "drift_report",
    "is_apart",
    "is_mirrored",
    "is_read_together",
    "read_together",
    "register_restored",
    "spec_of",
]


def is_mirrored(value: Any) -> bool:
    """Whether an object was made in the scope of a strategy of several replicas, so that its replicas are kept equal.

    Of a module or an optimizer every trainable parameter must be. What is one value only when it is read (see
    `is_read_together`) counts as well.
    """
    if _is_metric(value):
        return value.distributed_available_fn is metric_binding.aggregates_here
    if is_read_together(value):
        return True
    parameters = _parameters(value)
    if not parameters:
        process = this_process.replica
        return isinstance(value, torch.nn.Module) and process is not None and process.strategy_of(value) is not None
    trainable = [parameter for parameter in parameters if parameter.requires_grad] or parameters
    return all(map(parameter_groups.find_mirror, trainable))


def is_read_together(value: Any) -> bool:
    """Whether replicas hold parts of an object, a sync-on-read variable, of which only reading makes one value."""
    process = this_process.replica
    if process is None or not isinstance(value, SyncOnReadVariable):
        return False
    return value.aggregation is not VariableAggregation.NONE and process.runs(value.distribute_strategy)


def is_apart(value: Any) -> bool:
    """Whether an object's components are different things, even while equal: a variable's without aggregation."""
    return isinstance(value, SyncOnReadVariable) and value.aggregation is VariableAggregation.NONE


def read_together(value: Any) -> Any:
    """What an object is outside replicas. All of them call this with theirs; most objects are what they are."""
    return value.read_value() if is_read_together(value) else value


def drift_report(value: Any) -> str:
    """Whether the replicas hold the same bits of an object, in words. All of them call this with theirs."""
    assert this_process.replica is not None, "only a replica is asked"
    return sync_check.drift_report(this_process.replica.group, value)


def spec_of(value: Any) -> StrategySpec | None:
    """The strategy in whose scope a module, optimizer or parameter was made; None if there is none."""
    process = this_process.replica
    if process is None or not is_mirrored(value):
        return None
    of_its_own = [value] if isinstance(value, torch.nn.Module) else []
    found = map(process.strategy_of, [*_parameters(value), *of_its_own])
    return next((strategy.spec for strategy in found if strategy is not None), None)


def register_restored(value: Any, spec: StrategySpec | None) -> None:
    """Keep in sync what was copied to this engine from another replica, where `spec_of` told its strategy."""
    if is_mirrored(value) and _is_metric(value):
        metric_binding.bind(value)
    elif spec is not None:
        spmd.register_restored(resolve(spec), value)


def _is_metric(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) and getattr(value, "distributed_available_fn", None) is not None


def _parameters(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, torch.optim.Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return []
