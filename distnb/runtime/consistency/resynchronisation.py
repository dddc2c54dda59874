"""The resynchronisation of mirrored state after a program that ended in the middle of a step.

An interrupt or an error ends the replicas at the same collective, but not at the same line:

    loss.backward()       # the last collective
    optimizer.step()      # replica 0 has taken the step, replica 1 has not

The first use of a strategy in a new generation of the group therefore compares parameters, gradients and optimizer
states. Where they differ, all replicas adopt the values of replica 0.

Replicas that were added or replaced have copies of what the others hold. Gradients that did not travel with a copy are
sent now, and what a new replica has no copy of is left alone.

Floating-point buffers may legitimately differ, because forward passes update them with each replica's own examples.
They are adopted as well if there is a sign of an incomplete step: other state has differed, or a buffer that counts
(`num_batches_tracked`) differs.
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

_MISSING = "missing"

Buffers = Mapping[Any, tuple[str, Sequence[torch.Tensor]]]
"""The buffers of models: by the model's key, which is equal on all replicas, its name for users and its buffers."""


class _Optimizer(NamedTuple):
    """The identity of an optimizer, equal on all replicas.

    Attributes:
        name: The name of its class.
        places: The (identity of the group, place in the group) of each of its parameters.
    """

    name: str
    places: tuple[tuple[Identity, int], ...]


def resynchronise(
    group: Group,
    groups: Sequence[ParameterGroup],
    buffers: Buffers = MappingProxyType({}),
    *,
    steps_reported: bool = False,
) -> None:
    """Compare one strategy's state on all replicas. Where it differs, adopt replica 0's values and warn.

    All replicas must call this at the same point of their programs, between steps, in a new generation of the group.
    State that only some replicas have, or that has different shapes, is left alone. The first backward pass that
    reaches it reports the mismatch.

    Args:
        group: The replicas.
        groups: The strategy's parameters.
        buffers: The buffers of the strategy's models.
        steps_reported: Whether the user knows how many steps this replica made. If this holds on all replicas and their
            steps differ, the user knows the cause already, so there is no second warning.
    """
    optimizers = _optimizers_of(groups) if groups else {}
    held = _held(groups, optimizers, buffers) | {("steps_reported", None): steps_reported}
    held["copied", None] = any(parameters.is_copied for parameters in groups)
    gathered: list[dict[Any, Any]] = group.all_gather_object(held)
    unlike = {what for what in gathered[0] if len(_different(gathered, what)) > 1}
    own = {each.identity: each for each in groups}
    changed = []
    for identity in [what[1] for what in gathered[0] if what[0] == "layout" and what not in unlike]:
        parameters = own[identity]
        if ("gradients", identity) not in unlike:
            _complete_gradients(group, parameters, [each["gradients", identity] for each in gathered])
        if what := _make_group_equal(
            group, parameters, ("values", identity) in unlike, ("gradients", identity) in unlike
        ):
            changed.append(f"{parameters.description}'s {' and '.join(what)}")
    for key in [key for key in gathered[0] if isinstance(key, _Optimizer) and key in unlike]:
        optimizer = optimizers.get(key)
        state = broadcast_tree(group, optimizer.state_dict() if optimizer is not None else None, 0)
        if group.rank != 0 and optimizer is not None:
            optimizer.load_state_dict(state)
        changed.append(f"{key.name}'s state")
    half_way = bool(changed)
    for model in [what[1] for what in gathered[0] if what[0] == "buffers" and what not in unlike]:
        name, tensors = buffers[model]
        if tensors and (half_way or ("counts", model) in unlike):
            make_equal(group, [(name, tensor) for tensor in tensors])
            changed.append(f"{name}'s buffers")
    known = all(other["steps_reported", None] for other in gathered) and any(what[0] == "writes" for what in unlike)
    if changed and not known:
        is_new = any(other["copied", None] for other in gathered)
        cause = "replicas were added or replaced" if is_new else "a program ended"
        callsite.current().warn(
            f"The replicas had drifted apart, because {cause} in the middle of a step. "
            f"Set to the values of replica 0: {', '.join(changed)}."
        )
    for parameters in groups:
        parameters.is_copied = False


def _different(gathered: Sequence[Mapping[Any, Any]], what: Any) -> list[Any]:
    """Return the different states of the replicas, without those that have none (an optimizer) or a copy (None)."""
    found: list[Any] = []
    for theirs in gathered:
        state = theirs.get(what, None if isinstance(what, _Optimizer) else _MISSING)
        if state is not None and state not in found:
            found.append(state)
    return found


def _complete_gradients(group: Group, parameters: ParameterGroup, digests: Sequence[list[int | None] | None]) -> None:
    """Send the gradients to the replicas that have copies of the parameters without gradients."""
    source = next((rank for rank, theirs in enumerate(digests) if theirs is not None), None)
    if source is None or None not in digests or not any(digests[source] or ()):
        return
    living = [parameter for _, parameter in parameters.living()]
    gradients = broadcast_tree(group, [parameter.grad for parameter in living], source)
    if digests[group.rank] is None:
        for parameter, gradient in zip(living, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _make_group_equal(group: Group, parameters: ParameterGroup, values: bool, gradients: bool) -> list[str]:
    """Make a parameter group's values, gradients or both equal on all replicas, and return a description of these.

    Args:
        group: The replicas.
        parameters: The parameter group.
        values: Whether the values differ. They are set to replica 0's.
        gradients: Whether the gradients differ. They are set to None.
    """
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
        # Gradients that are equal on all replicas are aggregated ones. Mark them, because a replica that was replaced
        # has copies, which are not marked yet.
        if parameter.grad is not None and place not in parameters.local:
            AGGREGATED.add(parameter.grad)
    return what


def _held(
    groups: Sequence[ParameterGroup],
    optimizers: dict[_Optimizer, torch.optim.Optimizer],
    buffers: Buffers,
) -> dict[Any, Any]:
    """Return digests of this replica's state, by kind of state and group, model or optimizer."""
    held: dict[Any, Any] = {}
    for group in groups:
        living = [parameter for _, parameter in group.living()]
        held["layout", group.identity] = _layout(living)
        held["writes", group.identity] = writes(group)
        held["values", group.identity] = list(map(digest, living))
        gradients = [None if p.grad is None else digest(p.grad) for p in living]
        held["gradients", group.identity] = None if group.is_copied and not any(gradients) else gradients
    for key, optimizer in optimizers.items():
        # Sorted, because the order of the entries depends on the order in which a replica's steps reached parameters.
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
    # Optimizers are not registered anywhere, so search all objects. This happens once per generation.
    # (`isinstance` would follow weak proxies, whose objects may be gone; the type does not.)
    for optimizer in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]:
        mirrors = [find_mirror(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        places = tuple((m.group.identity, m.place) for m in mirrors if m is not None and m.group in known)
        if places and len(places) == len(mirrors):
            found.setdefault(_Optimizer(type(optimizer).__name__, places), optimizer)
    return found
