"""Optimizers' steps on mirrored parameters, which need aggregated gradients and write the same values on all replicas.

Tensors count the writes to them. An optimizer's step writes equal values, since its gradients are equal. So only
parameters with other writes have to be compared, and the end of a cell that trains as usual costs nothing.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distnb.collectives.digests import digest
from distnb.collectives.eager import always_eager
from distnb.collectives.gradients.backward_passes import BACKWARD_PASSES
from distnb.collectives.gradients.parameter_groups import AGGREGATED, Mirror, ParameterGroup, find_mirror
from distnb.collectives.gradients.replica_comparison import find_unlike
from distnb.compat import torch_internals
from distnb.errors import UnsyncedGradientError

if TYPE_CHECKING:
    from distnb.collectives.gradients.gradient_sync import GradientSync

__all__ = [
    "SurroundedSteps",
    "changed_by_hand",
    "guard_optimizers",
    "note_versions",
    "optimized",
    "with_closure_called",
    "writes",
]


class _Steps:
    """The observed steps of one optimizer.

    Attributes:
        used: The number of the last aggregation that one of its steps used.
        mirrored: Its parameters whose writes are counted: the counts, the place there, the parameter.
        versions: The versions of these parameters at the beginning of the current step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.used = 0
        self.versions: list[int] = []
        self._count = -1
        self.see(optimizer)

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the beginning of a step."""
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        if count != self._count:
            self._count = count
            mirrors = [(find_mirror(p), p) for p in optimized(optimizer)]
            self.mirrored: list[tuple[dict[int, int], int, Any]] = [
                (mirror.group.versions, mirror.place, parameter)
                for mirror, parameter in mirrors
                if mirror is not None and mirror.place in mirror.group.versions
            ]
        self.versions = [parameter._version for _, _, parameter in self.mirrored]


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()


class SurroundedSteps:
    """Functions that are called right before and after steps of optimizers, within all other hooks.

    Args:
        surrounds: Returns whether the functions are called for a step of an optimizer.
        before, after: Hooks as of torch's optimizers. `after` is not called for a step that fails.
    """

    def __init__(
        self,
        surrounds: Callable[[torch.optim.Optimizer], bool],
        before: Callable[[torch.optim.Optimizer, Any, Any], Any],
        after: Callable[[torch.optim.Optimizer, Any, Any], None],
    ) -> None:
        self._surrounds = surrounds
        self._before = before
        self._after = after
        self._removers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[], None]] = (
            weakref.WeakKeyDictionary()
        )
        register_optimizer_step_pre_hook(self._surround)
        register_optimizer_step_post_hook(self._release)

    def _surround(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._release(optimizer)  # of a step that failed
        if self._surrounds(optimizer):
            self._removers[optimizer] = torch_internals.surround_step(optimizer, self._before, self._after)

    def _release(self, optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
        if (remove := self._removers.pop(optimizer, None)) is not None:
            remove()


def with_closure_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call a step's closure before the step, and replace it by a function that returns its loss.

    The closure's backward pass is a collective, so every replica must call it at the same point.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss), {}


@functools.cache
def guard_optimizers() -> None:
    """Check every step of every optimizer from now on. Idempotent; steps on one replica cost nothing."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@always_eager
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if not BACKWARD_PASSES.any_aggregates():
        return None
    known = _known.get(optimizer)
    if known is None:
        known = _known[optimizer] = _Steps(optimizer)
    identities = AGGREGATED.identities
    unknown = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (gradient := parameter.grad) is not None and id(gradient) not in identities
    ]
    if unknown:
        mirrors = [mirror for parameter in unknown if (mirror := find_mirror(parameter)) is not None]
        suspects = [mirror for mirror in mirrors if (sync := mirror.sync()) is not None and sync.aggregates]
        if suspects:
            _judge(optimizer, suspects, known.used)
    known.used = AGGREGATED.stepped = AGGREGATED.serial
    known.see(optimizer)
    if len(args) > 1 or kwargs:
        return _with_global_loss(optimizer, args, kwargs)
    return None


def _with_global_loss(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Make the closure of an optimizer that computes with the loss (a line search) return the loss of the whole batch.

    torch's optimizers other than LBFGS only pass it on.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    mirrors = map(find_mirror, optimized(optimizer))
    sync = next((sync for mirror in mirrors if mirror is not None and (sync := mirror.sync()) is not None), None)
    if not callable(closure) or sync is None or not sync.aggregates:
        return None

    def whole() -> Any:
        return sync.global_loss(closure())

    return ((args[0], whole, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": whole})


@always_eager
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = _known.get(optimizer)
    if known is not None and BACKWARD_PASSES.any_aggregates():
        for (counts, place, parameter), version in zip(known.mirrored, known.versions, strict=True):
            counts[place] += parameter._version - version


def _judge(optimizer: torch.optim.Optimizer, unknown: Sequence[Mirror], used: int) -> None:
    """Raise an error unless the gradients are aggregated, or were made from aggregated ones (`p.grad = p.grad /
    norm`), or are equal on all replicas (`p.grad = all_reduce(...) / n`)."""
    wrong = [
        mirror
        for mirror in unknown
        if _in_pass(mirror) or mirror.place in mirror.group.local or mirror.group.serial <= used
    ]
    if not wrong or _are_equal(wrong):
        return
    first = wrong[0]
    parameter = first.group.references[first.place]()
    shape = list(parameter.shape) if parameter is not None else "?"
    if _in_pass(first):
        cause = "they are the sums over all replicas at the end of the backward pass, and it is still under way"
        cure = "Take the step after loss.backward(), and not in a hook (register_post_accumulate_grad_hook)."
    elif first.place in first.group.local:
        cause = "so far they come from backward passes under no_sync() only"
        cure = "Run the last backward pass before each optimizer step outside no_sync()."
    else:
        cause = "they were not made by a backward pass (torch.autograd.grad, or assigned by hand), and differ"
        cure = (
            "Aggregate them first: `p.grad = distnb.get_replica_context().all_reduce('sum', gradient)`, or let "
            "`loss.backward()` make them."
        )
    raise UnsyncedGradientError(
        f"{type(optimizer).__name__}.step() on gradients of {len(wrong)} mirrored parameters that were never "
        f"aggregated over the replicas: {cause}. The first is parameter {first.place} of {first.group.description}, "
        f"shape {shape}. Each replica would make another step, and the replicas would drift apart. {cure}"
    )


def _are_equal(made_by_hand: Sequence[Mirror]) -> bool:
    """Compare gradients that no backward pass made, and note that they are aggregated if all replicas have them."""
    if any(_in_pass(mirror) or mirror.place in mirror.group.local for mirror in made_by_hand):
        return False
    by_strategy: dict[GradientSync, list[torch.Tensor]] = {}
    for mirror in made_by_hand:
        parameter, sync = mirror.group.references[mirror.place](), mirror.sync()
        if parameter is not None and sync is not None and parameter.grad is not None:
            by_strategy.setdefault(sync, []).append(parameter.grad)
    if any(find_unlike(sync.replicas, gradients) for sync, gradients in by_strategy.items()):
        return False
    for gradient in itertools.chain(*by_strategy.values()):
        AGGREGATED.add(gradient)
    return True


def _in_pass(mirror: Mirror) -> bool:
    sync = mirror.sync()
    return sync is not None and sync.in_pass


def optimized(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- changes by hand ---------------------------------------------------------------------------------------------------


def note_versions(groups: Iterable[ParameterGroup], *, again: bool = False) -> None:
    """Note that parameters registered since the last call (with `again`, all parameters) are equal on all replicas
    now."""
    for group in groups:
        if again:
            group.versions.clear()
            group.versions_at_first.clear()
        for place, parameter in _counting(group):
            group.versions.setdefault(place, parameter._version)
            group.versions_at_first.setdefault(place, parameter._version)


def writes(group: ParameterGroup) -> int:
    """Count the writes to a group's parameters since the replicas last began with equal values.

    Replicas that made the same steps return the same number. No value is read, because that would wait for the device.
    """
    return sum(
        parameter._version - group.versions_at_first.get(place, parameter._version)
        for place, parameter in _counting(group)
    )


def changed_by_hand(groups: Iterable[ParameterGroup]) -> dict[str, int]:
    """Return the digests of the parameters that were changed since the last call other than by steps, by name."""
    changed = {}
    for group in groups:
        for place, parameter in _counting(group):
            version = parameter._version
            if group.versions.get(place, version) != version:
                name = f"parameter {place} of {group.description} {list(parameter.shape)}"
                changed[name] = digest(parameter)
            group.versions[place] = version
    return changed


def _counting(group: ParameterGroup) -> list[tuple[int, torch.nn.Parameter]]:
    return [(place, parameter) for place, parameter in group.living() if not parameter.is_inference()]
