"""Checks for trainable modules made outside scopes, whose copies would drift apart if several replicas trained them.

There are two checks. Both run only in `run` on more than one replica, so they ignore torchrun-style code at the top
level of a cell.

1. The first check searches the objects to which a function refers: its arguments, its closure, and the globals named in
   its code and in the code of functions that it calls. It runs before the function's first call, and again when
   modules have been made or have gained parameters since. It also runs after a call, which may have built a model.
2. The second check runs when an optimizer steps. It finds parameters that the first one has missed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from distnb.collectives.gradients.optimizer_steps import optimized
from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.compat.torch_internals import original_class
from distnb.errors import ContextError
from distnb.objects.code.definitions import content_of, names_of_code
from distnb.runtime import contexts
from distnb.runtime.scopes.made_objects import CHANGES, own_parameters
from distnb.runtime.this_process import this_process
from distnb.variables.variable import Variable

__all__ = ["UnmanagedCheck"]

_LIBRARIES = ("torch", "numpy", "distnb", "torchmetrics", "torchvision", "sklearn")
_LEAVES = (str, bytes, int, float, type(None), type, types.ModuleType)
_MAX_OBJECTS = 2000
_MAX_DEPTH = 8


class UnmanagedCheck:
    """The checks of one strategy on this replica.

    Args:
        strategy: The strategy.
        owns: Returns whether the strategy made a parameter.
    """

    def __init__(self, strategy: Any, owns: Callable[[torch.Tensor], bool]) -> None:
        self._strategy = strategy
        self._owns = owns
        # Functions, the objects of methods, and modules, with `CHANGES.count` when they were checked.
        self._checked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        # Parameters in DistributedDataParallel, which keeps them in sync itself.
        self._wrapped = WeakIdKeyDictionary()
        register_optimizer_step_pre_hook(self._before_step)

    def check(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check the objects that a function and its arguments refer to, unless they were checked since the last change.

        Raises:
            ContextError: A trainable module among them was not made in a scope of this strategy.
        """
        roots = (fn.__func__, fn.__self__) if isinstance(fn, types.MethodType) else (fn,)
        given = [(f"args[{place}]", value) for place, value in enumerate(args) if not self._is_harmless(value)]
        given += [(name, value) for name, value in kwargs.items() if not self._is_harmless(value)]
        if not all(map(self._is_checked, roots)):
            given.append((getattr(fn, "__name__", "fn"), fn))
        if not given:
            return
        found = [(name, value) for name, value in _reachable(given) if not self._is_checked(value)]
        for _, value in found:
            if isinstance(value, DistributedDataParallel):
                self._wrapped.update((parameter, True) for parameter in value.parameters())
        for name, value in found:
            parameters = [each for _, each in own_parameters(value)] if isinstance(value, torch.nn.Module) else [value]
            for variable in parameters:
                # A variable of another strategy must not even be read: this replica's component may differ from the
                # value that the variable has under its own strategy.
                owner = variable.distribute_strategy if isinstance(variable, Variable) else self._strategy
                if owner is not self._strategy and not owner.is_default:
                    raise contexts.mixing(self._strategy, owner)
            if isinstance(value, torch.nn.Module):
                self._check(f"{name!r} (a {original_class(value).__name__})", parameters)
        for each in (*roots, *(value for _, value in found)):
            if _is_identified(each):
                with contextlib.suppress(TypeError):  # an object without weak references is checked in every call
                    self._checked[each] = CHANGES.count

    def _is_harmless(self, value: Any) -> bool:
        return _is_data(value) or self._is_checked(value)

    def _is_checked(self, value: Any) -> bool:
        try:
            return _is_identified(value) and bool(self._checked.get(value) == CHANGES.count)
        except TypeError:
            return False

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        innermost = contexts.innermost()
        if innermost is None or innermost[0] is not self._strategy:
            return
        if innermost[1] is None or innermost[1].num_replicas_in_sync == 1:
            return
        parameters = optimized(optimizer)
        if self._stepped.get(optimizer) != len(parameters):
            self._check(f"{type(optimizer).__name__}'s parameters", parameters)
            self._stepped[optimizer] = len(parameters)

    def _check(self, shown: str, parameters: list[Any]) -> None:
        for parameter in parameters:
            if not parameter.requires_grad or self._owns(parameter) or parameter in self._wrapped:
                continue
            if find_mirror(parameter) is not None or _has_strategy(parameter):
                raise ContextError(
                    f"Mixing different Strategy objects: {shown} in strategy.run of {self._strategy!r} was made in the "
                    "scope of another strategy. Run it with the strategy that made it. Equal arguments give the same "
                    "strategy object."
                )
            raise ContextError(
                f"{shown} has trainable parameters that were not made in strategy.scope(), and strategy.run of "
                f"{self._strategy!r} uses it: every replica would train its own copy. Make the model within "
                "`with strategy.scope():`. To copy trained weights, call model.load_state_dict(...) there, or Keras's "
                "model.set_weights(...). If the model is not to be trained, freeze it: model.requires_grad_(False)."
            )


def _has_strategy(parameter: torch.Tensor) -> bool:
    """Return whether another strategy of this process made a parameter, and keeps it in sync by other means."""
    process = this_process.replica
    return process is not None and process.strategy_of(parameter) is not None


def _is_identified(value: Any) -> bool:
    """Return whether an object is equal only to itself, so it can be a key. Variables are not: they are tensors."""
    compares: Any = type(value).__eq__
    return compares is object.__eq__


def _is_data(value: Any) -> bool:
    """Return whether a value consists only of tensors, numbers and strings, as most batches do."""
    kind = type(value)
    if kind is dict:
        return all(map(_is_data, value.values()))
    return all(map(_is_data, value)) if kind is tuple or kind is list else kind is torch.Tensor or kind in _LEAVES


def _reachable(given: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for the modules and variables among some objects and in the functions among them."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [(name, value, 0) for name, value in given]
    while waiting and len(seen) < _MAX_OBJECTS:
        name, value, depth = waiting.pop()
        if isinstance(value, _LEAVES) or id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, (torch.nn.Module, Variable)):
            yield name, value
        elif not isinstance(value, torch.Tensor):
            waiting += [(inner, child, depth + 1) for inner, child in _parts(name, value)]


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    module = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{name}[{place}]", child) for place, child in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield from ((name, value.__func__), (name, value.__self__))
    elif isinstance(value, functools.partial):
        yield from ((name, value.func), (name, value.args), (name, value.keywords))
    elif (module or "").partition(".")[0] in _LIBRARIES:
        return
    elif isinstance(value, types.FunctionType):
        yield from _names_in(value)
    else:
        yield from ((f"{name}.{key}", child) for key, child in getattr(value, "__dict__", {}).items())
        call = getattr(type(value), "__call__", None)  # noqa: B004
        if isinstance(call, types.FunctionType):
            yield name, call


def _names_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    unwrapped = inspect.unwrap(function)
    if unwrapped is not function:
        yield function.__name__, unwrapped
    yield function.__name__, function.__defaults__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, content_of(cell)
    for name in sorted(names_of_code(function.__code__).names & function.__globals__.keys()):
        yield name, function.__globals__[name]
