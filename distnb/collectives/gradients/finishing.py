"""The end of a backward pass, which adds its gradients to the existing ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distnb.collectives.algorithms.aggregation import Aggregation
from distnb.collectives.algorithms.sums import all_reduce, sum_sparse
from distnb.collectives.gradients.buckets import BucketPlan, GradientPlace
from distnb.collectives.gradients.parameter_groups import AGGREGATED, ParameterGroup
from distnb.compat import torch_internals
from distnb.errors import GradientError, UnsyncedGradientError
from distnb.options import ReduceOp

__all__ = ["finish", "finish_with_graph", "keep_equal", "keep_local"]


def finish(plan: BucketPlan, aggregation: Aggregation, scale: float) -> None:
    """Wait for a plan's buckets, gather the sparse gradients, and set all gradients."""
    totals: dict[GradientPlace, torch.Tensor | None] = {}
    for bucket in plan.buckets:
        views, used = bucket.finish()
        if used is None and bucket.is_plain():
            for (group, place), view in zip(bucket.members, views, strict=True):
                group.params[place].grad = view
        else:
            present = [view if used is None or used[index] else None for index, view in enumerate(views)]
            totals.update(zip(bucket.members, present, strict=True))
    if plan.sparse:
        with torch.no_grad():
            for (group, place), gradient in _contributions(plan.sparse, aggregation, scale).items():
                if gradient is None:
                    totals[group, place] = None
                else:
                    local = gradient if gradient.is_sparse else gradient.to_sparse(1)
                    totals[group, place] = sum_sparse(aggregation.group, local)
    _set(plan, totals)


def finish_with_graph(plan: BucketPlan, aggregation: Aggregation, scale: float) -> None:
    """Sum a plan's gradients differentiably, and set them."""
    members = [member for bucket in plan.buckets for member in bucket.members] + plan.sparse
    totals = _contributions(members, aggregation, scale)
    dense = {member: gradient.to_dense() for member, gradient in totals.items() if gradient is not None}
    sums = all_reduce(aggregation, ReduceOp.SUM, list(dense.values()))
    totals.update(zip(dense, sums, strict=True))
    _set(plan, totals)


def _contributions(
    members: Sequence[GradientPlace], aggregation: Aggregation, scale: float
) -> dict[GradientPlace, torch.Tensor | None]:
    """Return this replica's part of each gradient: zeros if only other replicas have one, None if no replica has."""
    members = [(group, place) for group, place in members if place in group.slots]  # not those that are gone since
    if not members:
        return {}
    own = [group.contribution(place, group.params[place].grad, scale) for group, place in members]
    slots = [group.slots[place] for group, place in members]
    used = torch.tensor([gradient is not None for gradient in own], dtype=torch.int64, device=slots[0].device)
    aggregation.group.all_reduce(used)
    found: dict[GradientPlace, torch.Tensor | None] = {}
    for member, slot, gradient, count in zip(members, slots, own, used.tolist(), strict=True):
        if count and gradient is None:
            if slot.sparse:
                rows = torch.zeros((1, 0), dtype=torch.int64, device=slot.device)
                values = torch.zeros((0, *slot.shape[1:]), dtype=slot.dtype, device=slot.device)
                gradient = torch_internals.sparse_tensor(rows, values, slot.shape)
            else:
                gradient = torch.zeros(slot.shape, dtype=slot.dtype, device=slot.device)
        found[member] = gradient
    return found


def _set(plan: BucketPlan, totals: dict[GradientPlace, torch.Tensor | None]) -> None:
    """Set gradients to the sum of those aggregated before the pass and the new ones. None means that no replica had
    one."""
    add_to, added = [], []
    for (group, place), total in totals.items():
        before = None if place in group.local else group.aside.get(place)  # the total contains the local gradient
        group.local.discard(place)
        parameter = group.params[place]
        if total is None:
            continue
        if before is None:
            parameter.grad = total
        else:
            _require_aggregated(group, place, before)
            if total.requires_grad or before.requires_grad or before.is_sparse or total.is_sparse:
                parameter.grad = _sum(before, total)
            else:
                parameter.grad = before
                add_to.append(before)
                added.append(total)
        if parameter.grad is not None:  # the parameter may be gone
            AGGREGATED.add(parameter.grad)
    if add_to:
        with torch.no_grad():
            torch_internals.add_each(add_to, added)
    plan.reset()


def _require_aggregated(group: ParameterGroup, place: int, before: torch.Tensor) -> None:
    # A gradient of an aggregation that no step has used yet may be derived from it (clipped, scaled).
    if before not in AGGREGATED and group.serial <= AGGREGATED.stepped and _has_values(before):
        raise UnsyncedGradientError(
            f"A backward pass reached parameter {place} of {group.description}, whose gradient was made by hand "
            "(torch.autograd.grad, or assigned) and never aggregated over the replicas. The sum of both would be "
            "neither this replica's gradient nor the aggregated one. Call optimizer.zero_grad() before the pass, or "
            "aggregate the gradient first: `p.grad = distnb.get_replica_context().all_reduce('sum', gradient)`."
        )


def keep_local(groups: Sequence[ParameterGroup], scale: float) -> None:
    """Add the new gradients to the old ones under no_sync, and mark them as this replica's own."""
    for group in groups:
        for place, gradient in enumerate(group.fresh()):
            if gradient is None:
                continue
            before = group.aside.get(place)
            if before is not None and place not in group.local and _has_values(before):
                raise GradientError(
                    f"A backward pass under no_sync() reached parameter {place} of {group.description}, which has a "
                    "gradient of all replicas already; this replica's own cannot be added to it, since the sum would "
                    "count the first once for each replica. Call optimizer.zero_grad() before the first pass under "
                    "no_sync(), and run only the last pass before a step outside."
                )
            if scale != 1.0:
                gradient = gradient * scale if scale else torch.zeros_like(gradient)
            group.params[place].grad = gradient if before is None else _sum(before, gradient)
            group.local.add(place)


def keep_equal(groups: Sequence[ParameterGroup]) -> None:
    """Add new gradients to the old ones outside `strategy.run`, where they are equal on all replicas and count as
    aggregated."""
    for group in groups:
        for place, gradient in enumerate(group.fresh()):
            if gradient is not None:
                before = group.aside.get(place)
                group.params[place].grad = gradient = gradient if before is None else _sum(before, gradient)
                AGGREGATED.add(gradient)


def _has_values(gradient: torch.Tensor) -> bool:
    return bool((gradient.detach().to_dense() != 0).any())


def _sum(before: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(gradient.requires_grad):
        return gradient + before if before.is_sparse and not gradient.is_sparse else before + gradient
