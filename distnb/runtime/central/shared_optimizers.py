"""Optimizers of variables in central storage. One replica computes each update, and the state is stored once.

The replicas take a step together, with the same aggregated gradients. Every replica computes the first step of a torch
optimizer. The state that this step has created then moves to the common memory. In later steps each variable's owner
updates the variable directly in the common memory, while the other replicas wait:

    step 1      every replica   updates a, b, c and creates their state; the state becomes common
    step 2, …   replica 0       updates a and c
                replica 1       updates b

An optimizer of another library may combine several variables in one update. Every replica therefore computes its whole
steps, as under MirroredStrategy.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer

from distnb.collectives.eager import always_eager
from distnb.collectives.gradients.optimizer_steps import (
    SurroundedSteps,
    guard_optimizers,
    optimized,
    with_closure_called,
)
from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.errors import GradientError
from distnb.runtime.central.host_tensors import OnHost
from distnb.runtime.central.shared_variables import SharedVariables

if TYPE_CHECKING:
    from distnb.collectives.gradients.gradient_sync import GradientSync
    from distnb.collectives.group.interface import Group

__all__ = ["SharedOptimizers"]

_DIVISIBLE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD", "SparseAdam"),
    )
    if hasattr(torch.optim, name)
)
"""Optimizers that treat each parameter separately and change their state in place, so replicas can divide a step."""


@dataclass
class _SharedStep:
    """A step in progress."""

    optimizer: Optimizer
    on_host: OnHost  # replaces the optimizer's parameters on an accelerator during the step
    alike: list[torch.Tensor]  # every replica updates these
    mine: list[torch.Tensor]  # this replica updates these for all
    others: list[tuple[torch.Tensor, torch.Tensor]]  # other owners' parameters; without their gradient they are skipped
    close: Callable[[], None]  # directs writes away from the common memory again

    def end(self) -> None:
        self.close()
        for parameter, gradient in self.others:
            parameter.grad = gradient


class SharedOptimizers:
    """The steps of all optimizers that hold variables of one strategy.

    Args:
        group: Returns the current process group.
        variables: The strategy's shared variables.
        sync: The synchronisation of the strategy's parameters, which identifies them.
    """

    def __init__(self, group: Callable[[], Group], variables: SharedVariables, sync: GradientSync) -> None:
        self._group = group
        self._variables = variables
        self._sync = sync
        self._under_way: dict[int, _SharedStep] = {}
        self._generation: int | None = None
        self._stepped: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        guard_optimizers()  # its hook must come first: it checks gradients, some of which `_before_step` removes
        SurroundedSteps(self._begin_step, self._before_step, self._after_step)

    def end_half_steps(self) -> None:
        """Finish the steps that a program's end has interrupted, and warn about each.

        The replicas are still equal, because they share the variables.
        """
        for step in self._under_way.values():
            step.end()
            step.on_host.end()
            warnings.warn(
                f"A program ended within {type(step.optimizer).__name__}.step(): that update may have been applied to "
                "some variables and not to others. Load a saved state if that matters.",
                UserWarning,
                stacklevel=2,
            )
        self._under_way.clear()

    def _begin_step(self, optimizer: Optimizer) -> bool:
        """End a step that failed. Return whether to divide the next one, within the user's hooks, which change
        variables as programs do: on every replica."""
        if (interrupted := self._under_way.pop(id(optimizer), None)) is not None:
            interrupted.end()
            interrupted.on_host.end()
        return self._group().size > 1 and any(map(self._owns, optimized(optimizer)))

    @always_eager
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group, parameters = self._group(), optimized(optimizer)
        divisible = type(optimizer) in _DIVISIBLE
        if divisible:
            args, kwargs = with_closure_called(args, kwargs)
        elif any(parameter.device.type != "cpu" for parameter in parameters):
            raise GradientError(
                f"{type(optimizer).__name__}.step(): under central storage on accelerators a variable is updated in "
                "the host's memory, once, which works for torch.optim's own optimizers that treat each parameter by "
                "itself. Use torch.optim.Adam, SGD or the like, CPU replicas, or MirroredStrategy."
            )
        group.note(f"{type(optimizer).__name__}.step", ())
        self._variables.synchronise()
        if group.generation != self._generation:  # a new replica has not recorded earlier steps
            self._generation = group.generation
            self._stepped.clear()
        on_host = OnHost(optimizer, self._variables.hosts)
        alike, mine, others = [], [], []
        stepped = [parameter for parameter in optimized(optimizer) if divisible and parameter.grad is not None]
        # Divide the step only if all parameters and their state are in common memory. Several variables may share a
        # page of memory: a page that a replica has written to is private to it, so it would not see owners' updates.
        divided = all(
            self._variables.owner_of(parameter) is not None and self._keeps_all_in_common(optimizer, parameter)
            for parameter in stepped
        )
        for parameter in stepped:
            if not divided:
                alike.append(parameter)
            elif self._variables.owner_of(parameter) == group.rank:
                mine.append(parameter)
            else:
                others.append((parameter, cast("torch.Tensor", parameter.grad)))
                parameter.grad = None
        kept = [value for parameter in mine for value in _kept(optimizer, parameter).values()]
        close = self._variables.open([*mine, *kept])
        self._under_way[id(optimizer)] = _SharedStep(
            optimizer=optimizer, on_host=on_host, alike=alike, mine=mine, others=others, close=close
        )
        return args, kwargs

    @always_eager
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = self._under_way.pop(id(optimizer), None)
        if step is None:
            return
        step.end()
        for parameter, _ in step.others:
            increment_version(parameter)  # autograd must see the owner's write: it outdates graphs kept from before
        try:
            self._adopt_updates(step)
        finally:
            step.on_host.end()
        if step.alike:
            self._variables.synchronise()

    def _adopt_updates(self, step: _SharedStep) -> None:
        """Wait for the other replicas' updates, and share the state that the optimizer's first step has created.

        Raises:
            GradientError: A later step has created new state, which only one replica has.
        """
        optimizer, group, name = step.optimizer, self._group(), type(step.optimizer).__name__
        step.on_host.move_state_to_host()
        grown = not all(self._keeps_all_in_common(optimizer, parameter) for parameter in step.mine)
        if bool(torch.stack(group.all_gather(torch.tensor([grown], device="cpu"))).any()):
            raise GradientError(
                f"{name} got options in the middle of training that need new state. Under central storage only one "
                "replica would have this state. Create a new optimizer with these options."
            )
        self._adopt_numbers(step)
        stepped = self._stepped.setdefault(optimizer, set())
        for parameter in step.alike:
            stepped.add(id(parameter))
            for key, value in _kept(optimizer, parameter).items():
                self._variables.expect_once(f"{key} of {name}", value)

    def _adopt_numbers(self, step: _SharedStep) -> None:
        """Adopt the Python numbers in the other owners' state, which cannot be in common memory: SparseAdam's steps."""
        optimizer, others = step.optimizer, [parameter for parameter, _ in step.others]
        if any(_numbers(optimizer, parameter) for parameter in (*step.mine, *others)):
            parameters, owned = optimized(optimizer), set(map(id, step.mine))
            own = {place: _numbers(optimizer, each) for place, each in enumerate(parameters) if id(each) in owned}
            for numbers in self._group().all_gather_object(own):
                for place, found in numbers.items():
                    optimizer.state[parameters[place]].update(found)

    def _owns(self, parameter: torch.Tensor) -> bool:
        mirror = find_mirror(parameter)
        return mirror is not None and mirror.sync() is self._sync

    def _keeps_all_in_common(self, optimizer: Optimizer, parameter: torch.Tensor) -> bool:
        """Return whether an optimizer has stepped a parameter and has all its state in the common memory."""
        kept = _kept(optimizer, parameter).values()
        return id(parameter) in self._stepped.get(optimizer, ()) and all(
            self._variables.owner_of(value) is not None for value in kept
        )


def _kept(optimizer: Optimizer, parameter: torch.Tensor) -> dict[Any, torch.Tensor]:
    state: Iterable[tuple[Any, Any]] = optimizer.state.get(parameter, {}).items()
    return {key: value for key, value in state if isinstance(value, torch.Tensor) and value.numel()}


def _numbers(optimizer: Optimizer, parameter: torch.Tensor) -> dict[Any, int | float]:
    state: Iterable[tuple[Any, Any]] = optimizer.state.get(parameter, {}).items()
    return {key: value for key, value in state if type(value) in (int, float)}
