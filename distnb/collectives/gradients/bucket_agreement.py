"""The replicas agree once on what a kind of backward pass reduces; afterwards no word about it is needed.

A pass is known by the set of families that it reached. The first pass of each kind compares that set and the
families' layouts across the replicas. A family that only some replicas reached joins the pass of all, where
it counts as zero on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from distnb.collectives.gradients.buckets import ReducingGroup
from distnb.collectives.gradients.flat_packing import Slot
from distnb.collectives.gradients.parameter_groups import ParameterGroup
from distnb.errors import GradientError

__all__ = ["agree", "checksum"]

Identity = tuple[int, int]
# (place, shape, stride, dtype, type of device)
Signature = tuple[tuple[int, tuple[int, ...], tuple[int, ...], str, str], ...]


@dataclass(frozen=True)
class _Proposal:
    """What one replica tells the others.

    Attributes:
        place: The line of the backward pass.
        touched: The families that the pass reached here.
        layouts: How every family's gradients look here.
        sparse: Places whose gradients are sparse here.
        values: Exact checksums of the parameters of families that were never compared.
    """

    place: str
    touched: tuple[Identity, ...]
    layouts: dict[Identity, Signature]
    sparse: dict[Identity, frozenset[int]]
    values: dict[Identity, tuple[int, ...]]


def agree(
    group: ReducingGroup, families: Sequence[ParameterGroup], touched: Sequence[ParameterGroup], place: str
) -> tuple[tuple[ParameterGroup, ...], bool]:
    """Find the families that this kind of pass reduces, the same on every replica.

    Args:
        group: The replicas.
        families: All families of this replica, laid out.
        touched: Those that the pass reached here.
        place: The user's line, for errors.

    Returns:
        The families in the order of their making, their `sparse` places being those of all replicas; and whether
        the pass reached all of them on every replica.

    Raises:
        GradientError: The replicas' models differ.
    """
    mine = _Proposal(
        place,
        tuple(family.identity for family in touched),
        {family.identity: _signature(family) for family in families},
        {family.identity: frozenset(family.sparse) for family in families},
        {family.identity: _checksums(family) for family in touched if not family.checked},
    )
    proposals = cast("list[_Proposal]", group.all_gather_object(mine))
    by_identity = {family.identity: family for family in families}
    reached = sorted({identity for proposal in proposals for identity in proposal.touched})
    if all(proposal.touched == mine.touched for proposal in proposals):
        aliases = [{identity: identity for identity in reached} for _ in proposals]
    elif _same_in_order(proposals):
        # The numbering differs (a replica was replaced, or failed while it made a model), the models do not.
        reached = list(mine.touched)
        aliases = [dict(zip(mine.touched, proposal.touched, strict=True)) for proposal in proposals]
    else:
        aliases = [{identity: identity for identity in reached} for _ in proposals]
    for identity in reached:
        theirs = [alias[identity] for alias in aliases]
        _compare(proposals, theirs, by_identity.get(identity))
        family = by_identity[identity]
        family.number = theirs[0][1]
        family.sparse = set().union(*(p.sparse[name] for p, name in zip(proposals, theirs, strict=True)))
        family.slots = [
            Slot(slot.shape, slot.stride, slot.dtype, slot.device, place in family.sparse)
            for place, slot in zip(family.active, family.slots, strict=True)
        ]
        family.checked = True
    found = tuple(family for family in families if family.identity in reached)
    alike = all(
        tuple(alias[identity] for identity in reached) == proposal.touched
        for alias, proposal in zip(aliases, proposals, strict=True)
    )
    return found, alike


def _same_in_order(proposals: Sequence[_Proposal]) -> bool:
    layouts = [[proposal.layouts[identity] for identity in proposal.touched] for proposal in proposals]
    return all(layout == layouts[0] for layout in layouts)


def _signature(family: ParameterGroup) -> Signature:
    return tuple(
        (place, slot.shape, slot.stride, str(slot.dtype), slot.device.type)
        for place, slot in zip(family.active, family.slots, strict=True)
    )


def _checksums(family: ParameterGroup) -> tuple[int, ...]:
    """One exact, order-independent number per parameter: replicas that hold the same bits get the same."""
    return tuple(checksum(family.params[place]) for place in family.active)


def checksum(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bytes, taken as whole numbers: the same on every device for the same bits."""
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel() == 0:
            return 0
        if flat.dtype is torch.bool:
            return int(flat.sum())
        size = flat.dtype.itemsize if not flat.dtype.is_complex else flat.dtype.itemsize // 2
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        return int(flat.view(whole).sum(dtype=torch.int64))


def _compare(proposals: Sequence[_Proposal], names: Sequence[Identity], family: ParameterGroup | None) -> None:
    label = family.description if family is not None else "a model"
    layouts = [proposal.layouts.get(name) for proposal, name in zip(proposals, names, strict=True)]
    missing = [rank for rank, layout in enumerate(layouts) if layout is None]
    if missing or family is None:
        raise GradientError(
            f"A backward pass reached {label} on some replicas only, and {_replicas(missing)} never made it. "
            f"{_where(proposals)} Make every model on all replicas, in a scope that all of them enter."
        )
    first = cast("Signature", layouts[0])
    for rank, layout in enumerate(layouts):
        if layout != first:
            unlike = _difference(first, cast("Signature", layout), rank)
            raise GradientError(
                f"The gradients of {label} do not look alike on all replicas: {unlike}. {_where(proposals)} Give the "
                "model the same shapes and dtypes, and freeze the same parameters, on every replica."
            )
    _compare_values(proposals, names, label)


def _compare_values(proposals: Sequence[_Proposal], names: Sequence[Identity], label: str) -> None:
    sums = [proposal.values.get(name) for proposal, name in zip(proposals, names, strict=True)]
    known = [(rank, values) for rank, values in enumerate(sums) if values is not None]
    for rank, values in known[1:]:
        if values != known[0][1]:
            index = next(i for i, pair in enumerate(zip(known[0][1], values, strict=True)) if pair[0] != pair[1])
            raise GradientError(
                f"Parameter {index} of {label} has other values on replica {rank} than on replica {known[0][0]}, so "
                f"training would drift apart. {_where(proposals)} It was changed on some replicas only. Load the same "
                "state on every replica (model.load_state_dict in a distributed cell), or make the model anew in the "
                "scope."
            )


def _difference(first: Signature, other: Signature, rank: int) -> str:
    for ours, theirs in zip(first, other, strict=False):
        if ours != theirs:
            return (
                f"replica 0 has parameter {ours[0]} as {_describe(ours)}, "
                f"replica {rank} has parameter {theirs[0]} as {_describe(theirs)}"
            )
    return f"replica 0 has {len(first)} trainable parameters, replica {rank} has {len(other)}"


def _describe(entry: tuple[int, tuple[int, ...], tuple[int, ...], str, str]) -> str:
    _, shape, stride, dtype, device = entry
    return f"{dtype.removeprefix('torch.')}{list(shape)} with strides {list(stride)} on {device}"


def _replicas(ranks: Sequence[int]) -> str:
    word = "replica" if len(ranks) == 1 else "replicas"
    return f"{word} {', '.join(map(str, ranks))}"


def _where(proposals: Sequence[_Proposal]) -> str:
    places = [proposal.place for proposal in proposals]
    if len(set(places)) == 1:
        return f"The pass began at {places[0]}."
    return "The pass began at " + "; ".join(f"{place} on replica {rank}" for rank, place in enumerate(places)) + "."
