"""Keras's objects in scheduled functions: how they are sent to workers, and how the workers' metrics are combined.

Keras pickles its objects as files of their configuration and values. Here every object is sent as it is: with its own
attributes, and with references to the variables that the servers hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import torch

from distnb.errors import CannotTravelError, OptionError
from distnb.keras import keras_internals, replica_state
from distnb.servers.coordinator.libraries import Library, ResourceDescription
from distnb.servers.coordinator.references import current_worker
from distnb.servers.keras.server_optimizer import RemoteApply, check_options, described, set_options
from distnb.servers.variables.here import servers_here

__all__ = ["HERE", "METHODS", "READS", "KerasLibrary"]

READS = ("save", "save_weights", "export", "get_weights")
HERE = ("predict", "train_on_batch", "test_on_batch", "predict_on_batch")
METHODS = (
    "fit",
    "evaluate",
    keras_internals.SYMBOLIC_BUILD,
    keras_internals.METRICS_RESULT,
    "make_train_function",
    "make_test_function",
)
"""Names of methods that the coordinator's models replace and workers' models do not, like `READS` and `HERE`."""

_SEEDS_APART = 0x9E3779B1  # each worker draws different noise; the first worker draws the same as a single process


class KerasLibrary(Library):
    """Support for Keras in closures."""

    def parts(self, root: Any) -> Iterable[Any]:
        if not isinstance(root, keras.layers.Layer):
            return ()
        return [part for layer in keras_internals.parts(root) for part in layer.modules()]

    def reduced(self, obj: Any) -> Any:
        if isinstance(obj, keras.Variable):
            _refuse_alone(obj)
        if isinstance(obj, keras_internals.Saveable):
            return _new_object, (type(obj),), _state_of(obj)
        if isinstance(obj, keras.random.SeedGenerator):
            return _new_object, (type(obj),), vars(obj), None, None, _set_seeds
        if isinstance(obj, keras_internals.Tracker):
            return _new_object, (type(obj),), vars(obj), None, None, _set_tracker
        if isinstance(obj, keras_internals.Tracked):
            items = (iter(obj), None) if isinstance(obj, list) else (None, iter(obj.items()))
            return _new_tracked, (type(obj),), None, *items
        return None

    def described(self, obj: Any) -> ResourceDescription | None:
        return described(obj) if isinstance(obj, keras.optimizers.Optimizer) else None

    def set(self, resource: Any, settings: Any) -> bool:
        if not isinstance(resource, RemoteApply):
            return False
        set_options(resource, settings)
        return True

    def check_settings(self, resource: Any, settings: Any) -> None:
        if isinstance(resource, RemoteApply):
            check_options(resource, settings)

    # Metrics --------------------------------------------------------------------------------------------------------

    def is_metric(self, obj: Any) -> bool:
        return isinstance(obj, keras.metrics.Metric)

    def opened(self, metric: Any, device: torch.device) -> None:
        for variable in keras_internals.own_variables(metric):
            replica_state.mark_own(variable)
        owner = next(cls for cls in type(metric).__mro__ if "update_state" in vars(cls))
        if not owner.__module__.startswith("keras."):
            vars(metric)["update_state"] = functools.partial(_checked_update, metric, metric.update_state)

    def reset(self, metric: Any) -> None:
        metric.reset_state()
        vars(metric)["_distnb_before"] = {place: value.clone() for place, value in _own_values(metric).items()}

    def contribution(self, metric: Any) -> Mapping[int, torch.Tensor] | None:
        before = vars(metric)["_distnb_before"]
        added = {
            place: value - before[place] if place in before else value for place, value in _own_values(metric).items()
        }
        return {place: each for place, each in added.items() if each.any()} or None

    def merge(self, metric: Any, contribution: Mapping[int, torch.Tensor]) -> None:
        own = _own_values(metric)
        for place, added in contribution.items():
            own[place].add_(added.to(own[place].device))


def _refuse_alone(variable: Any) -> None:
    """Raise CannotTravelError on the coordinator for a user's variable that is not on the servers."""
    access = servers_here.access
    if (
        access is None
        or access.is_worker
        or "/" in variable.path
        or access.represented.stored_of(variable.value) is not None
    ):
        return
    raise CannotTravelError(
        f"A scheduled function uses the Keras variable {variable.path!r}, which is not on the parameter servers: each "
        "worker would change its own copy. Only trainable Keras variables that were made in strategy.scope() are "
        "there. Make it a distnb.Variable in the scope, or pass its value."
    )


def _own_values(metric: Any) -> dict[int, torch.Tensor]:
    """Return the values of a metric's variables, except those of metrics within it, which are counted separately."""
    for each in keras_internals.own_variables(metric):
        if each.aggregation != "sum":
            raise OptionError(
                f"The metric {metric.name} has a variable {each.name} with aggregation={each.aggregation!r}. The "
                "workers' counts are summed: with a ParameterServerStrategy a metric's variables must use 'sum'."
            )
    return {place: each.value.detach() for place, each in enumerate(keras_internals.own_variables(metric))}


def _checked_update(metric: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Update a user's metric, and check that updates add up: another update with the same arguments adds the same.

    The check ends with the first update that changes something.

    Raises:
        OptionError: They do not, as in a maximum, whereas the coordinator adds up the workers' counts.
    """
    states = []
    for _ in range(2):
        states.append({place: value.clone() for place, value in _own_values(metric).items()})
        result = plain(*args, **kwargs)
    first, second = states[0], states[1]
    third = _own_values(metric)
    added = {place: (value - first[place], third[place] - value) for place, value in second.items() if place in first}
    for place, value in third.items():
        if place in second:
            value.copy_(second[place])
    if not any(once.any() for once, _ in added.values()):
        return result
    del vars(metric)["update_state"]
    if not all(torch.allclose(once, again, rtol=1e-3, equal_nan=True) for once, again in added.values()):
        raise OptionError(
            f"The updates of the metric {metric.name} do not add up: the same update changed its variables by another "
            "amount when it was repeated, as a maximum does. With a ParameterServerStrategy the coordinator adds up "
            "what the workers have counted. Return the value from the function, and update the metric on the "
            "coordinator; or use a metric of sums, or distnb.metrics.Max and Min."
        )
    return result


def _state_of(obj: Any) -> dict[str, Any]:
    state = dict(vars(obj))
    if isinstance(obj, keras.Model):
        for name in (*METHODS, *READS, *HERE):
            state.pop(name, None)
        state.pop("history", None)
        state.pop(keras_internals.EVALUATION, None)
        # A closure of several steps calls the function for one step repeatedly: Keras has no other with torch.
        state.update(train_function=None, test_function=None, predict_function=None, steps_per_execution=1)
    return keras_internals.in_graph_order(state)


def _new_object(cls: Any) -> Any:
    return object.__new__(cls)


def _new_tracked(cls: Any) -> Any:
    made = cls.__new__(cls)
    made.tracker = None  # the tracker refers to the whole model
    return made


def _set_tracker(tracker: Any, state: dict[str, Any]) -> None:
    vars(tracker).update(state)
    tracker.stored_ids = {name: {id(each) for each in store} for name, (_, store) in tracker.config.items()}


def _set_seeds(generator: Any, state: dict[str, Any]) -> None:
    vars(generator).update(state)
    worker = current_worker()
    if worker:
        generator.next = functools.partial(_next, generator, worker)


def _next(generator: Any, worker: int, ordered: bool = True) -> torch.Tensor:
    seed: torch.Tensor = type(generator).next(generator, ordered)
    return seed + worker * _SEEDS_APART % (1 << 31)
