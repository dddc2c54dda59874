"""Keeping mirrored parameters in sync: new gradients are aggregated over the replicas by the backward pass itself.

One `GradientSync` belongs to one strategy, on every replica. It needs no wrapper around modules or optimizers:
parameters are adopted when they are made, and a backward pass that reaches them ends in one packed collective.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from distnb.collectives.algorithms.packs import Packs
from distnb.collectives.gradients.aggregated import aggregated, mark_aggregated
from distnb.collectives.gradients.backward_passes import (
    calling_frame,
    describe_frame,
    listen,
    nesting_seen,
    stop_listening,
)
from distnb.collectives.gradients.bucket_agreement import agree
from distnb.collectives.gradients.buckets import Bucket, BucketPlan, ReducingGroup, Sums, bucket_nbytes, is_large
from distnb.collectives.gradients.equal_gradients import check_equal, keep_equal
from distnb.collectives.gradients.finishing import finish, finish_with_graph, keep_local
from distnb.collectives.gradients.mean_loss import Finding, MeanLossCheck
from distnb.collectives.gradients.mirrored_parameters import forget_mirrors, is_mirrored, note_mirror
from distnb.collectives.gradients.optimizer_guard import guard_optimizers
from distnb.collectives.gradients.parameter_groups import ParameterGroup
from distnb.collectives.gradients.resynchronisation import Buffers, ResynchronisationGroup, heal
from distnb.collectives.gradients.step_watch import changed_by_hand, note_versions
from distnb.collectives.gradients.weighting import Weighting, exact, sum_of_weights, weighting_of
from distnb.collectives.gradients.wrapping import refuse_wrapping
from distnb.errors import OptionError

__all__ = ["GradientSync", "is_mirrored", "mark_aggregated"]


@dataclass
class _Pass:
    """One backward pass under way."""

    group: ReducingGroup
    sums: Sums
    synced: bool
    equal: bool
    create_graph: bool
    finding: Finding | None
    weighting: Weighting

    @property
    def may_overlap(self) -> bool:
        """Whether buckets may start before the pass has ended."""
        plain = self.synced and not (self.equal or self.create_graph) and self.finding is None
        return plain and not self.weighting.divide_by_weight and not nesting_seen()


@dataclass
class _Entry:
    """What one kind of pass reduces, as agreed between the replicas."""

    families: tuple[ParameterGroup, ...]
    versions: tuple[int, ...]
    plans: tuple[BucketPlan, ...]

    @property
    def current(self) -> bool:
        """Whether the families' layouts are still those that were agreed on."""
        return tuple([family.layout_version for family in self.families]) == self.versions


class GradientSync:
    """Aggregates the gradients of mirrored parameters over the replicas, at the end of each backward pass.

    Only what a pass adds to `.grad` is aggregated: two passes that accumulate give the sum of their global
    gradients. Runs on every replica.

    Args:
        group: Gives the process group of the present generation; asked at each pass.
        reduction: "sum", or "mean": weighted by the sizes of the replicas' slices (see `weight`).
        check_mean_loss: With "sum", raise MeanLossError where a loss is a mean.
        packs: How gradients are packed, those of each device and dtype; None to choose.
        sums: Gives what adds up gradients, after the backward pass; None for the group, which may do so during it.
        in_replica: Whether a pass that begins now is one replica's part of a step; else all replicas do the same, and
            nothing is added up.
        after_pass: Called at the end of each pass that aggregated, with the families that it reached (as `adopt` was
            given them), the same on every replica.
    """

    def __init__(
        self,
        group: Callable[[], Any],
        reduction: Literal["sum", "mean"] = "sum",
        *,
        check_mean_loss: bool = True,
        packs: Packs | None = None,
        sums: Callable[[], Sums] | None = None,
        after_pass: Callable[[Sequence[object]], None] | None = None,
        in_replica: Callable[[], bool] = lambda: True,
    ) -> None:
        if reduction not in ("sum", "mean"):
            raise OptionError(f"gradient_reduction={reduction!r}: write 'sum' or 'mean'.")
        self.reduction = reduction
        self._group: Callable[[], ReducingGroup] = group
        self._sums = sums
        self._after_pass = after_pass
        self._in_replica = in_replica
        self._packs = packs or Packs()
        self._mean_loss = MeanLossCheck() if check_mean_loss and reduction == "sum" else None
        self._families: list[ParameterGroup] = []
        self._by_key: dict[object, weakref.ref[ParameterGroup]] = {}
        self._entries: dict[tuple[ParameterGroup, ...], _Entry] = {}
        self._varying: list[_Entry] = []
        self._overlapped: dict[ParameterGroup, BucketPlan] = {}
        self._pass: _Pass | None = None
        self._unsynced = 0
        self._slice: tuple[int, int | None] | None = None
        self._generation: int | None = None
        self._healed: int | None = None
        self._made = 0

    # What strategies call ------------------------------------------------------------------------------------

    def adopt(self, parameter: torch.nn.Parameter, family: object) -> None:
        """Keep a parameter in sync from now on. Adopting it again changes nothing.

        Args:
            parameter: Made in a scope, on all replicas, with the same values.
            family: What is reduced together: the root module, or any identity that is the same for its parameters.
                Its attribute `label`, if it has one, names it in errors.
        """
        if is_mirrored(parameter):
            return
        found = self._family(family)
        note_mirror(parameter, self, found, found.append(parameter))
        listen(self)
        guard_optimizers()
        refuse_wrapping()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside gather gradients on this replica only; the next pass outside aggregates them, once."""
        self._unsynced += 1
        try:
            yield
        finally:
            self._unsynced -= 1

    def weight(self, n: int | None, total: int | None = None) -> None:
        """Say how large this replica's slice of the current batch is; `run` does.

        Args:
            n: The slice's size; None when there is no distributed batch: then all replicas count alike.
            total: The whole batch's size where it is known; saves finding it out by communication.
        """
        self._slice = None if n is None else (n, total)

    def heal(self, buffers: Sequence[Buffers] = ()) -> None:
        """Make mirrored parameters, and the optimizers that hold them, equal again if a program ended half-way.

        Strategies call it before they use a group of a new generation (see `healed`). All replicas must.

        Args:
            buffers: Those of the models, which are then made equal as well.
        """
        group = self._group()
        self._healed = group.generation
        if group.size == 1:
            return
        healed = heal(cast("ResynchronisationGroup", group), self._families, buffers)
        if healed is not None:
            frame = calling_frame()
            warnings.warn_explicit(
                "The replicas had drifted apart, since a program ended half-way through a step. "
                f"Set to what replica 0 holds: {healed}.",
                UserWarning,
                frame.f_code.co_filename if frame is not None else __file__,
                frame.f_lineno if frame is not None else 0,
            )

    @property
    def healed(self) -> int | None:
        """The generation of the group for which `heal` was called last."""
        return self._healed

    def note_equal(self) -> None:
        """What was adopted since is equal on all replicas."""
        note_versions(self._families)

    def changed_by_hand(self) -> dict[str, int]:
        """See `drift.changed_by_hand`; nothing where there is one replica."""
        return changed_by_hand(self._families) if self.aggregates else {}

    def is_mirrored(self, parameter: object) -> bool:
        """Whether a parameter was made in a scope (of any strategy of this process)."""
        return is_mirrored(parameter)

    @property
    def in_pass(self) -> bool:
        """Whether a backward pass is under way."""
        return self._pass is not None

    def global_loss(self, loss: Any) -> Any:
        """The loss of the whole batch, of which each replica gives its part."""
        if not self._in_replica() or not isinstance(loss, torch.Tensor):
            return loss
        group, weighting = self._group(), weighting_of(self.reduction, self._slice, self._group().size)
        total = loss.detach() * weighting.scale
        cast("Any", group).all_reduce(total)
        return total / sum_of_weights(group, weighting.weight, total.device) if weighting.divide_by_weight else total

    @property
    def aggregates(self) -> bool:
        """Whether there is more than one replica."""
        return self._group().size > 1

    def detach(self) -> None:
        """Let go of all parameters: their gradients are this process's own again."""
        stop_listening(self)
        forget_mirrors(self)
        self._drop_entries(self._families)
        self._families = []
        self._by_key = {}

    # What autograd calls -------------------------------------------------------------------------------------

    def begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        """A backward pass is about to run: existing gradients are put out of its way."""
        self._pass = None
        if not self._families:
            return
        group = self._group()
        if group.size == 1:
            return
        if group.generation != self._generation:
            self._enter_generation(group.generation)
        finding, equal = None, not self._in_replica()
        if self._mean_loss is not None and not equal:
            finding = self._mean_loss.look(roots, group.size, *(self._slice or (None, None)))
        for family in self._families:
            family.set_aside()
            if family in self._overlapped and family.about_to_change():
                self._drop_entries([family])
        sums = group if self._sums is None else self._sums()
        weighting = weighting_of(self.reduction, self._slice, group.size)
        self._pass = _Pass(group, sums, not self._unsynced, equal, create_graph, finding, weighting)

    def end(self) -> None:
        """The pass is over: its gradients are aggregated, and added to what was there before."""
        if self._pass is None:
            return
        touched: list[ParameterGroup] = []
        reduced: tuple[ParameterGroup, ...] = ()
        fresh: dict[ParameterGroup, list[torch.Tensor | None]] = {}
        for family in self._families:
            gradients = family.fresh()
            if _some(gradients) or self._launched(family):
                touched.append(family)
                fresh[family] = gradients
        if touched:
            if self._pass.finding is not None:
                raise self._pass.finding.error(self._pass.group.size)
            if self._pass.equal:
                check_equal(self._pass.group, touched, describe_frame(calling_frame()))
                keep_equal(touched)
            elif self._pass.synced:
                reduced = self._reduce(self._pass, tuple(touched), fresh)
            else:
                keep_local(touched, self._pass.weighting)
        for family in self._families:
            if family not in fresh:
                family.restore()
        self._pass = None
        if reduced and self._after_pass is not None:
            self._after_pass([family.key for family in reduced])

    def failed(self) -> None:
        """The pass failed: gradients are what they were before it."""
        for family in self._families:
            family.restore()
        for entry in self._entries.values():
            for plan in entry.plans:
                plan.reset()
        self._pass = None

    # The pass, step by step ----------------------------------------------------------------------------------

    def _reduce(
        self, this: _Pass, touched: tuple[ParameterGroup, ...], fresh: dict[ParameterGroup, list[torch.Tensor | None]]
    ) -> tuple[ParameterGroup, ...]:
        for family in touched:
            if not self._launched(family) and family.layout_is_stale(fresh[family]):
                family.layout_version += 1
        entry = self._entry(touched)
        if entry is None or not entry.current:
            entry = self._agree(this, touched, fresh)
        weighting = this.weighting
        rounded = this.sums is not this.group or any(plan.low_precision for plan in entry.plans)
        if weighting.divide_by_weight and rounded:
            weighting = exact(weighting, this.group, entry.plans[0].slots[0].device)
        if this.create_graph:
            for plan in entry.plans:
                finish_with_graph(plan, this.group, this.sums, weighting)
        else:
            alone = sum([len(plan.buckets) for plan in entry.plans]) == 1
            for plan in entry.plans:
                plan.refuse_leftovers()
                for bucket in plan.buckets[plan.launched :]:
                    plan.start_bucket(bucket, this.sums, weighting, alone)
            for plan in entry.plans:
                finish(plan, this.group, weighting)
        aggregated.serial += 1
        for family in entry.families:
            family.serial = aggregated.serial
            family.release()
        return entry.families

    def _entry(self, touched: tuple[ParameterGroup, ...]) -> _Entry | None:
        entry = self._entries.get(touched)
        if entry is None:
            for varying in self._varying:
                if set(touched) <= set(varying.families):
                    return varying
        return entry

    def _agree(
        self, this: _Pass, touched: tuple[ParameterGroup, ...], fresh: dict[ParameterGroup, list[torch.Tensor | None]]
    ) -> _Entry:
        for family in self._families:
            family.lay_out(fresh.get(family) or family.fresh())
        families, alike = agree(this.group, self._families, touched, describe_frame(calling_frame()))
        large = [family for family in families if is_large(family)] if self._sums is None else []
        small = [family for family in families if family not in large]
        plans = [self._overlapped_plan(family) for family in large]
        if small:
            plans.append(BucketPlan(small, self._packs, overlapped=False))
        entry = _Entry(families, tuple([family.layout_version for family in families]), tuple(plans))
        if not alike:
            # From pass to pass each replica may reach any of these families: all such passes are one kind from now on.
            self._varying.append(entry)
            self._entries = {key: known for key, known in self._entries.items() if not set(key) <= set(families)}
        self._entries[touched] = entry
        return entry

    def _overlapped_plan(self, family: ParameterGroup) -> BucketPlan:
        plan = self._overlapped.get(family)
        if plan is None or plan.version != family.layout_version:
            if plan is not None:
                plan.detach()
            packs = Packs(bucket_nbytes(family)) if self._packs == Packs() else self._packs
            plan = self._overlapped[family] = BucketPlan([family], packs, overlapped=True)
            plan.attach(self._ready)
        return plan

    def _ready(self, plan: BucketPlan, bucket: Bucket) -> bool:
        """During a pass, maybe on autograd's thread: all gradients of the next bucket are there."""
        this = self._pass
        if this is None or not this.may_overlap:
            return False
        plan.start_bucket(bucket, this.sums, this.weighting, alone=False)
        plan.take_away(bucket)
        return True

    # Bookkeeping ---------------------------------------------------------------------------------------------

    def _launched(self, family: ParameterGroup) -> bool:
        plan = self._overlapped.get(family)
        return plan is not None and plan.launched > 0

    def _family(self, identity: object) -> ParameterGroup:
        # A model must not live on because it was a key.
        key = weakref.ref(identity) if isinstance(identity, torch.nn.Module) else identity
        found = self._by_key.get(key)
        family = found() if found is not None else None
        if family is None or family.extinct:
            generation = self._group().generation
            if generation != self._generation:
                self._enter_generation(generation)
            self._made += 1
            kind = (
                type(identity).__name__
                if isinstance(identity, torch.nn.Module)
                else getattr(identity, "label", "model")
            )
            sync = weakref.ref(self)

            def gone(family: ParameterGroup) -> None:
                if (owner := sync()) is not None:
                    owner._drop_family(family)

            family = ParameterGroup((generation, self._made), key, f"{kind} {self._made}", gone)
            self._families.append(family)
            self._by_key[key] = weakref.ref(family)
        return family

    def _drop_family(self, family: ParameterGroup) -> None:
        if family in self._families:
            self._families.remove(family)
        self._by_key = {key: found for key, found in self._by_key.items() if found() is not family}
        self._drop_entries([family])

    def _drop_entries(self, families: list[ParameterGroup]) -> None:
        dropped = set(families)
        self._entries = {
            key: entry for key, entry in self._entries.items() if dropped.isdisjoint((*key, *entry.families))
        }
        self._varying = [entry for entry in self._varying if dropped.isdisjoint(entry.families)]
        for family in families:
            plan = self._overlapped.pop(family, None)
            if plan is not None:
                plan.detach()

    def _enter_generation(self, generation: int) -> None:
        # What was agreed may have been interrupted half-way: some replicas know of it, others do not.
        self._generation = generation
        self._made = 0
        self._drop_entries(self._families)
        for family in self._families:
            family.checked = False


def _some(gradients: list[torch.Tensor | None]) -> bool:
    return any(gradient is not None for gradient in gradients)
