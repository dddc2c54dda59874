"""Values of which each replica holds a part, when replicas leave: counts of metrics, and components of variables.

Reading the value combines the parts of all replicas, so the parts of leaving replicas must not be lost:

- Counts of a metric go to the first replica that stays, which keeps them next to its own (`inherited_counts`).
- The components of a sum are added to that replica's component.
- Each component of a mean becomes the mean. A new replica then gets a copy, which does not change the mean either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from distnb.options import VariableAggregation
from distnb.runtime.scopes import inherited_counts, metric_binding
from distnb.variables.variable import SyncOnReadVariable, component_of

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["forget_part", "hand_over", "is_part"]


def is_part(value: Any) -> bool:
    """Return whether a value is this replica's part: a metric with counts of its own, or a sync-on-read variable."""
    if isinstance(value, SyncOnReadVariable):
        return True
    is_module = isinstance(value, torch.nn.Module)
    return is_module and getattr(value, "distributed_available_fn", None) is metric_binding.aggregates_here


def hand_over(group: Group, parts: Mapping[str, Any], leaving: Collection[int]) -> Callable[[], None]:
    """Gather the parts of leaving replicas, and return a function that adds them to this replica's parts.

    All replicas call this function. Only replicas that stay call its result.

    Args:
        group: The replicas.
        parts: This replica's parts, by a name that is the same on all replicas. Parts that only some replicas have are
            values of their own, and are not handed over.
        leaving: The replicas that leave, which may be none.
    """
    own = {name: _content(part, group.rank in leaving) for name, part in parts.items()}
    gathered: list[dict[str, Any]] = group.all_gather_object(own)
    heir = min(rank for rank in range(group.size) if rank not in leaving)
    steps: list[Callable[[], None]] = []
    for name, part in parts.items():
        found: list[Any] = [theirs.get(name) for theirs in gathered]
        left = [found[rank] for rank in leaving if found[rank] is not None]
        if not isinstance(part, SyncOnReadVariable):
            if group.rank == heir:
                steps.append(partial(inherited_counts.inherit, part, [count for counts in left for count in counts]))
        elif part.aggregation is VariableAggregation.MEAN and all(each is not None for each in found):
            steps.append(partial(_set, part, torch.stack(found).mean(0)))
        elif part.aggregation is VariableAggregation.SUM and left and group.rank == heir:
            steps.append(partial(_set, part, component_of(part).detach().cpu() + sum(left)))

    def inherit() -> None:
        for step in steps:
            step()

    return inherit


def _content(part: Any, leaves: bool) -> Any:
    """Return what the other replicas need of a part, or None."""
    if not isinstance(part, SyncOnReadVariable):
        return metric_binding.counts_of(part) if leaves else None
    is_needed = leaves or part.aggregation is VariableAggregation.MEAN
    return component_of(part).detach().cpu() if is_needed else None


def _set(variable: SyncOnReadVariable, value: torch.Tensor) -> None:
    with torch.no_grad():
        component_of(variable).copy_(value)


def forget_part(part: Any) -> None:
    """Empty a part that was copied from another replica, whose content would otherwise count twice."""
    if not isinstance(part, SyncOnReadVariable):
        for _, metric in metric_binding.metrics_within(part):
            metric.reset()
    elif part.aggregation is VariableAggregation.SUM:
        _set(part, torch.zeros_like(component_of(part)))
