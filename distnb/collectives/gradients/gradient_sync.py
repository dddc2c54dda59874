"""The synchronisation of mirrored parameters: the backward pass itself aggregates new gradients over the replicas.

Each strategy has one `GradientSync` on every replica. It needs no wrapper around modules or optimizers: parameters are
registered when they are made, and a backward pass that reaches them ends with one packed collective.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from distnb.collectives.algorithms.aggregation import Aggregation
from distnb.collectives.algorithms.flat_packs import Packs
from distnb.collectives.gradients.backward_passes import BACKWARD_PASSES
from distnb.collectives.gradients.buckets import Bucket, BucketPlan, large_packs
from distnb.collectives.gradients.finishing import finish, finish_with_graph, keep_equal, keep_local
from distnb.collectives.gradients.mean_loss import MeanLossCheck
from distnb.collectives.gradients.optimizer_steps import changed_by_hand, guard_optimizers
from distnb.collectives.gradients.parameter_groups import (
    AGGREGATED,
    Identity,
    ParameterGroup,
    find_mirror,
    refuse_wrapping,
)
from distnb.collectives.gradients.pass_reports import Report, all_equal, digest_of, exchange
from distnb.collectives.gradients.replica_comparison import agree, check_equal
from distnb.collectives.gradients.replicated_steps import current_step
from distnb.collectives.group.interface import Group
from distnb.collectives.verify import callsite
from distnb.errors import GradientError, OptionError

__all__ = ["GradientSync", "AveragedStatistics"]

_NOTHING = digest_of((), ())


@dataclass
class _Pass:
    """A backward pass under way.

    Attributes:
        synced: Whether gradients are aggregated at its end; under `no_sync` they are not.
        equal: Whether all replicas compute the same in it, so that nothing is summed.
        mean_loss: The error to raise if the pass reaches mirrored parameters, because its loss is a mean; else None.
        scale: Multiplies this replica's gradients.
        is_current: Whether the pass belongs to a function that this strategy runs.
        is_reported: Whether the replicas exchange reports about the pass (see `pass_reports`).
        started: With reports: the plans whose buckets all replicas have started during the pass, in that order.
        is_divided: With reports: whether the replicas may reach different groups, so that nothing more starts early.
    """

    aggregation: Aggregation
    synced: bool
    equal: bool
    create_graph: bool
    mean_loss: GradientError | None
    scale: float
    is_current: bool
    is_reported: bool
    started: list[BucketPlan] = field(default_factory=list)
    is_divided: bool = False


@dataclass
class _Entry:
    """The gradients that one kind of pass reduces, and the models whose statistics it averages, as agreed."""

    groups: tuple[ParameterGroup, ...]
    versions: list[int]
    plans: list[BucketPlan]
    models: list[Identity]


class AveragedStatistics(Protocol):
    """Statistics that forward passes change, on each replica with its own examples."""

    def changed(self) -> tuple[Identity, ...]:
        """Return the models whose statistics have changed on this replica since the last average."""

    def average(self, models: Sequence[Identity]) -> None:
        """Set the statistics of these models to their mean over the replicas. All replicas call this."""

    def living(self) -> set[Identity]:
        """Return the models with statistics that exist on this replica."""


class NoStatistics:
    """The statistics of a strategy whose models have none."""

    def changed(self) -> tuple[Identity, ...]:
        return ()

    def average(self, models: Sequence[Identity]) -> None:
        pass

    def living(self) -> set[Identity]:
        return set()


class GradientSync:
    """The aggregation of mirrored parameters' gradients over the replicas, at the end of each backward pass.

    Only the gradients that a pass adds to `.grad` are aggregated: two passes that accumulate give the sum of their
    global gradients.

    Args:
        aggregation: Returns the current aggregation. Called at each pass.
        reduction: "sum", or "mean": weighted by the sizes of the replicas' slices (see `weight`).
        check_mean_loss: With "sum", whether to raise MeanLossError if a loss is a mean.
        in_replica: Returns whether a pass that begins now is one replica's part of a step. Otherwise all replicas
            compute the same, and nothing is summed.
        is_current: Returns whether a replica context of this strategy is the innermost one.
        before_common_pass: Called before a pass in which all replicas compute the same. It may register parameters.

    Attributes:
        statistics: The statistics of the strategy's models, which each aggregated pass averages.
        groups: The parameter groups, in the order of their creation.
        models: The models with parameters to train or with statistics. It has the same content on all replicas, so it
            may include models that a replica has freed.
    """

    def __init__(
        self,
        aggregation: Callable[[], Aggregation],
        reduction: Literal["sum", "mean"] = "sum",
        *,
        check_mean_loss: bool = True,
        in_replica: Callable[[], bool] = lambda: True,
        is_current: Callable[[], bool] = lambda: True,
        before_common_pass: Callable[[], None] = lambda: None,
    ) -> None:
        if reduction not in ("sum", "mean"):
            raise OptionError(f"gradient_reduction={reduction!r}: write 'sum' or 'mean'.")
        self._aggregation = aggregation
        self._reduction = reduction
        self._before_common_pass = before_common_pass
        self.statistics: AveragedStatistics = NoStatistics()
        self._in_replica = in_replica
        self._is_current = is_current
        self._mean_loss = MeanLossCheck() if check_mean_loss and reduction == "sum" else None
        self.groups: list[ParameterGroup] = []
        self.models: set[Identity] = set()
        self._by_key: weakref.WeakKeyDictionary[object, ParameterGroup] = weakref.WeakKeyDictionary()
        self._identities: weakref.WeakKeyDictionary[object, Identity] = weakref.WeakKeyDictionary()
        self._entries: dict[tuple[int, ...], _Entry] = {}  # by what each replica has reached, as digests
        self._overlapped: dict[ParameterGroup, BucketPlan] = {}
        self._pass: _Pass | None = None
        self._unsynced = False
        self._slice: tuple[int, int] | None = None
        self._generation: int | None = None
        self._made = 0

    # What strategies call ------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Receive notifications of every backward pass from now on."""
        BACKWARD_PASSES.listen(self)

    def register(self, parameter: torch.nn.Parameter, key: Any, at: tuple[Identity, int] | None = None) -> None:
        """Keep a parameter in sync. All replicas have made it with equal values. Idempotent.

        Parameters with the same key are reduced together. The key's attribute `label` names them in errors.

        Args:
            at: On a replica that replaces a lost one: the group's identity on the others, and the place in it.
        """
        if find_mirror(parameter) is not None:
            return
        identity = self.identify(key, None if at is None else at[0])
        group = self._by_key.get(key)
        if group is None:
            owner = weakref.ref(self)

            def drop(group: ParameterGroup) -> None:
                if (sync := owner()) is not None:
                    sync._drop([group])

            group = self._by_key[key] = ParameterGroup(self, identity, key, drop)
        if parameter.requires_grad:
            self.models.add(identity)
        if group not in self.groups:
            self.groups.append(group)
        group.append(parameter, None if at is None else at[1])
        group.is_copied |= at is not None
        self.listen()
        guard_optimizers()
        refuse_wrapping()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes accumulate gradients locally. The next pass outside aggregates
        them."""
        before = self._unsynced
        try:
            self._unsynced = True
            yield
        finally:
            self._unsynced = before

    def begin_program(self) -> None:
        """Leave the contexts that an earlier program left open."""
        self._unsynced = False

    def weight(self, n: int | None, total: int | None) -> None:
        """Set the sizes of this replica's slice of the current batch and of the whole batch. `run` calls this.

        Without a distributed batch the sizes are None, and all replicas have the same weight.
        """
        self._slice = None if n is None or total is None else (n, total)

    def identify(self, key: Any, identity: Identity | None = None) -> Identity:
        """Return the identity of a key, which is the same on all replicas.

        A new key gets a new identity. All replicas must identify new keys in the same order. On a replica that replaces
        a lost one, a key gets the identity that it has on the others.
        """
        known = self._identities.get(key)
        if known is None:
            if identity is None:
                self._enter_generation(self._aggregation())
                self._made += 1
                identity = (self._generation or 0, self._made)
            known = self._identities[key] = identity
        return known

    def meet(self) -> None:
        """Begin with the other replicas in a new generation of the group. All of them must call this."""
        living = {group.identity for group in self.groups if group.is_trained}
        gathered = self._aggregation().group.all_gather_object(sorted(living | self.statistics.living()))
        self.models = {identity for theirs in gathered for identity in theirs}

    def changed_by_hand(self) -> dict[str, int]:
        """Return the parameters that were changed since the last call other than by an optimizer's step, with
        digests."""
        return changed_by_hand(self.groups) if self.aggregates else {}

    @property
    def is_synced(self) -> bool:
        """True if a pass that begins now is aggregated, False under `no_sync`."""
        return not self._unsynced

    @property
    def in_pass(self) -> bool:
        """True if a backward pass is under way."""
        return self._pass is not None

    def global_loss(self, loss: Any) -> Any:
        """Return the loss of the whole batch from each replica's part, unless the user has combined the parts."""
        if not self._in_replica() or not isinstance(loss, torch.Tensor) or loss in AGGREGATED:
            return loss
        aggregation = self._aggregation()
        total = loss.detach() * self.scale(aggregation.group.size)
        aggregation.group.all_reduce(total)
        return total

    @property
    def replicas(self) -> Group:
        """The current process group."""
        return self._aggregation().group

    @property
    def aggregates(self) -> bool:
        """True if there is more than one replica."""
        return self._aggregation().group.size > 1

    def end_function(self) -> None:
        """Average statistics that a function of `strategy.run` has changed without a backward pass."""
        if changed := self.statistics.changed():
            self.statistics.average(changed)

    def detach(self) -> None:
        """Release all parameters. Their gradients are local again."""
        BACKWARD_PASSES.stop_listening(self)
        for group in self.groups:
            group.forget()
        self._drop(list(self.groups))
        self._by_key.clear()
        self._identities.clear()
        self.models.clear()

    # What autograd calls -------------------------------------------------------------------------------------

    def begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        """Move existing gradients aside before a pass."""
        self._pass = None
        if not self._in_replica():
            self._before_common_pass()
        aggregation = self._aggregation()
        if not (self.groups or self.models) or aggregation.group.size == 1:
            return
        self._enter_generation(aggregation)
        size, equal, mean_loss = aggregation.group.size, not self._in_replica(), None
        if not equal and self.groups:
            mean_loss = self.mean_loss_of(roots)
        for group in self.groups:
            if group.begin_pass() and group.is_trained:
                self.models.add(group.identity)
            plan = self._overlapped.get(group)
            if plan is not None and plan.version != group.layout_version:
                self._detach_plan(group)
        synced, is_current = not self._unsynced, not equal and self._is_current()
        self._pass = _Pass(
            aggregation=aggregation,
            synced=synced,
            equal=equal,
            create_graph=create_graph,
            mean_loss=mean_loss,
            scale=self.scale(size),
            is_current=is_current,
            is_reported=synced and is_current and len(self.models) > 1,
        )

    def mean_loss_of(self, roots: Sequence[Any]) -> GradientError | None:
        """Return the error to raise if a pass from these roots reaches parameters whose gradients are summed."""
        if self._mean_loss is None or current_step() is not None:
            return None
        return self._mean_loss.check(roots, self._aggregation().group.size, *(self._slice or (None, None)))

    def scale(self, replicas: int) -> float:
        """Return the factor of this replica's gradients before they are summed over the replicas."""
        if self._reduction == "sum" or current_step() is not None:
            return 1.0
        size, total = self._slice or (1, replicas)
        return size / max(total, 1)

    def end(self) -> None:
        """Aggregate the gradients of the finished pass and add them to the existing gradients."""
        this = self._pass
        if this is None:
            return
        touched = tuple([group for group in self.groups if self._is_touched(group)])
        if touched and this.mean_loss is not None:
            raise this.mean_loss
        models: Sequence[Identity] = ()
        if this.synced and not this.equal:
            models = self._reduce(this, touched)
        elif touched and this.equal:
            check_equal(this.aggregation.group, touched, str(callsite.current()))
            keep_equal(touched)
            self._count(touched)
        elif touched:
            keep_local(touched, this.scale)
        for group in self.groups:
            group.end_pass()
        self._pass = None
        if models:
            self.statistics.average(models)

    def _is_touched(self, group: ParameterGroup) -> bool:
        plan = self._overlapped.get(group)
        if plan is not None and plan.launched:
            return True
        made, fits = group.scan()
        if made and not fits:
            group.layout_version += 1
        return made

    def _count(self, groups: Sequence[ParameterGroup]) -> None:
        AGGREGATED.serial += 1
        for group in groups:
            group.serial = AGGREGATED.serial

    def failed(self) -> None:
        """Restore the gradients to those before the pass that failed."""
        for group in self.groups:
            group.end_pass(failed=True)
        for plan in [*self._overlapped.values(), *(plan for entry in self._entries.values() for plan in entry.plans)]:
            plan.reset()
        self._pass = None

    def computing(self, inputs: Sequence[Any], create_graph: bool) -> contextlib.AbstractContextManager[Any]:
        """Do nothing: `torch.autograd.grad` reaches mirrored parameters as any others."""
        return contextlib.nullcontext()

    # The pass, step by step ----------------------------------------------------------------------------------

    def _reduce(self, this: _Pass, touched: tuple[ParameterGroup, ...]) -> Sequence[Identity]:
        """Reduce the gradients that the pass made on any replica. Return the models whose statistics to average."""
        changed = self.statistics.changed() if this.is_current else ()
        if this.is_current and not this.is_reported and touched:
            changed = tuple(self.statistics.living())  # of the single model, even if only other replicas changed them
        mine = digest_of(tuple(group.identity for group in touched), changed)
        if this.is_reported:
            reached = self._report_end(this, mine)
        else:
            reached = (mine,)  # with a single model, all replicas reach the same
            self._forget_entries(self._outdated())
        if set(reached) == {_NOTHING}:
            return ()
        entry = self._entries.get(reached)
        if entry is None:
            entry = self._entries[reached] = self._agree(this, touched, changed)
        for plan in entry.plans:
            if not this.create_graph and plan not in this.started:
                plan.start_rest(this.aggregation, this.scale)
        for plan in entry.plans:
            (finish_with_graph if this.create_graph else finish)(plan, this.aggregation, this.scale)
        if entry.groups:
            self._count(entry.groups)
        return entry.models

    def _report_end(self, this: _Pass, mine: int) -> tuple[int, ...]:
        """Report the end of the pass, and wait for the others' reports. Return digests of what each replica reached."""
        for plan in this.started:
            plan.start_rest(this.aggregation, this.scale)
        living = self.models & ({group.identity for group in self.groups} | self.statistics.living())
        outdated = self._outdated()
        report = Report(
            ended=True,
            models=mine,
            outdated=digest_of(tuple(group.identity for group in outdated)),
            living=len(living),
        )
        while True:
            reports = exchange(this.aggregation.group, report)
            if all(each.ended for each in reports):
                break
        is_alike = len({each.outdated for each in reports}) == 1
        self._forget_entries(outdated if is_alike else self.groups, but=this.started)
        if mine != _NOTHING and all_equal(reports) and all(each.living == 1 for each in reports):
            self.models = living  # all others are freed on every replica
        return tuple(each.models for each in reports)

    def _outdated(self) -> list[ParameterGroup]:
        """Return the groups that were frozen, cast or extended since the replicas agreed on them."""
        versions = {
            group: group.layout_version == version
            for entry in self._entries.values()
            for group, version in zip(entry.groups, entry.versions, strict=True)
        }
        return [group for group in self.groups if not versions.get(group, True)]

    def _agree(self, this: _Pass, touched: Sequence[ParameterGroup], changed: tuple[Identity, ...]) -> _Entry:
        groups, models = agree(this.aggregation.group, self.groups, touched, changed, str(callsite.current()))
        packs = this.aggregation.packs
        large = [group for group in groups if this.aggregation.is_groups_own and large_packs(group)]
        plans = [self._overlapped_plan(group, packs) for group in large]
        if small := [group for group in groups if group not in large]:
            plans.append(BucketPlan(small, packs))
        return _Entry(tuple(groups), [group.layout_version for group in groups], plans, models)

    def _overlapped_plan(self, group: ParameterGroup, packs: Packs) -> BucketPlan:
        plan = self._overlapped.get(group)
        if plan is None or plan.version != group.layout_version:
            self._detach_plan(group)
            divided = large_packs(group) if packs == Packs() else packs
            plan = self._overlapped[group] = BucketPlan([group], divided or packs, self._start)
        return plan

    def _start(self, plan: BucketPlan, bucket: Bucket) -> bool:
        this = self._pass
        if this is None or not this.synced or this.equal or this.create_graph or this.mean_loss is not None:
            return False  # nothing is summed before the pass has ended
        if BACKWARD_PASSES.nesting_seen or (this.is_reported and not self._may_start(this, plan)):
            return False
        plan.start_bucket(bucket, this.aggregation, this.scale)
        return True

    def _may_start(self, this: _Pass, plan: BucketPlan) -> bool:
        """Return whether all replicas start the plan's buckets now. They report it before the first one."""
        if plan in this.started:
            return True
        if this.is_divided or any(other.launched < len(other.buckets) for other in this.started):
            this.is_divided = True
            return False
        reports = exchange(this.aggregation.group, Report(ended=False, models=digest_of((plan.identity,))))
        this.is_divided = not all_equal(reports)
        if not this.is_divided:
            this.started.append(plan)
        return not this.is_divided

    # Bookkeeping ---------------------------------------------------------------------------------------------

    def _drop(self, groups: list[ParameterGroup]) -> None:
        self.groups = [group for group in self.groups if group not in groups]
        self._forget_entries(groups)

    def _forget_entries(self, groups: Sequence[ParameterGroup], but: Sequence[BucketPlan] = ()) -> None:
        """Forget the agreements on these groups, and stop starting their buckets early except those under way."""
        gone = set(groups)
        self._entries = {key: entry for key, entry in self._entries.items() if gone.isdisjoint(entry.groups)}
        for group in groups:
            if self._overlapped.get(group) not in but:
                self._detach_plan(group)

    def _detach_plan(self, group: ParameterGroup) -> None:
        plan = self._overlapped.pop(group, None)
        if plan is not None:
            plan.detach()

    def _enter_generation(self, aggregation: Aggregation) -> None:
        generation = aggregation.group.generation
        if generation != self._generation:
            # An agreement may have been interrupted half-way, so that only some replicas have it.
            self._generation = generation
            self._made = 0
            self._forget_entries(self.groups)
            self._entries.clear()
            for group in self.groups:
                group.checked = False
