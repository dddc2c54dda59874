"""What was made in a strategy's scope. Loads no torch: where it is not loaded, nothing was made."""

from __future__ import annotations

import sys
from typing import Any

from distnb.options import StrategySpec, VariableAggregation
from distnb.runtime.this_process import this_process

__all__ = [
    "register_restored",
    "drift_report",
    "is_apart",
    "is_mirrored",
    "is_read_together",
    "read_together",
    "spec_of",
]


def is_mirrored(value: Any) -> bool:
    """Whether an object was made in the scope of a strategy of several replicas, so that its replicas are kept equal.

    Of a module or an optimizer every trainable parameter must be. What is one value only when it is read (see
    `is_read_together`) counts as well.
    """
    torch = sys.modules.get("torch")
    registry = sys.modules.get("distnb.collectives.gradients.parameter_groups")
    if torch is None or registry is None:
        return False
    if isinstance(value, torch.nn.Module) and _is_metric(value):
        return _is_bound(value)
    if is_read_together(value):
        return True
    parameters = _parameters(value)
    trainable = [parameter for parameter in parameters if parameter.requires_grad] or parameters
    return bool(trainable) and all(map(registry.find_mirror, trainable))


def _is_on_read(value: Any) -> bool:
    variables = sys.modules.get("distnb.variables.variable")
    if this_process.replica is None or variables is None:
        return False
    return isinstance(value, variables.SyncOnReadVariable)


def is_read_together(value: Any) -> bool:
    """Whether replicas hold parts of an object, a sync-on-read variable, of which only reading makes one value."""
    process = this_process.replica
    if process is None or not _is_on_read(value) or value.aggregation is VariableAggregation.NONE:
        return False
    return process.runs(value.distribute_strategy)


def is_apart(value: Any) -> bool:
    """Whether an object's components are different things, even while equal: a variable's without aggregation."""
    return _is_on_read(value) and value.aggregation is VariableAggregation.NONE


def read_together(value: Any) -> Any:
    """What an object is outside replicas. All of them call this with theirs; most objects are what they are."""
    return value.read_value() if is_read_together(value) else value


def drift_report(value: Any) -> str:
    """Whether the replicas hold the same bits of an object, in words. All of them call this with theirs."""
    from distnb.runtime.consistency.sync_check import drift_report as report

    assert this_process.replica is not None, "only a replica is asked"
    return report(this_process.replica.group, value)


def spec_of(value: Any) -> StrategySpec | None:
    """The strategy in whose scope a module, optimizer or parameter was made; None if there is none."""
    process = this_process.replica
    if process is None or not is_mirrored(value):
        return None
    found = (process.strategy_of(parameter) for parameter in _parameters(value))
    return next((strategy.spec for strategy in found if strategy is not None), None)


def register_restored(value: Any, spec: StrategySpec | None) -> None:
    """Keep in sync what was copied to this engine from another replica, where `spec_of` told its strategy."""
    if _is_metric(value):
        if _is_bound(value):
            from distnb.runtime.scopes.metric_binding import bind

            bind(value)
    elif spec is not None:
        from distnb.runtime.spmd import register_restored as register
        from distnb.strategies.base import resolve

        register(resolve(spec), value)


def _parameters(value: Any) -> list[Any]:
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, torch.optim.Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return []


def _is_metric(value: Any) -> bool:
    return getattr(value, "distributed_available_fn", None) is not None


def _is_bound(metric: Any) -> bool:
    binding = sys.modules.get("distnb.runtime.scopes.metric_binding")
    return binding is not None and metric.distributed_available_fn is binding.aggregates_here
