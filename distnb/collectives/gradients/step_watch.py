"""Mirrored parameters that something else than an optimizer's step has changed: they may differ between replicas.

Tensors count the writes to them. What an optimizer's step writes is known to be equal, since its gradients are; so a
parameter with other writes is all that has to be compared, and a cell that trains as usual costs nothing at its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from distnb.collectives.gradients.bucket_agreement import checksum
from distnb.collectives.gradients.mirrored_parameters import find_mirror
from distnb.collectives.gradients.parameter_groups import ParameterGroup

__all__ = ["StepWatch", "changed_by_hand", "note_versions"]


class StepWatch:
    """Counts what optimizers write to mirrored parameters."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stepping] = weakref.WeakKeyDictionary()

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """A step begins."""
        count = sum([len(group["params"]) for group in optimizer.param_groups])
        known = self._known.get(optimizer)
        if known is None or known.count != count:
            known = self._known[optimizer] = _Stepping(optimizer, count)
        known.versions = [parameter._version for _, _, parameter in known.mirrored]

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """It ended well."""
        known = self._known.get(optimizer)
        if known is not None:
            for (seen, place, parameter), version in zip(known.mirrored, known.versions, strict=True):
                seen[place] += parameter._version - version


class _Stepping:
    def __init__(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        self.count = count
        self.versions: list[int] = []
        found = [(find_mirror(p), p) for group in optimizer.param_groups for p in group["params"]]
        self.mirrored: list[tuple[dict[int, int], int, Any]] = [
            (mirror.family.versions, mirror.place, parameter)
            for mirror, parameter in found
            if mirror is not None and mirror.place in mirror.family.versions
        ]


def note_versions(families: Iterable[ParameterGroup]) -> None:
    """The parameters that were adopted since are equal on all replicas now."""
    for family in families:
        for place, parameter in _parameters(family):
            family.versions.setdefault(place, parameter._version)


def changed_by_hand(families: Iterable[ParameterGroup]) -> dict[str, int]:
    """The parameters that something else than steps has changed since the last look, by name, with a number for each.

    Numbers are equal for equal bits.
    """
    changed = {}
    for family in families:
        for place, parameter in _parameters(family):
            version = parameter._version
            if family.versions.get(place, version) != version:
                shape = list(parameter.shape)
                changed[f"parameter {place} of {family.description} {shape}"] = checksum(parameter)
            family.versions[place] = version
    return changed


def _parameters(family: ParameterGroup) -> list[tuple[int, torch.nn.Parameter]]:
    found = [(place, reference()) for place, reference in enumerate(family.references)]
    return [(place, p) for place, p in found if p is not None and not is_lazy(p) and not p.is_inference()]
