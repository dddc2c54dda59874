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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from distnb.collectives.digests import digest, digest_of_text
from distnb.collectives.gradients.parameter_groups import AGGREGATED, ParameterGroup, find_mirror
from distnb.collectives.verify import callsite
from distnb.runtime.consistency.equal_values import make_equal
from distnb.runtime.consistency.sync_check import contents
from distnb.runtime.reduction.gathering import broadcast_tree

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["Buffers", "resynchronise"]

Buffers = tuple[str, Sequence[torch.Tensor]]
"""How people call a model, and its buffers."""

# (class, the (number of the parameter group, place) of each of its parameters)
_OptimizerKey = tuple[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class _State:
    """What one replica holds, by digests: per parameter group, per optimizer, and per model."""

    layouts: list[str]
    values: list[list[int]]
    gradients: list[list[int | None]]
    optimizers: dict[_OptimizerKey, int]
    buffers: list[str]
    """Their layouts."""
    counts: list[list[int]]
    """Those buffers that hold whole numbers."""


def resynchronise(group: Group, groups: Sequence[ParameterGroup], buffers: Sequence[Buffers] = ()) -> None:
    """Compare what the replicas hold of one strategy; where it differs take over what replica 0 holds, and warn.

    Every replica calls it at the same place of its program, between steps, when a generation of the group is new. The
    parameter groups and the models' buffers are in the order of making.
    """
    optimizers = _optimizers_of(groups) if groups else {}
    states = cast("list[_State]", group.all_gather_object(_state_of(groups, optimizers, buffers)))
    first = states[0]
    if any(state.layouts != first.layouts for state in states):
        return  # models that differ are found, and told of, by the first pass that reaches them
    told = []
    for number, parameters in enumerate(groups):
        # A replica that was replaced has counted anew: from now on all call a group alike.
        parameters.identity = (-1 - group.generation, number)
        equal_values = all(state.values[number] == first.values[number] for state in states)
        equal_gradients = all(state.gradients[number] == first.gradients[number] for state in states)
        if what := _take_over(group, parameters, equal_values, equal_gradients):
            told.append(f"{parameters.description}'s {' and '.join(what)}")
    for key in first.optimizers:
        if any(state.optimizers.get(key) != first.optimizers[key] for state in states):
            optimizer = optimizers.get(key)
            content = broadcast_tree(group, optimizer.state_dict() if optimizer is not None else None, 0)
            if group.rank != 0 and optimizer is not None:
                optimizer.load_state_dict(content)
            told.append(f"{key[0]}'s state")
    if all(state.buffers == first.buffers for state in states):
        half_way = bool(told)
        for number, (name, tensors) in enumerate(buffers):
            if tensors and (half_way or any(state.counts[number] != first.counts[number] for state in states)):
                make_equal(group, [(name, tensor) for tensor in tensors])
                told.append(f"{name}'s buffers")
    if told:
        callsite.current().warn(
            "The replicas had drifted apart, since a program ended half-way through a step. "
            f"Set to what replica 0 holds: {', '.join(told)}."
        )


def _take_over(group: Group, parameters: ParameterGroup, equal_values: bool, equal_gradients: bool) -> list[str]:
    """Make a parameter group equal on all replicas. Returns what was not, in words."""
    what = []
    living = [parameter for _, parameter in parameters.living()]
    if not equal_values:
        make_equal(group, [(parameters.description, parameter) for parameter in living])
        what.append("parameters")
    if not equal_gradients:
        for parameter in living:
            parameter.grad = None
        parameters.local.clear()
        what.append("gradients (to None)")
    for place, parameter in parameters.living():
        # Equal on all replicas, they are aggregated ones; a replica that was replaced has copies of them.
        if parameter.grad is not None and place not in parameters.local:
            AGGREGATED.add(parameter.grad)
    return what


def _state_of(
    groups: Sequence[ParameterGroup],
    optimizers: dict[_OptimizerKey, torch.optim.Optimizer],
    buffers: Sequence[Buffers],
) -> _State:
    living = [[parameter for _, parameter in group.living()] for group in groups]
    return _State(
        layouts=list(map(_layout, living)),
        values=[list(map(digest, parameters)) for parameters in living],
        gradients=[[None if p.grad is None else digest(p.grad) for p in parameters] for parameters in living],
        optimizers={
            # Each replica may have come to the parameters in its own order.
            key: digest_of_text(repr(sorted(contents(optimizer).items())))
            for key, optimizer in optimizers.items()
        },
        buffers=[_layout(tensors) for _, tensors in buffers],
        counts=[
            [digest(tensor) for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
            for _, tensors in buffers
        ],
    )


def _layout(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in tensors)


def _optimizers_of(groups: Sequence[ParameterGroup]) -> dict[_OptimizerKey, torch.optim.Optimizer]:
    numbers = {group: number for number, group in enumerate(groups)}
    found: dict[_OptimizerKey, torch.optim.Optimizer] = {}
    # Optimizers are known to nobody but their users; this runs once per generation.
    # (Their types are asked, since isinstance would look behind weak proxies, which may be dead.)
    for optimizer in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]:
        mirrors = [find_mirror(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        places = tuple((numbers[m.group], m.place) for m in mirrors if m is not None and m.group in numbers)
        if places and len(places) == len(mirrors):
            found.setdefault((type(optimizer).__name__, places), optimizer)
    return found
