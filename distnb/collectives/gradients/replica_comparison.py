"""The comparison of the replicas' backward passes: the groups that they reach, and the gradients outside `run`.

A pass is identified by the parameter groups that each replica reached, and by the models whose statistics its forward
passes changed. The first pass of each kind compares these, and the groups' layouts, across the replicas; later passes
need no comparison. A group that only some replicas reached joins the pass of all, with zeros on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from distnb.accelerators import torch_device
from distnb.collectives.algorithms.flat_packs import Slot
from distnb.collectives.digests import digest
from distnb.collectives.gradients.parameter_groups import Identity, ParameterGroup
from distnb.errors import GradientError, UnsyncedGradientError

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["agree", "check_equal", "find_unlike"]


class _Layout(NamedTuple):
    """The layout of one gradient, comparable across replicas."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: str

    def slot(self, device: torch.device, *, sparse: bool) -> Slot:
        """Return the slot of this gradient on a replica with this device."""
        return Slot(
            self.shape, self.dtype, torch.device("cpu") if self.device == "cpu" else device, self.stride, sparse
        )


_TOLERANCE = 1e-5  # relative to a gradient's norm: the last bits of a sum differ between processors


@dataclass(frozen=True)
class _Proposal:
    """A replica's report to the others of a pass that began at `place` and reached the groups `touched` there."""

    place: str
    touched: tuple[Identity, ...]
    changed: tuple[Identity, ...]
    """The models whose statistics have changed."""
    layouts: dict[Identity, dict[int, _Layout]]
    """The gradients that take part, by group and place."""
    frozen: dict[Identity, set[int]]
    """Places whose parameters exist and take no part."""
    sparse: dict[Identity, set[int]]
    """Places whose gradients are sparse."""
    values: dict[Identity, dict[int, int]]
    """Digests of the parameters of groups that were never compared."""


def agree(
    replicas: Group,
    groups: Sequence[ParameterGroup],
    touched: Sequence[ParameterGroup],
    changed: tuple[Identity, ...],
    place: str,
) -> tuple[list[ParameterGroup], list[Identity]]:
    """Return the groups, with layouts, that a pass reduces, and the models whose statistics it averages.

    Both are in the same order on all replicas.

    Args:
        replicas: The replicas.
        groups: The strategy's groups.
        touched: The groups that the pass reached on this replica.
        changed: The models whose statistics have changed on this replica.
        place: The line of the pass, for errors.

    Raises:
        GradientError: The replicas' models differ.
    """
    laid_out = {group.identity: group.lay_out() for group in groups}
    mine = _Proposal(
        place=place,
        touched=tuple(group.identity for group in touched),
        changed=changed,
        layouts={
            identity: {place: _layout(slot) for place, slot in slots.items()} for identity, slots in laid_out.items()
        },
        frozen={
            group.identity: {place for place, _ in group.living() if place not in laid_out[group.identity]}
            for group in groups
        },
        sparse={
            identity: {place for place, slot in slots.items() if slot.sparse} for identity, slots in laid_out.items()
        },
        values={
            group.identity: {place: digest(group.params[place]) for place in laid_out[group.identity]}
            for group in touched
            if not group.checked
        },
    )
    proposals = cast("list[_Proposal]", replicas.all_gather_object(mine))
    reached = sorted({identity for proposal in proposals for identity in proposal.touched})
    own = {group.identity: group for group in groups}
    found = [_agreed(replicas, own.get(identity), proposals, identity) for identity in reached]
    return found, sorted({identity for proposal in proposals for identity in proposal.changed})


def _agreed(
    replicas: Group, group: ParameterGroup | None, proposals: Sequence[_Proposal], identity: Identity
) -> ParameterGroup:
    """Return one group, after the comparison of its layouts and values on all replicas.

    A parameter takes part if it exists on any replica. It may be gone on others, whose garbage collectors have run, or
    which got copies of the model after a layer was replaced.
    """
    where = _where(proposals)
    missing = [rank for rank, proposal in enumerate(proposals) if identity not in proposal.layouts]
    if missing or group is None:
        raise GradientError(
            f"A backward pass reached {group.description if group else 'a model'} on some replicas only, and "
            f"replica {', '.join(map(str, missing))} never made it. {where} Make every model on all replicas, in a "
            "scope that all of them enter."
        )
    layouts = _common_layouts(group, proposals)
    gathered = {
        rank: proposal.values[identity] for rank, proposal in enumerate(proposals) if identity in proposal.values
    }
    reference = min(gathered, default=0)
    for rank, values in gathered.items():
        differing = [place for place, value in values.items() if value != gathered[reference].get(place, value)]
        if differing:
            raise GradientError(
                f"Parameter {differing[0]} of {group.description} has other values on replica {rank} than on replica "
                f"{reference}, so training would drift apart. {where} It was changed on some replicas only. Load the "
                "same state on every replica (model.load_state_dict in a distributed cell), or make the model again in "
                "the scope."
            )
    sparse = set().union(*(proposal.sparse[identity] for proposal in proposals))
    there = torch_device(replicas.device)
    group.agree({place: layout.slot(there, sparse=place in sparse) for place, layout in sorted(layouts.items())})
    return group


def _common_layouts(group: ParameterGroup, proposals: Sequence[_Proposal]) -> dict[int, _Layout]:
    """Return the layouts of the gradients that take part on any replica, by place. Raise if any two differ."""
    found: dict[int, tuple[int, _Layout | None]] = {}  # the first replica with this parameter, and the layout there
    identity = group.identity
    for rank, proposal in enumerate(proposals):
        frozen = dict.fromkeys(proposal.frozen[identity])
        for place, layout in {**proposal.layouts[identity], **frozen}.items():
            first, other = found.setdefault(place, (rank, layout))
            if layout != other:
                shown = " and ".join(
                    f"replica {each} has parameter {place} {_described(its)}"
                    for each, its in ((first, other), (rank, layout))
                )
                raise GradientError(
                    f"The gradients of {group.description} do not look alike on all replicas: {shown}. "
                    f"{_where(proposals)} Give the model the same shapes and dtypes, and freeze the same parameters, "
                    "on every replica."
                )
    return {place: layout for place, (_, layout) in found.items() if layout is not None}


def _layout(slot: Slot) -> _Layout:
    return _Layout(slot.shape, slot.stride, slot.dtype, slot.device.type)


def _described(layout: _Layout | None) -> str:
    if layout is None:
        return "frozen"
    strides = f" with strides {list(layout.stride)}" if layout.stride is not None else ""
    return f"as {str(layout.dtype).removeprefix('torch.')}{list(layout.shape)}{strides} on {layout.device}"


def _where(proposals: Sequence[_Proposal]) -> str:
    places = [proposal.place for proposal in proposals]
    if len(set(places)) == 1:
        return f"The pass began at {places[0]}."
    return "The pass began at " + "; ".join(f"{place} on replica {rank}" for rank, place in enumerate(places)) + "."


# -- gradients that should be equal ------------------------------------------------------------------------------------


def check_equal(replicas: Group, groups: Sequence[ParameterGroup], place: str) -> None:
    """Raise if the replicas, which compute the same outside `strategy.run`, have new gradients that differ."""
    unlike = find_unlike(replicas, [gradient for group in groups for gradient in group.fresh()])
    if unlike:
        raise UnsyncedGradientError(
            f"A backward pass outside strategy.run ({place}) gave replica {unlike[0]} other gradients of mirrored "
            "parameters than replica 0. There all replicas compute the same, and gradients are not added up. Put the "
            "step into a function and call strategy.run(step, args=(batch,)), which gives each replica its slice of "
            "the batch and adds up the gradients."
        )


def find_unlike(replicas: Group, gradients: Sequence[torch.Tensor | None]) -> list[int]:
    """Return the replicas whose gradients are not those of replica 0, up to rounding. All replicas must call this."""
    mine = torch.tensor([_measured(gradient) for gradient in gradients], dtype=torch.float64)
    gathered = replicas.all_gather_object(mine)
    return [rank for rank, other in enumerate(gathered) if not _close(gathered[0], other)]


def _measured(gradient: torch.Tensor | None) -> tuple[float, float]:
    """Return the norm, and the sum with weights that depend on the place, so that the same values in other rows
    differ."""
    if gradient is None:
        return -1.0, 0.0
    values = gradient.detach().to_dense().flatten().double()
    weights = torch.arange(1, values.numel() + 1, device=values.device, dtype=torch.float64).cos_()
    return float(values.norm()), float(values @ weights)


def _close(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two replicas measured nearly the same: [gradients, 2]."""
    if first.shape != other.shape:
        return False
    allowed = _TOLERANCE * (first[:, :1].abs() + other[:, :1].abs())
    # Infinities and NaNs on both replicas count as equal, too.
    return bool((((first - other).abs() <= allowed) | (first == other) | (first.isnan() & other.isnan())).all())
