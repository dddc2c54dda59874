"""The end of a backward pass: aggregated gradients are put where the user looks for them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from distnb.collectives.gradients.aggregated import aggregated
from distnb.collectives.gradients.buckets import BucketPlan, ReducingGroup, Sums
from distnb.collectives.gradients.parameter_groups import LocalPart, ParameterGroup
from distnb.collectives.gradients.second_order import reduce_with_graph
from distnb.collectives.gradients.sparse_gradients import reduce_sparse
from distnb.collectives.gradients.weighting import Weighting, sum_of_weights

__all__ = ["finish", "finish_with_graph", "keep_local"]


def finish(plan: BucketPlan, group: ReducingGroup, weighting: Weighting) -> None:
    """Wait for a plan's buckets and set the gradients of its parameters."""
    for family in plan.families:
        family.unused = frozenset()
    batch = _Batch()
    for bucket in plan.buckets:
        views, used = bucket.finish(weighting.divide_by_weight)
        if used is None and bucket.plain():
            for (family, place), view in zip(bucket.members, views, strict=True):
                family.params[place].grad = view
            continue
        for position, ((family, place), view) in enumerate(zip(bucket.members, views, strict=True)):
            batch.place(family, place, view if used is None or used[position] else None)
    for index in plan.sparse:
        family, place = plan.members[index]
        gradient, scale = family.params[place].grad, weighting.scale
        if place in family.local:
            gradient, scale = family.with_local_part(place, gradient, scale, weighting.local_scale), 1.0
        total = reduce_sparse(group, plan.slots[index], gradient, scale)
        if total is not None and weighting.divide_by_weight:
            total = total / sum_of_weights(group, weighting.weight, total.device)
        batch.place(family, place, total)
    batch.finish()
    plan.reset()


def finish_with_graph(plan: BucketPlan, group: ReducingGroup, adding: Sums, weighting: Weighting) -> None:
    """Reduce a plan's gradients so that they can be differentiated again, and set them."""
    device = plan.slots[0].device
    scale, local_scale = weighting.scale, weighting.local_scale
    if weighting.divide_by_weight:
        total = sum_of_weights(group, weighting.weight, device)
        scale, local_scale = scale / total, local_scale / total
    gradients = [
        family.with_local_part(place, family.params[place].grad, scale, local_scale) for family, place in plan.members
    ]
    used = torch.tensor([0 if gradient is None else 1 for gradient in gradients], device=device)
    group.all_reduce(used)
    sums = reduce_with_graph(
        adding,
        plan.slots,
        [
            torch.zeros(slot.shape, dtype=slot.dtype, device=slot.device) if gradient is None else gradient.to_dense()
            for slot, gradient in zip(plan.slots, gradients, strict=True)
        ],
    )
    for (family, place), gradient, count in zip(plan.members, sums, used.tolist(), strict=True):
        before = family.aside.get(place)
        part = family.local.pop(place, None)
        if part is not None:
            before = part.base
        if family.is_gone(place):
            continue
        if not count:
            family.unused |= {place}
            family.params[place].grad = before
            continue
        total_gradient = gradient if before is None else before + gradient
        family.params[place].grad = total_gradient
        aggregated.add(total_gradient)
    plan.reset()


def keep_local(families: Sequence[ParameterGroup], weighting: Weighting) -> None:
    """Under no_sync: add the new gradients to the old ones on this replica, and remember that they are its own."""
    ratio = weighting.scale / weighting.local_scale if weighting.local_scale else 0.0
    for family in families:
        for place, parameter in enumerate(family.params):
            before, gradient = family.aside.get(place), parameter.grad
            if gradient is None:
                if before is not None:
                    parameter.grad = before
                continue
            if ratio != 1.0:
                gradient = gradient * ratio if ratio else torch.zeros_like(gradient)
            part = family.local.get(place)
            if before is not None:
                if part is None:
                    part = LocalPart(weakref.ref(before), before.detach().clone())
                aggregated.discard(before)
                gradient = _add(before, gradient)
            parameter.grad = gradient
            if part is None:
                part = LocalPart(weakref.ref(gradient))
            part.grad = weakref.ref(gradient)
            family.local[place] = part
    for family in families:
        # Views of one flat tensor share their version: it is read when all of them are written.
        for part in family.local.values():
            written = part.grad()
            part.version = written._version if written is not None else 0
        family.release()


class _Batch:
    """Gradients to be set, added or copied, so that the adding and copying is done in one go."""

    def __init__(self) -> None:
        self._add_to: list[torch.Tensor] = []
        self._added: list[torch.Tensor] = []
        self._copy_to: list[torch.Tensor] = []
        self._copied: list[torch.Tensor] = []

    def place(self, family: ParameterGroup, place: int, total: torch.Tensor | None) -> None:
        """Set one gradient: what was aggregated before the pass plus what is now. None: no replica had one."""
        parameter = family.params[place]
        before = family.aside.get(place)
        part = family.local.pop(place, None)
        if total is None:
            family.unused |= {place}
        if family.is_gone(place):
            return
        if total is None:
            if parameter.grad is not before:
                parameter.grad = before
        elif before is None:
            parameter.grad = total
            aggregated.add(total)
        elif part is None:
            self._add_to_aggregated(family, place, before, total)
        else:
            self._replace_local(parameter, before, part, total)

    def _add_to_aggregated(self, family: ParameterGroup, place: int, before: torch.Tensor, total: torch.Tensor) -> None:
        # Assigned by hand, the old gradient may never have been aggregated. It may also be made from one that was.
        tainted = before not in aggregated and family.serial <= aggregated.stepped and _has_values(before)
        (family.tainted.add if tainted else family.tainted.discard)(place)
        parameter = family.params[place]
        if before.is_sparse or total.is_sparse or before.requires_grad or before.dtype != total.dtype:
            with torch.no_grad():
                combined = _add(before, total)
            parameter.grad = combined
        else:
            combined = parameter.grad = before
            self._add_to.append(before)
            self._added.append(total)
        if not tainted:
            aggregated.add(combined)

    def _replace_local(
        self, parameter: torch.Tensor, before: torch.Tensor, part: LocalPart, total: torch.Tensor
    ) -> None:
        with torch.no_grad():
            combined = total if part.base is None else part.base + total
        if before.is_sparse or combined.is_sparse or before.requires_grad or before.dtype != combined.dtype:
            parameter.grad = combined
            aggregated.add(combined)
            return
        parameter.grad = before
        self._copy_to.append(before)
        self._copied.append(combined)
        aggregated.add(before)

    def finish(self) -> None:
        """Do what was gathered."""
        with torch.no_grad():
            if self._add_to:
                torch._foreach_add_(self._add_to, self._added)
            if self._copy_to:
                torch._foreach_copy_(self._copy_to, self._copied)


def _has_values(gradient: torch.Tensor) -> bool:
    return bool((gradient.detach().to_dense() != 0).any())


def _add(before: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The sum; in place where `before` can hold it."""
    if before.requires_grad or gradient.requires_grad:
        return before + gradient
    if before.is_sparse and not gradient.is_sparse:
        return gradient + before
    return before.add_(gradient)
