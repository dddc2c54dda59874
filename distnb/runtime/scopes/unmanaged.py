"""Trainable modules that no scope made must not be trained, or read, by several replicas: they would drift apart.

Two checks, both only within `run` on more than one replica, so that torchrun-style code at the top level of a cell is
left alone. Before a function first runs, what it refers to is looked at: its arguments, its closure, and the globals
that its code, and the functions that this calls, name. What that does not see is caught when an optimizer steps.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.errors import ContextError
from distnb.runtime import choice, contexts
from distnb.variables.variable import Variable

__all__ = ["OutsiderCheck"]

_CONTAINERS = (list, tuple, set, frozenset)
_LIBRARIES = ("torch", "numpy", "distnb", "torchmetrics", "torchvision", "sklearn")
_MAX_OBJECTS = 2000


class OutsiderCheck:
    """The checks of one strategy on this replica.

    Args:
        strategy: For errors.
        owns: Whether this strategy made a parameter.
    """

    def __init__(self, strategy: Any, owns: Callable[[torch.Tensor], bool]) -> None:
        self._strategy = strategy
        self._owns = owns
        self._checked: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # Parameters in DistributedDataParallel are kept in sync by it.
        self._wrapped: dict[int, weakref.ref[torch.Tensor]] = {}
        _check_every_optimizer()

    def before_run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Look at what a function refers to, the first time that it runs.

        Raises:
            ContextError: Among it is a trainable module that no scope of this strategy made.
        """
        key = fn.__func__ if isinstance(fn, types.MethodType) else fn
        try:
            if key in self._checked:
                return
        except TypeError:  # cannot be hashed
            key = type(fn)
        found = list(_reachable(fn, args, kwargs))
        for _, value in found:
            if isinstance(value, DistributedDataParallel):
                self._wrapped.update((id(parameter), weakref.ref(parameter)) for parameter in value.parameters())
        for name, value in found:
            self._check_variables([value])
            if isinstance(value, torch.nn.Module):
                self._check_variables(value.parameters())
                self._check(name, f"a {type(value).__name__}", value.parameters())
        try:
            self._checked[key] = True
        except TypeError:
            return  # looked at again at every call: what cannot be referred to weakly is rare

    def _check_variables(self, values: Iterable[Any]) -> None:
        """Refuse another strategy's variables, to be read as well: this replica's is not what that strategy says."""
        for value in values:
            if isinstance(value, Variable):
                owner = value.distribute_strategy
                if owner is not self._strategy and owner.spec.kind != choice.DEFAULT:
                    raise contexts.mixing(self._strategy, owner)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose parameters no scope of this strategy made."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._check("", f"{type(optimizer).__name__}'s parameters", parameters)

    def _check(self, name: str, what: str, parameters: Any) -> None:
        for parameter in parameters:
            if not parameter.requires_grad or self._owns(parameter) or self._is_wrapped(parameter):
                continue
            shown = f"{name!r} ({what})" if name else what
            if find_mirror(parameter) is not None:
                raise ContextError(
                    f"Mixing different Strategy objects: {shown} in strategy.run of {self._strategy!r} was made in the "
                    "scope of another strategy. Run it with the strategy that made it; equal arguments give the same "
                    "strategy object."
                )
            raise ContextError(
                f"{shown} has trainable parameters that were not made in strategy.scope(), and strategy.run of "
                f"{self._strategy!r} uses it: every replica would train a copy of its own. Make the model within "
                "`with strategy.scope():`; to take trained weights over, call model.load_state_dict(...) there. A "
                "model that is not to be trained can be frozen: model.requires_grad_(False)."
            )

    def _is_wrapped(self, parameter: torch.Tensor) -> bool:
        reference = self._wrapped.get(id(parameter))
        return reference is not None and reference() is parameter


# -- every optimizer of the process ------------------------------------------------------------------------------------

_hook: Any = None


def _check_every_optimizer() -> None:
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)


_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    innermost = contexts.innermost()
    if innermost is None or innermost[1] is None or innermost[1].num_replicas_in_sync == 1:
        return
    count = sum([len(group["params"]) for group in optimizer.param_groups])
    if _stepped.get(optimizer) == count:
        return
    check = innermost[1].outsiders
    if check is not None:
        check.before_step(optimizer)
    _stepped[optimizer] = count


# -- what a function refers to -----------------------------------------------------------------------------------------


def _reachable(fn: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """(name, object) of what a function may use: modules of torch among it are what matters."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [
        (getattr(fn, "__name__", "fn"), fn, 0),
        ("args", args, 0),
        ("kwargs", kwargs, 0),
    ]
    while waiting and len(seen) < _MAX_OBJECTS:
        name, value, depth = waiting.pop()
        if id(value) in seen or value is None or isinstance(value, (str, bytes, int, float)):
            continue
        if isinstance(value, torch.Tensor) and not isinstance(value, Variable):
            continue
        seen.add(id(value))
        yield name, value
        waiting += [(inner, child, depth + 1) for inner, child in _parts(name, value, depth)]


def _parts(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.nn.Module, torch.Tensor)):
        return
    if isinstance(value, types.FunctionType):
        if not _of_library(value.__module__):
            yield from _names_in(value)
    elif isinstance(value, types.MethodType):
        yield name, value.__func__
        yield name, value.__self__
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield name, (value.args, value.keywords)
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, _CONTAINERS):
        yield from ((f"{name}[{place}]", child) for place, child in enumerate(value))
    elif not isinstance(value, (type, types.ModuleType)) and not _of_library(type(value).__module__) and depth < 4:
        yield from ((f"{name}.{key}", child) for key, child in getattr(value, "__dict__", {}).items())
        call = getattr(type(value), "__call__", None)  # noqa: B004
        if isinstance(call, types.FunctionType):
            yield name, call


def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _names_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    unwrapped = inspect.unwrap(function)
    if unwrapped is not function:
        yield function.__name__, unwrapped
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for default in function.__defaults__ or ():
        yield function.__name__, default
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a code object and those within it load."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))
