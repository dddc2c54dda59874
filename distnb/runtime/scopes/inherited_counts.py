"""The counts of metrics that replicas have left behind when their engines were removed.

One of the remaining replicas, the heir, keeps them as they are, next to its own. Reading the metric combines all of
them as if each still came from a replica of its own. This works for every metric, including those whose combined states
cannot be updated further, such as PearsonCorrCoef.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["MetricCounts", "drop", "inherit", "inherited", "is_any_here", "note_copy"]

_ATTRIBUTE = "_distnb_inherited"
_heirs = WeakIdKeyDictionary()


class MetricCounts(NamedTuple):
    """The counts of one replica.

    Attributes:
        updates: The number of updates.
        states: The metric's states by name, on the host.
        attributes: The attributes other than states, which `update` may have set.
    """

    updates: int
    states: Mapping[str, Any]
    attributes: Mapping[str, Any]


def inherited(metric: Any) -> list[MetricCounts]:
    """Return the counts that a metric has inherited."""
    found: list[MetricCounts] = vars(metric).get(_ATTRIBUTE, [])
    return found


def inherit(metric: Any, counts: Sequence[MetricCounts]) -> None:
    """Add counts to those that a metric has inherited, and set the attributes that the metric lacks."""
    if not counts:
        return
    vars(metric)[_ATTRIBUTE] = [*inherited(metric), *counts]
    _heirs[metric] = True
    for each in counts:
        for name, value in each.attributes.items():
            if getattr(metric, name, None) is None:
                setattr(metric, name, value.to(metric.device) if isinstance(value, torch.Tensor) else value)


def note_copy(metric: Any) -> None:
    """Note a copy of a metric, which has inherited the same counts."""
    if _ATTRIBUTE in vars(metric):
        _heirs[metric] = True


def drop(metric: Any) -> None:
    """Drop the counts that a metric has inherited."""
    if vars(metric).pop(_ATTRIBUTE, None) is not None:
        _heirs.pop(metric, None)


def is_any_here() -> bool:
    """Return whether any metric of this process has inherited counts."""
    return bool(_heirs)
