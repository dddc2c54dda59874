"""Making mirrored state equal again after a program that ended half-way through a step.

An interrupt or an error ends the replicas at the same collective, but not at the same line: one may have stepped its
optimizer already and another not. The first use of a strategy in a new generation of the group therefore compares
parameters, gradients and optimizer states, and where they differ takes over what replica 0 holds.

Buffers may differ by right: what forward passes wrote into them is of each replica's own examples. That a step was done
in part is seen by those that count (`num_batches_tracked`), or by what was found before; then the models' buffers are
taken over as well.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distnb.collectives.digests import digest, digest_of_text
from distnb.collectives.gradients.optimizer_steps import writes
from distnb.collectives.gradients.parameter_groups import AGGREGATED, Identity, ParameterGroup, find_mirror
from distnb.collectives.verify import callsite
from distnb.runtime.consistency.sync_check import contents
from distnb.runtime.reduction.equal_values import make_equal
from distnb.runtime.reduction.gathering import broadcast_tree

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["Buffers", "resynchronise"]

Buffers = Mapping[Any, tuple[str, Sequence[torch.Tensor]]]
"""By what all replicas call a model: how people call it, and its buffers."""


class _Optimizer(NamedTuple):
    """The name of an optimizer on all replicas: its class, and the (group's identity, place) of each parameter."""

    name: str
    places: tuple[tuple[Identity, int], ...]


def resynchronise(
    group: Group,
    groups: Sequence[ParameterGroup],
    buffers: Buffers = MappingProxyType({}),
    *,
    steps_told: bool = False,
) -> None:
    """Compare what the replicas hold of one strategy; where it differs take over what replica 0 holds, and warn.

    Every replica calls it at the same place of its program, between steps, when a generation of the group is new. What
    some replicas have and others have not, or otherwise, is left to the first pass that reaches it, which reports it.

    Args:
        group: The replicas.
        groups: The strategy's parameters.
        buffers: Those of its models.
        steps_told: Whether the user knows how many steps this replica made. If that is so of all replicas, those that
            made different ones are known, and there is no second warning.
    """
    optimizers = _optimizers_of(groups) if groups else {}
    held = _held(groups, optimizers, buffers) | {("steps_told", None): steps_told}
    told: list[dict[Any, Any]] = group.all_gather_object(held)
    unlike = {what for what, first in told[0].items() if any(other.get(what) != first for other in told)}
    own = {each.identity: each for each in groups}
    changed = []
    for identity in [what[1] for what in told[0] if what[0] == "layout" and what not in unlike]:
        parameters = own[identity]
        if what := _take_over(group, parameters, ("values", identity) in unlike, ("gradients", identity) in unlike):
            changed.append(f"{parameters.description}'s {' and '.join(what)}")
    for key in [key for key in told[0] if isinstance(key, _Optimizer) and key in unlike]:
        optimizer = optimizers.get(key)
        state = broadcast_tree(group, optimizer.state_dict() if optimizer is not None else None, 0)
        if group.rank != 0 and optimizer is not None:
            optimizer.load_state_dict(state)
        changed.append(f"{key.name}'s state")
    half_way = bool(changed)
    for model in [what[1] for what in told[0] if what[0] == "buffers" and what not in unlike]:
        name, tensors = buffers[model]
        if tensors and (half_way or ("counts", model) in unlike):
            make_equal(group, [(name, tensor) for tensor in tensors])
            changed.append(f"{name}'s buffers")
    known = all(other["steps_told", None] for other in told) and any(what[0] == "writes" for what in unlike)
    if changed and not known:
        callsite.current().warn(
            "The replicas had drifted apart, since a program ended half-way through a step. "
            f"Set to what replica 0 holds: {', '.join(changed)}."
        )


def _take_over(group: Group, parameters: ParameterGroup, values: bool, gradients: bool) -> list[str]:
    """Make a parameter group's values and gradients equal that are not. Returns which these are, in words."""
    what = []
    living = parameters.living()
    if values:
        make_equal(group, [(parameters.description, parameter) for _, parameter in living])
        what.append("parameters")
    if gradients:
        for _, parameter in living:
            parameter.grad = None
        parameters.local.clear()
        what.append("gradients (to None)")
    for place, parameter in living:
        # Equal on all replicas, they are aggregated ones; a replica that was replaced has copies of them.
        if parameter.grad is not None and place not in parameters.local:
            AGGREGATED.add(parameter.grad)
    return what


def _held(
    groups: Sequence[ParameterGroup],
    optimizers: dict[_Optimizer, torch.optim.Optimizer],
    buffers: Buffers,
) -> dict[Any, Any]:
    """Return digests of this replica's values."""
    held: dict[Any, Any] = {}
    for group in groups:
        living = [parameter for _, parameter in group.living()]
        held["layout", group.identity] = _layout(living)
        held["writes", group.identity] = writes(group)
        held["values", group.identity] = list(map(digest, living))
        held["gradients", group.identity] = [None if p.grad is None else digest(p.grad) for p in living]
    for key, optimizer in optimizers.items():
        # Each replica may have come to the parameters in its own order.
        held[key] = digest_of_text(repr(sorted(contents(optimizer).items())))
    for model, (_, tensors) in buffers.items():
        counts = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
        held["buffers", model] = _layout(tensors)
        held["counts", model] = list(map(digest, counts))
    return held


def _layout(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in tensors)


def _optimizers_of(groups: Sequence[ParameterGroup]) -> dict[_Optimizer, torch.optim.Optimizer]:
    known = set(groups)
    found: dict[_Optimizer, torch.optim.Optimizer] = {}
    # Optimizers are known to nobody but their users; this runs once per generation.
    # (Their types are asked, since isinstance would look behind weak proxies, which may be dead.)
    for optimizer in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]:
        mirrors = [find_mirror(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        places = tuple((m.group.identity, m.place) for m in mirrors if m is not None and m.group in known)
        if places and len(places) == len(mirrors):
            found.setdefault(_Optimizer(type(optimizer).__name__, places), optimizer)
    return found
