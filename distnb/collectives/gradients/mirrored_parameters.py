"""Which parameters of this process are mirrored, and by which gradient sync."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from distnb.collectives.gradients.parameter_groups import ParameterGroup

if TYPE_CHECKING:
    from distnb.collectives.gradients.gradient_sync import GradientSync

__all__ = ["Mirror", "find_mirror", "forget_mirrors", "is_mirrored", "note_mirror"]


@dataclass(frozen=True)
class Mirror:
    """A mirrored parameter's place."""

    parameter: weakref.ref[torch.nn.Parameter]
    sync: weakref.ref[GradientSync]
    family: ParameterGroup
    place: int


_mirrors: dict[int, Mirror] = {}


def note_mirror(parameter: torch.nn.Parameter, sync: GradientSync, family: ParameterGroup, place: int) -> None:
    """Remember that a parameter is mirrored, for as long as it lives."""
    identity = id(parameter)
    gone = weakref.ref(parameter, lambda _: _mirrors.pop(identity, None))
    _mirrors[identity] = Mirror(gone, weakref.ref(sync), family, place)


def find_mirror(parameter: object) -> Mirror | None:
    """The place of a parameter; None if it is not mirrored."""
    return _mirrors.get(id(parameter))


def is_mirrored(parameter: object) -> bool:
    """Whether this very parameter was made in a scope. A copy of it (an EMA's, a deepcopy) is not."""
    return id(parameter) in _mirrors


def forget_mirrors(sync: GradientSync) -> None:
    """Let go of every parameter of one sync."""
    for identity in [identity for identity, mirror in _mirrors.items() if mirror.sync() is sync]:
        _mirrors.pop(identity, None)
