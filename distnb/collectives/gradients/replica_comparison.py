"""The comparison of the replicas' backward passes: the groups that they reach, and the gradients outside `run`.

A pass is identified by the set of parameter groups that it reached. The first pass of each kind compares that set and
the groups' layouts across the replicas; later passes need no comparison. A group that only some replicas reached joins
the pass of all, with zeros on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from distnb.collectives.gradients.parameter_groups import Identity, ParameterGroup
from distnb.errors import GradientError, UnsyncedGradientError

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["agree", "check_equal"]

# (place, shape, stride, dtype, type of device)
Layout = tuple[tuple[int, tuple[int, ...], tuple[int, ...] | None, str, str], ...]

_TOLERANCE = 1e-5  # relative to a gradient's norm: the last bits of a sum differ between processors


@dataclass(frozen=True)
class _Proposal:
    """A replica's report to the others of a pass that began at `place` and reached the groups `touched` there."""

    place: str
    touched: tuple[Identity, ...]
    layouts: dict[Identity, Layout]
    sparse: dict[Identity, set[int]]
    """Places whose gradients are sparse."""
    values: dict[Identity, dict[int, int]]
    """Digests of the parameters of groups that were never compared."""


def agree(
    replicas: Group, groups: Sequence[ParameterGroup], touched: Sequence[ParameterGroup], place: str
) -> tuple[list[ParameterGroup], bool]:
    """Return the groups, with layouts, that a pass reduces if it reached the groups `touched` on this replica.

    Returns:
        The groups, in the same order on all replicas; and whether the pass reached all of them on every replica.

    Raises:
        GradientError: The replicas' models differ.
    """
    mine = _Proposal(
        place=place,
        touched=tuple(group.identity for group in touched),
        layouts={group.identity: _layout(group) for group in groups},
        sparse={group.identity: {place for place, slot in group.slots.items() if slot.sparse} for group in groups},
        values={group.identity: group.values() for group in touched if not group.checked},
    )
    proposals = cast("list[_Proposal]", replicas.all_gather_object(mine))
    reached = sorted({identity for proposal in proposals for identity in proposal.touched})
    own = {group.identity: group for group in groups}
    found = [_agreed(own.get(identity), proposals, identity) for identity in reached]
    alike = all(len(proposal.touched) == len(found) for proposal in proposals)
    return found, alike


def _agreed(group: ParameterGroup | None, proposals: Sequence[_Proposal], identity: Identity) -> ParameterGroup:
    """Return one group, after the comparison of its layouts and values on all replicas."""
    where = _where(proposals)
    layouts = [proposal.layouts.get(identity) for proposal in proposals]
    missing = [rank for rank, layout in enumerate(layouts) if layout is None]
    if missing or group is None:
        raise GradientError(
            f"A backward pass reached {group.description if group else 'a model'} on some replicas only, and "
            f"replica {', '.join(map(str, missing))} never made it. {where} Make every model on all replicas, in a "
            "scope that all of them enter."
        )
    first = cast("Layout", layouts[0])
    for rank, layout in enumerate(layouts):
        if layout != first:
            raise GradientError(
                f"The gradients of {group.description} do not look alike on all replicas: "
                f"{_difference(first, cast('Layout', layout), rank)}. {where} Give the model the same shapes and "
                "dtypes, and freeze the same parameters, on every replica."
            )
    gathered = {
        rank: proposal.values[identity] for rank, proposal in enumerate(proposals) if identity in proposal.values
    }
    reference = min(gathered, default=0)
    for rank, values in gathered.items():
        unlike = [place for place, value in values.items() if value != gathered[reference].get(place, value)]
        if unlike:
            raise GradientError(
                f"Parameter {unlike[0]} of {group.description} has other values on replica {rank} than on replica "
                f"{reference}, so training would drift apart. {where} It was changed on some replicas only. Load the "
                "same state on every replica (model.load_state_dict in a distributed cell), or make the model again in "
                "the scope."
            )
    sparse = set().union(*(proposal.sparse[identity] for proposal in proposals))
    group.slots = {place: replace(slot, sparse=place in sparse) for place, slot in group.slots.items()}
    group.checked = True
    return group


def _layout(group: ParameterGroup) -> Layout:
    return tuple(
        (place, slot.shape, slot.stride, str(slot.dtype), slot.device.type) for place, slot in group.slots.items()
    )


def _difference(first: Layout, other: Layout, rank: int) -> str:
    def described(entry: tuple[int, tuple[int, ...], tuple[int, ...] | None, str, str]) -> str:
        place, shape, stride, dtype, device = entry
        strides = f" with strides {list(stride)}" if stride is not None else ""
        return f"has parameter {place} as {dtype.removeprefix('torch.')}{list(shape)}{strides} on {device}"

    for ours, theirs in zip(first, other, strict=False):
        if ours != theirs:
            return f"replica 0 {described(ours)}, replica {rank} {described(theirs)}"
    return f"replica 0 has {len(first)} trainable parameters, replica {rank} has {len(other)}"


def _where(proposals: Sequence[_Proposal]) -> str:
    places = [proposal.place for proposal in proposals]
    if len(set(places)) == 1:
        return f"The pass began at {places[0]}."
    return "The pass began at " + "; ".join(f"{place} on replica {rank}" for rank, place in enumerate(places)) + "."


# -- outside strategy.run ----------------------------------------------------------------------------------------------


def check_equal(replicas: Group, groups: Sequence[ParameterGroup], place: str) -> None:
    """Raise if the replicas, which compute the same outside `strategy.run`, have new gradients that differ."""
    mine = torch.tensor([_measured(gradient) for group in groups for gradient in group.fresh()], dtype=torch.float64)
    gathered = replicas.all_gather_object(mine)
    unlike = [rank for rank, other in enumerate(gathered) if not _close(gathered[0], other)]
    if unlike:
        raise UnsyncedGradientError(
            f"A backward pass outside strategy.run ({place}) gave replica {unlike[0]} other gradients of mirrored "
            "parameters than replica 0. There all replicas compute the same, and gradients are not added up. Put the "
            "step into a function and call strategy.run(step, args=(batch,)), which gives each replica its slice of "
            "the batch and adds up the gradients."
        )


def _measured(gradient: torch.Tensor | None) -> tuple[float, float]:
    """Return the sum and the norm."""
    if gradient is None:
        return 0.0, -1.0
    values = gradient.detach().to_dense().double()
    return float(values.sum()), float(values.norm())


def _close(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two replicas measured nearly the same: [gradients, 2]."""
    if first.shape != other.shape:
        return False
    allowed = _TOLERANCE * (first[:, 1:].abs() + other[:, 1:].abs())
    # Infinities and NaNs on both replicas count as equal, too.
    return bool((((first - other).abs() <= allowed) | (first == other) | (first.isnan() & other.isnan())).all())
