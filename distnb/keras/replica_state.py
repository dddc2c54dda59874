"""Keras's variables and metrics on replicas: each replica's values, and their aggregation.

Keras lets a variable declare how the values of several replicas are combined (`aggregation`, `synchronization`), but
its torch backend ignores this. A variable with such a declaration that is made in a scope or on a replica holds a
`distnb.Variable`, which honours it. A metric's variables are of this kind: each replica counts its own part, and
`result()` combines all parts wherever it is read. Keras's own loops (`fit`, `evaluate`, `predict`) compute with whole
batches on all replicas.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from distnb import features
from distnb.checkpoint.tensor_slices import is_sharded
from distnb.collectives.digests import digest
from distnb.compat import patches
from distnb.errors import ContextError, OptionError
from distnb.keras import keras_internals, scope_checks
from distnb.keras.model_state import fill
from distnb.options import VariableAggregation, VariableSynchronization
from distnb.runtime import contexts
from distnb.runtime.reduction.gathering import broadcast_tree
from distnb.runtime.scopes.metric_binding import without_rows
from distnb.runtime.this_process import this_process
from distnb.values.structure import has_distributed, select
from distnb.variables.settings import Settings
from distnb.variables.variable import SyncOnReadVariable, Variable, component_of, create, make

__all__ = [
    "bind",
    "install",
    "mark_own",
    "restore",
    "tensors_in",
    "variable_in",
]


_IS_OWN = "_distnb_made_in_replica"


def install() -> None:
    """Make Keras's variables and metrics aware of replicas from now on. Idempotent."""
    patches.wrap("keras:Variable._initialize", _initialize)
    patches.wrap("keras:Variable._direct_assign", _assign)
    patches.wrap("keras:Variable.assign_add", _assign_add)
    patches.wrap("keras:Variable.assign_sub", _assign_sub)
    patches.wrap("keras:Variable.__repr__", _repr)
    patches.wrap("keras:Variable.value", _value_of)
    patches.wrap("keras.metrics:Metric.__init__", _init_metric)
    scope_checks.install()
    if install_shards := features.find("shards in Keras", "optimizers"):
        install_shards()


def _making_strategy() -> Any:
    """Return the strategy of several replicas in whose scope, replica or loop an object is being made, or None."""
    process, innermost, execution = this_process.replica, contexts.innermost(), contexts.execution()
    if process is None or process.size == 1 or (execution is not None and execution.kind == "single"):
        return None
    strategy = innermost[0] if innermost is not None else execution.strategy if execution is not None else None
    return strategy if strategy is not None and process.runs(strategy) else None


# -- variables ---------------------------------------------------------------------------------------------------------


def _initialize(plain: Callable[..., None], variable: Any, value: Any) -> None:
    plain(variable, value)
    strategy = _making_strategy()
    if strategy is None or keras_internals.tensor_of(variable).is_meta:
        return
    vars(variable)[_IS_OWN] = contexts.in_replica()
    settings = _settings_of(variable)
    if settings is not None:
        component = keras_internals.tensor_of(variable).detach()
        # A metric's parts start equal on all replicas, so nothing has to be synchronised.
        made = (make if settings.on_read else create)(component, settings, strategy)
        keras_internals.put_tensor(variable, made)


def mark_own(variable: Any) -> None:
    """Mark a variable as this replica's own, so that the replica may assign to it: it is not shared."""
    vars(variable)[_IS_OWN] = True


def _settings_of(variable: Any) -> Settings | None:
    """Return a variable's settings for several replicas, or None if they are those of every parameter."""
    how = VariableAggregation.parse(variable.aggregation)
    # `variable_3` is the fourth that this process has made, and may be another process's fifth.
    name = re.sub(r"_[0-9]+$", "", variable.name)
    if variable.synchronization == "on_read":
        return Settings(trainable=False, name=name, synchronization=VariableSynchronization.ON_READ, aggregation=how)
    if variable.trainable or contexts.in_replica():
        return None
    is_users = _is_users(variable) and how is VariableAggregation.ONLY_FIRST_REPLICA
    if how in (VariableAggregation.SUM, VariableAggregation.MEAN) or is_users:
        return Settings(trainable=False, name=name, synchronization=VariableSynchronization.ON_WRITE, aggregation=how)
    return None


def variable_in(value: Any) -> Any:
    """Return the tensor of a Keras variable, or None for any other object."""
    return keras_internals.tensor_of(value) if isinstance(value, keras.Variable) else None


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors of a Keras variable or optimizer, or [] for any other object."""
    if isinstance(value, keras.Variable):
        return [keras_internals.tensor_of(value)]
    return (
        [keras_internals.tensor_of(each) for each in value.variables]
        if isinstance(value, keras.optimizers.Optimizer)
        else []
    )


def _is_users(variable: Any) -> bool:
    """Return whether the user made a variable. Those of Keras's layers, optimizers and generators have a path."""
    return "/" not in variable.path


def _value_of(plain: Callable[[Any], Any], variable: Any) -> Any:
    """Return a variable's value. For a variable of parts it is a plain tensor: the whole, or this replica's part."""
    stored = keras_internals.tensor_of(variable)
    if type(stored) is not SyncOnReadVariable or keras_internals.in_stateless_scope():
        return plain(variable)
    return keras_internals.cast_as_layers_do(variable, stored.content())


def _assign(plain: Callable[..., None], variable: Any, value: Any) -> None:
    stored = keras_internals.tensor_of(variable)
    if type(stored) is Variable:
        stored.assign(_part_of_write(variable, value))
        return
    if type(stored) is SyncOnReadVariable:
        if (execution := contexts.execution()) is None or execution.counts:
            stored.assign(value)
        return
    if is_sharded(stored):  # Keras 3.16 would need a layout of its own
        fill(stored, value)
        return
    process, execution = this_process.replica, contexts.execution()
    if process is not None and process.size > 1 and contexts.in_replica() and execution is None:
        _check_assigned(variable, value)
    plain(variable, value)


def _assign_add(plain: Callable[..., Any], variable: Any, value: Any) -> Any:
    stored = keras_internals.tensor_of(variable)
    if type(stored) is not Variable or keras_internals.in_stateless_scope():
        return plain(variable, value)
    stored.assign_add(_part_of_write(variable, value))
    return variable.value


def _assign_sub(plain: Callable[..., Any], variable: Any, value: Any) -> Any:
    stored = keras_internals.tensor_of(variable)
    if type(stored) is not Variable or keras_internals.in_stateless_scope():
        return plain(variable, value)
    stored.assign_sub(_part_of_write(variable, value))
    return variable.value


def _part_of_write(variable: Any, value: Any) -> Any:
    """Return this replica's part of a value that all replicas write. One without rows writes nothing."""
    value = keras.ops.convert_to_tensor(value, dtype=variable.dtype)
    process, execution = this_process.replica, contexts.execution()
    if process is None or execution is None or execution.counting in (0, process.size):
        return value
    if not execution.counts:
        return torch.zeros_like(value)
    return value * process.size / execution.counting if variable.aggregation == "mean" else value


def _check_assigned(variable: Any, value: Any) -> None:
    """Refuse an assignment in a replica that would silently give each replica another value."""
    process = this_process.replica
    assert process is not None
    if variable.synchronization != "on_read" and not _is_users(variable):
        return  # weights change by equal gradients, statistics are averaged, seeds are drawn equally
    is_ours = process.strategy_of(keras_internals.tensor_of(variable)) is not None
    if not is_ours and not vars(variable).get(_IS_OWN, False):
        raise ContextError(
            f"The Keras variable {variable.path!r} was made outside strategy.scope() and is assigned to in a function "
            "that strategy.run calls: every replica would change its own copy. Make it, or its metric, within "
            "`with strategy.scope():`."
        )
    if is_ours and len(set(process.group.all_gather_object(digest(value)))) > 1:
        raise OptionError(
            f"The replicas assign different values to the Keras variable {variable.path!r}, which has no "
            "aggregation to combine them. Make it with aggregation='sum', 'mean' or 'only_first_replica' (and "
            "trainable=False), or assign to it outside strategy.run."
        )


def _repr(plain: Callable[..., str], variable: Any) -> str:
    stored = keras_internals.tensor_of(variable)
    if not isinstance(stored, SyncOnReadVariable):
        return plain(variable)
    # Do not communicate here, because perhaps only some replicas show the variable.
    what = "value" if stored.is_whole else "this replica's part"
    return (
        f"<Variable path={variable.path}, shape={variable.shape}, dtype={variable.dtype}, {what}="
        f"{component_of(stored).cpu().numpy()}>"
    )


# -- metrics -----------------------------------------------------------------------------------------------------------


def _init_metric(plain: Callable[..., None], metric: Any, *args: Any, **kwargs: Any) -> None:
    plain(metric, *args, **kwargs)
    strategy = _making_strategy()
    if strategy is not None:
        bind(metric, strategy)


def bind(metric: Any, strategy: Any) -> None:
    """Make the replicas of a strategy share a metric: each updates its own part, and a read combines the parts."""
    own = vars(metric)
    if "_distnb_strategy" not in own:
        own.update(_distnb_strategy=strategy, update_state=_shared_update(metric), result=_shared_result(metric))


def restore(metric: Any, strategy: Any) -> bool:
    """Make this replica share a metric that was copied from another one, without that one's counts.

    Return False for any other object.
    """
    if not isinstance(metric, keras.metrics.Metric):
        return False
    bind(metric, strategy)
    for variable in metric.variables:
        settings = _settings_of(variable)
        stored = keras_internals.tensor_of(variable)
        if settings is not None and not isinstance(stored, SyncOnReadVariable):
            keras_internals.put_tensor(variable, make(torch.zeros_like(stored), settings, strategy))
    return True


def _is_divided() -> bool:
    """Return whether each replica computes with its own part of the data now, or no loop is running."""
    process, execution = this_process.replica, contexts.execution()
    return process is not None and process.size > 1 and (execution is None or execution.kind == "split")


def _shared_update(metric: Any) -> Callable[..., Any]:
    plain = metric.update_state

    @functools.wraps(plain)
    def update_state(*args: Any, **kwargs: Any) -> Any:
        process, execution = this_process.replica, contexts.execution()
        if process is None or not _is_divided() or keras_internals.in_stateless_scope():
            return plain(*args, **kwargs)
        if execution is not None or contexts.in_replica():
            if (execution is None or execution.counts) and not without_rows(args, kwargs):
                return plain(*args, **kwargs)
            for variable in metric.variables:
                if isinstance(stored := keras_internals.tensor_of(variable), SyncOnReadVariable):
                    stored.prepare()  # as on the replicas that count something
            return None
        if not has_distributed((args, kwargs)):
            raise ContextError(
                f"{metric.name}.update_state was called outside replicas with plain values. A metric that was made in "
                "a scope is updated by each replica, with its own part: call update_state in the function that "
                "strategy.run calls, or give it the PerReplica values that run returned."
            )
        args, kwargs = select((args, kwargs), process.rank, process.size)
        with contexts.executing(contexts.Execution(vars(metric)["_distnb_strategy"], "split")):
            return None if without_rows(args, kwargs) else plain(*args, **kwargs)

    return update_state


def _shared_result(metric: Any) -> Callable[..., Any]:
    plain = metric.result

    @functools.wraps(plain)
    def result(*args: Any, **kwargs: Any) -> Any:
        process = this_process.replica
        if keras_internals.in_stateless_scope():
            return plain(*args, **kwargs)
        if process is None or not _is_divided():
            return keras.tree.map_structure(_value, plain(*args, **kwargs), none_is_leaf=False)
        parts = [each for each in metric.variables if isinstance(keras_internals.tensor_of(each), SyncOnReadVariable)]
        # Some metrics create their variables with the first rows, which this replica may not have received yet.
        of_replicas = process.group.all_gather_object([_part_of(each) for each in parts])
        most = max(map(len, of_replicas))
        knowing = [rank for rank, its in enumerate(of_replicas) if len(its) == most]
        found: Any = None
        if process.rank in knowing:
            states = zip(parts, zip(*(of_replicas[rank] for rank in knowing), strict=True), strict=True)
            with keras.StatelessScope([(each, _combined(each, its)) for each, its in states]):
                found = keras.tree.map_structure(_value, plain(*args, **kwargs), none_is_leaf=False)
        return found if len(knowing) == process.size else broadcast_tree(process.group, found, knowing[0])

    return result


def _part_of(variable: Any) -> Any:
    return component_of(keras_internals.tensor_of(variable)).cpu()


def _combined(variable: Any, parts: Sequence[Any]) -> Any:
    """Combine the replicas' parts of a variable by its aggregation."""
    stored = keras_internals.tensor_of(variable)
    how = stored.aggregation
    if how is VariableAggregation.NONE:
        return stored.aggregate("result")  # raises an error with the cure
    whole = parts[0] if stored.is_whole or how is VariableAggregation.ONLY_FIRST_REPLICA else sum(parts)
    if how is VariableAggregation.MEAN and not stored.is_whole:
        whole = whole / len(parts)
    return whole.to(stored.device)


def _value(leaf: Any) -> Any:
    """Return the current value of a leaf of a result, because some metrics return a variable itself."""
    value = leaf.value if isinstance(leaf, keras.Variable) else leaf
    return value.read_value() if isinstance(value, Variable) else value
