"""The origins of objects that are copied from one replica to the engine of another, and kept in sync there."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from typing import Any

import torch

from distnb.input.dataset import DistributedDataset, DistributedIterator
from distnb.objects.keras_archives import is_archived
from distnb.objects.merging import ATOMS
from distnb.options import StrategySpec
from distnb.runtime import spmd
from distnb.runtime.scopes import foreign_libraries, metric_binding
from distnb.runtime.scopes.mirrored_objects import is_metric, is_mirrored
from distnb.runtime.scopes.registration import ParameterKey, parameters_of, registered_in
from distnb.runtime.scopes.replica_parts import forget_part, is_part
from distnb.runtime.this_process import this_process
from distnb.strategies.base import resolve
from distnb.values import DistributedValues

__all__ = ["Origin", "common_parts", "origin_of", "register_copied"]

_MOST_PARTS = 100_000  # the most objects within one object that are searched

_MADE = (torch.Tensor, torch.nn.Module)

Origin = tuple[StrategySpec, list[ParameterKey | None]]
"""The strategy in whose scope an object was made, and the keys of what is registered in it, equal on all replicas."""


def common_parts(root: Any, *, with_archived: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the objects within an object that the replicas have in common, each with its path from the object.

    These are modules, optimizers and variables that the replicas keep in sync; metrics and variables of which each
    replica holds a part; and distributed datasets and their iterations. A part of a module is not yielded again, unless
    it is a metric. The paths are the same on all replicas.

    Args:
        root: The object.
        with_archived: Whether to search objects of Keras, too, which it pickles as a whole.
    """
    seen = {id(root): root}
    covered: set[int] = set()
    queue = collections.deque([("", root)])
    while queue and len(seen) < _MOST_PARTS:
        path, obj = queue.popleft()
        if isinstance(obj, DistributedDataset | DistributedIterator):
            yield path, obj
            continue
        if is_part(obj) or (id(obj) not in covered and is_mirrored(obj)):
            yield path, obj
            if isinstance(obj, torch.nn.Module):
                covered.update(id(part) for part in obj.modules())
                covered.update(id(part) for part in obj.parameters())
        for name, part in _within(obj) if with_archived or not _is_archived(obj) else ():
            if type(part) not in ATOMS and id(part) not in seen:
                seen[id(part)] = part
                queue.append((path + name, part))


def _is_archived(obj: Any) -> bool:
    return is_archived(type(obj)) or foreign_libraries.is_shared(obj)


_CLOSED = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(torch.Tensor, torch.optim.Optimizer),
)


def _within(obj: Any) -> list[tuple[str, Any]]:
    """Return the objects within an object, each with the name of its place, in an order that all replicas share."""
    if isinstance(obj, _CLOSED):
        return []
    if isinstance(obj, DistributedValues):
        return [("", each) for each in obj.values] if len(obj.values) == 1 else []
    found: list[tuple[str, Any]] = []
    if isinstance(obj, dict):
        keys = (repr(key) if type(key) in (str, int) else str(place) for place, key in enumerate(obj))
        found += [(f"[{key}]", value) for key, value in zip(keys, obj.values(), strict=True)]
    elif isinstance(obj, list | tuple | collections.deque):
        found += [(f"[{place}]", value) for place, value in enumerate(obj)]
    try:
        own: Any = object.__getattribute__(obj, "__dict__")  # bypasses a `__getattribute__` of the object's class
    except AttributeError:
        return found
    return found + [(f".{name}", own[name]) for name in sorted(own, key=str)]


def origin_of(value: Any) -> Origin | None:
    """Return the origin of a module, optimizer or parameter for a replica that gets a copy, or None if it has none."""
    process = this_process.replica
    if process is None or not is_mirrored(value):
        return None
    found = (process.strategy_of(each) for each in [*parameters_of(value), value] if isinstance(each, _MADE))
    strategy = next((each for each in found if each is not None), foreign_libraries.strategy_of_shared(value))
    if strategy is None:
        return None
    return strategy.spec, list(map(process.runtime_of(strategy).registration.place_of, registered_in(value)))


def register_copied(value: Any, origin: Origin | None, *, with_parts: bool = False) -> None:
    """Keep an object in sync that was copied from another replica, where `origin_of` returned its origin.

    Its content that only counts once, such as the counts of a metric, is that replica's own, unless `with_parts`: that
    replica has ended.
    """
    if not with_parts:
        for part in (value, *parameters_of(value)):
            if is_part(part):
                forget_part(part)
    if is_mirrored(value) and is_metric(value):
        metric_binding.bind(value)
    elif origin is not None:
        spec, places = origin
        spmd.register_restored(resolve(spec), value, places)
