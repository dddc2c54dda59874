"""Checks on a replica whether objects of a scope are mirrored, and their values in cross-replica context."""

from __future__ import annotations

from typing import Any

import torch

from distnb.collectives.gradients import parameter_groups
from distnb.options import VariableAggregation
from distnb.runtime.scopes import foreign_libraries, metric_binding
from distnb.runtime.scopes.divided_objects import gather_divided, is_divided
from distnb.runtime.scopes.registration import parameters_of
from distnb.runtime.this_process import this_process
from distnb.variables.variable import SyncOnReadVariable

__all__ = [
    "is_apart",
    "is_metric",
    "is_mirrored",
    "is_read_together",
    "read_together",
]


def is_mirrored(value: Any) -> bool:
    """Return whether an object was made in the scope of a strategy with several replicas, which keeps its copies equal.

    A module or an optimizer, including Keras's, is mirrored if all its trainable parameters are. An object that is read
    together (see `is_read_together`) is mirrored as well.
    """
    if is_metric(value):
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
    """Return whether an object is a sync-on-read variable, a metric or sharded: a read combines the replicas' parts."""
    if metric_binding.is_shared(value) or is_divided(value):
        return True
    process, variable = this_process.replica, foreign_libraries.variable_in(value)
    if process is None or not isinstance(variable, SyncOnReadVariable):
        return False
    return variable.aggregation is not VariableAggregation.NONE and process.runs(variable.distribute_strategy)


def is_apart(value: Any) -> bool:
    """Return whether an object's components are independent, even if equal: a variable without aggregation."""
    variable = foreign_libraries.variable_in(value)
    return isinstance(variable, SyncOnReadVariable) and variable.aggregation is VariableAggregation.NONE


def read_together(value: Any) -> Any:
    """Return an object's value in cross-replica context: aggregated if it is read together, else the object itself.

    An object that is divided over the replicas is gathered.

    All replicas must call this function, each with its own object.
    """
    if is_divided(value):
        return gather_divided(value)[0]
    variable = foreign_libraries.variable_in(value)
    if not is_read_together(value):
        return value
    return variable.read_value() if variable is not None else metric_binding.aggregated(value)


def is_metric(value: Any) -> bool:
    """Return whether a value is a torchmetrics metric."""
    return isinstance(value, torch.nn.Module) and getattr(value, "distributed_available_fn", None) is not None
