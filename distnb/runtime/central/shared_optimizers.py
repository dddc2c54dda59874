"""Optimizers of variables that live once: each update is computed once, by one replica, and its state is kept once.

A step is taken together, with the same aggregated gradients. The first step of one of torch's optimizers is computed by
every replica; what it keeps for the variables then moves to the common memory. In later steps each variable's owner
updates it, right in the common memory, while the others wait. Optimizers that torch does not have may look at several
variables at once: every replica computes their whole steps, as under MirroredStrategy.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distnb.collectives.gradients.optimizer_steps import guard_optimizers
from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.collectives.group.eager import always_eager
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
"""Optimizers that update each parameter by itself, and what they keep in place, so that replicas can share the work."""


@dataclass
class _SharedStep:
    """A step under way."""

    optimizer: Optimizer
    on_host: OnHost  # the optimizer's parameters on an accelerator are replaced meanwhile
    alike: list[torch.Tensor]  # every replica updates these
    mine: list[torch.Tensor]  # this replica updates these for all
    others: list[tuple[torch.Tensor, torch.Tensor]]  # with gradients: an optimizer passes over those without one
    close: Callable[[], None]  # ends the writing to common memory

    def end(self) -> None:
        self.close()
        for parameter, gradient in self.others:
            parameter.grad = gradient


class SharedOptimizers:
    """The steps of all optimizers that hold variables of one strategy; `sync` knows the strategy's parameters."""

    def __init__(self, group: Callable[[], Group], variables: SharedVariables, sync: GradientSync) -> None:
        self._group = group
        self._variables = variables
        self._sync = sync
        self._under_way: dict[int, _SharedStep] = {}
        self._generation: int | None = None
        self._stepped: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        guard_optimizers()  # looks at gradients before some are put aside here
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def end_half_steps(self) -> None:
        """Warn if a program was ended here within a step. The replicas are equal nevertheless: variables live once."""
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

    @always_eager
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = self._group()
        if (interrupted := self._under_way.pop(id(optimizer), None)) is not None:
            interrupted.end()
            interrupted.on_host.end()
        parameters = _parameters(optimizer)
        if group.size == 1 or not any(map(self._owns, parameters)):
            return None
        divisible = type(optimizer) in _DIVISIBLE
        if divisible:
            args, kwargs = _with_closure_called(args, kwargs)
        elif any(parameter.device.type != "cpu" for parameter in parameters):
            raise GradientError(
                f"{type(optimizer).__name__}.step(): under central storage on accelerators a variable is updated in "
                "the host's memory, once, which works for torch.optim's own optimizers that treat each parameter by "
                "itself. Use torch.optim.Adam, SGD or the like, CPU replicas, or MirroredStrategy."
            )
        group.note(f"{type(optimizer).__name__}.step", ())
        self._variables.synchronise()
        if group.generation != self._generation:  # a replica may be new, and know of no earlier step
            self._generation = group.generation
            self._stepped.clear()
        on_host = OnHost(optimizer, self._variables.hosts)
        alike, mine, others = [], [], []
        stepped = [parameter for parameter in _parameters(optimizer) if divisible and parameter.grad is not None]
        # A page of memory may hold several variables: either all of them are written to it here, or by their owners.
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
            increment_version(parameter)  # a graph that was kept from before is as outdated as where it was written to
        try:
            self._adopt_updates(step)
        finally:
            step.on_host.end()
        if step.alike:
            self._variables.synchronise()

    def _adopt_updates(self, step: _SharedStep) -> None:
        """Wait for the other replicas' updates; what the optimizer keeps since its first step is to be shared."""
        optimizer, group, name = step.optimizer, self._group(), type(step.optimizer).__name__
        step.on_host.move_state_to_host()
        grown = not all(self._keeps_all_in_common(optimizer, parameter) for parameter in step.mine)
        if bool(torch.stack(group.all_gather(torch.tensor([grown], device="cpu"))).any()):
            raise GradientError(
                f"{name} was told in mid-training to keep something new for its variables, and under central storage "
                "one replica alone keeps it. Make a new optimizer with these options."
            )
        stepped = self._stepped.setdefault(optimizer, set())
        for parameter in step.alike:
            stepped.add(id(parameter))
            for key, value in _kept(optimizer, parameter).items():
                self._variables.expect_once(f"{key} of {name}", value)

    def _owns(self, parameter: torch.Tensor) -> bool:
        mirror = find_mirror(parameter)
        return mirror is not None and mirror.sync() is self._sync

    def _keeps_all_in_common(self, optimizer: Optimizer, parameter: torch.Tensor) -> bool:
        """Return whether all that an optimizer keeps for a parameter lies in the common memory."""
        kept = _kept(optimizer, parameter).values()
        return id(parameter) in self._stepped.get(optimizer, ()) and all(
            self._variables.owner_of(value) is not None for value in kept
        )


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _kept(optimizer: Optimizer, parameter: torch.Tensor) -> dict[Any, torch.Tensor]:
    state: Iterable[tuple[Any, Any]] = optimizer.state.get(parameter, {}).items()
    return {key: value for key, value in state if isinstance(value, torch.Tensor) and value.numel()}


def _with_closure_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure for its backward pass, which takes part in collectives on every replica, before the step."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss), {}
