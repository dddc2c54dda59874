"""An optimizer must not step mirrored parameters on gradients that were never aggregated."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from distnb.collectives.gradients.aggregated import aggregated
from distnb.collectives.gradients.backward_passes import any_aggregates
from distnb.collectives.gradients.mirrored_parameters import Mirror, find_mirror
from distnb.collectives.gradients.step_watch import StepWatch
from distnb.collectives.group.eager import always_eager
from distnb.errors import UnsyncedGradientError

__all__ = ["guard_optimizers"]

# Per optimizer: the number of the last aggregation that one of its steps has used.
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_installed = False
_steps = StepWatch()


def guard_optimizers() -> None:
    """Check every step of every optimizer from now on. Idempotent; steps on one replica cost nothing."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True


@always_eager
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if not any_aggregates():
        return None
    known = aggregated.identities
    unknown = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (gradient := parameter.grad) is not None and id(gradient) not in known
    ]
    if unknown:
        mirrors = [mirror for parameter in unknown if (mirror := find_mirror(parameter)) is not None]
        suspects = [mirror for mirror in mirrors if (sync := mirror.sync()) is not None and sync.aggregates]
        if suspects:
            _judge(optimizer, suspects)
    _stepped[optimizer] = aggregated.stepped = aggregated.serial
    _steps.before(optimizer)
    if len(args) > 1 or kwargs:
        return _with_global_loss(optimizer, args, kwargs)
    return None


def _with_global_loss(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Have an optimizer that computes with its closure's loss (a line search) get that of the whole batch.

    Those of torch but LBFGS only hand it on.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS):
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    mirrors = (find_mirror(parameter) for group in optimizer.param_groups for parameter in group["params"])
    sync = next((sync for mirror in mirrors if mirror is not None and (sync := mirror.sync()) is not None), None)
    if not callable(closure) or sync is None or not sync.aggregates:
        return None

    def whole() -> Any:
        return sync.global_loss(closure())

    return ((args[0], whole, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": whole})


@always_eager
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any_aggregates():
        _steps.after(optimizer)


def _judge(optimizer: torch.optim.Optimizer, unknown: Sequence[Mirror]) -> None:
    """Accept gradients that were made from aggregated ones (`p.grad = p.grad / norm`); refuse the others."""
    before = _stepped.get(optimizer, 0)
    wrong = [
        mirror
        for mirror in unknown
        if _in_pass(mirror)
        or mirror.place in mirror.family.local
        or mirror.place in mirror.family.tainted
        or not _aggregated_since(mirror, before)
    ]
    if not wrong:
        return
    first = wrong[0]
    parameter = first.parameter()
    shape = list(parameter.shape) if parameter is not None else "?"
    if _in_pass(first):
        cause = "they are the sums over all replicas at the end of the backward pass, and it is still under way"
        cure = "Take the step after loss.backward(), and not in a hook (register_post_accumulate_grad_hook)."
    elif first.place in first.family.local:
        cause = "so far they come from backward passes under no_sync() only"
        cure = "Run the last backward pass before each optimizer step outside no_sync()."
    else:
        cause = "they were not made by a backward pass (torch.autograd.grad, or assigned by hand)"
        cure = (
            "Aggregate them first: `p.grad = distnb.get_replica_context().all_reduce('sum', gradient)`, or let "
            "`loss.backward()` make them."
        )
    raise UnsyncedGradientError(
        f"{type(optimizer).__name__}.step() on gradients of {len(wrong)} mirrored parameters that were never "
        f"aggregated over the replicas: {cause}. The first is parameter {first.place} of {first.family.description}, "
        f"shape {shape}. Each replica would make another step, and the replicas would drift apart. {cure}"
    )


def _in_pass(mirror: Mirror) -> bool:
    sync = mirror.sync()
    return sync is not None and sync.in_pass


def _aggregated_since(mirror: Mirror, serial: int) -> bool:
    return mirror.family.serial > serial and mirror.place not in mirror.family.unused
