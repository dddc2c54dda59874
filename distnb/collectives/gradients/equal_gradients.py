"""Backward passes outside `strategy.run`: all replicas compute the same there, so nothing is added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distnb.collectives.gradients.aggregated import aggregated
from distnb.collectives.gradients.buckets import ReducingGroup
from distnb.collectives.gradients.parameter_groups import ParameterGroup
from distnb.errors import UnsyncedGradientError

__all__ = ["check_equal", "keep_equal"]

_TOLERANCE = 1e-5  # of a gradient's norm: the same sums on other processors differ in their last bits


def check_equal(group: ReducingGroup, families: Sequence[ParameterGroup], where: str) -> None:
    """Compare the new gradients of all replicas, by their sums and norms. All replicas call it.

    Args:
        group: The replicas.
        families: Those that the pass has reached.
        where: The line that called it.

    Raises:
        UnsyncedGradientError: They differ.
    """
    mine = {family.number: [_measured(gradient) for gradient in family.fresh()] for family in families}
    told: list[Any] = group.all_gather_object(mine)
    unlike = [replica for replica, other in enumerate(told) if not _alike(told[0], other)]
    if unlike:
        raise UnsyncedGradientError(
            f"A backward pass outside strategy.run ({where}) gave replica {unlike[0]} other gradients of mirrored "
            "parameters than replica 0. There all replicas compute the same, and gradients are not added up. Put the "
            "step into a function and call strategy.run(step, args=(batch,)), which gives each replica its slice of "
            "the batch and adds up the gradients."
        )


def _measured(gradient: torch.Tensor | None) -> tuple[float, float] | None:
    if gradient is None:
        return None
    values = gradient.detach().to_dense().double()
    return float(values.sum()), float(values.norm())


def _alike(first: dict[int, Any], other: dict[int, Any]) -> bool:
    if first.keys() != other.keys():
        return False
    pairs = [pair for number in first for pair in zip(first[number], other[number], strict=False)]
    return all(len(first[number]) == len(other[number]) for number in first) and all(_close(*pair) for pair in pairs)


def _close(first: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    if first is None or other is None:
        return first is other
    allowed = _TOLERANCE * (abs(first[1]) + abs(other[1]))
    # What is no number on all replicas is equal, too.
    return repr(first) == repr(other) or all(abs(a - b) <= allowed for a, b in zip(first, other, strict=True))


def keep_equal(families: Sequence[ParameterGroup]) -> None:
    """Add the new gradients to the old ones; they count as aggregated."""
    aggregated.serial += 1
    for family in families:
        family.serial = aggregated.serial
        family.unused = frozenset()
        for place, parameter in enumerate(family.params):
            before, gradient = family.aside.get(place), parameter.grad
            if gradient is None:
                if before is not None:
                    parameter.grad = before
                continue
            if before is not None:
                with torch.no_grad():
                    gradient = before + gradient
                parameter.grad = gradient
            aggregated.add(gradient)
        family.release()
