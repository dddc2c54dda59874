"""The origins of objects that are copied from one replica to the engine of another, and kept in sync there."""

from __future__ import annotations

from typing import Any

import torch

from distnb.options import StrategySpec
from distnb.runtime import spmd
from distnb.runtime.scopes import foreign_libraries, metric_binding
from distnb.runtime.scopes.mirrored_objects import is_metric, is_mirrored
from distnb.runtime.scopes.registration import ParameterKey, parameters_of
from distnb.runtime.this_process import this_process
from distnb.strategies.base import resolve

__all__ = ["Origin", "origin_of", "register_copied"]

_MADE = (torch.Tensor, torch.nn.Module)

Origin = tuple[StrategySpec, list[ParameterKey | None]]
"""The strategy in whose scope an object was made, and the keys of its parameters, equal on all replicas."""


def origin_of(value: Any) -> Origin | None:
    """Return the origin of a module, optimizer or parameter for a replica that gets a copy, or None if it has none."""
    process = this_process.replica
    if process is None or not is_mirrored(value):
        return None
    parameters = parameters_of(value)
    found = (process.strategy_of(each) for each in [*parameters, value] if isinstance(each, _MADE))
    strategy = next((each for each in found if each is not None), foreign_libraries.strategy_of_shared(value))
    if strategy is None:
        return None
    return strategy.spec, list(map(process.runtime_of(strategy).registration.place_of, parameters))


def register_copied(value: Any, origin: Origin | None) -> None:
    """Keep an object in sync that was copied from another replica, where `origin_of` returned its origin."""
    if is_mirrored(value) and is_metric(value):
        metric_binding.bind(value)
    elif origin is not None:
        spec, places = origin
        spmd.register_restored(resolve(spec), value, places)
