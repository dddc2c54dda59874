"""The synchronisation of mirrored parameters: the backward pass itself aggregates new gradients over the replicas.

Each strategy has one `GradientSync` on every replica. It needs no wrapper around modules or optimizers: parameters are
registered when they are made, and a backward pass that reaches them ends with one packed collective.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
from distnb.collectives.gradients.replica_comparison import agree, check_equal
from distnb.collectives.gradients.replicated_steps import current_step
from distnb.collectives.verify import callsite
from distnb.errors import GradientError, OptionError

__all__ = ["GradientSync"]


@dataclass
class _Pass:
    """A backward pass under way.

    Attributes:
        synced: Whether gradients are aggregated at its end; under `no_sync` they are not.
        equal: Whether all replicas compute the same in it, so that nothing is summed.
        mean_loss: The error to raise if the pass reaches mirrored parameters, because its loss is a mean; else None.
        scale: Multiplies this replica's gradients.
    """

    aggregation: Aggregation
    synced: bool
    equal: bool
    create_graph: bool
    mean_loss: GradientError | None
    scale: float


@dataclass
class _Entry:
    """The gradients that one kind of pass reduces, as agreed between the replicas."""

    groups: tuple[ParameterGroup, ...]
    versions: list[int]
    plans: list[BucketPlan]


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
        before_common_pass: Called before a pass in which all replicas compute the same. It may register parameters.
        after_pass: Called at the end of each pass that aggregated, with the keys (see `register`) of the groups that it
            reached. The keys are the same on every replica.

    Attributes:
        groups: The parameter groups, in the order of their creation.
    """

    def __init__(
        self,
        aggregation: Callable[[], Aggregation],
        reduction: Literal["sum", "mean"] = "sum",
        *,
        check_mean_loss: bool = True,
        in_replica: Callable[[], bool] = lambda: True,
        before_common_pass: Callable[[], None] = lambda: None,
        after_pass: Callable[[Sequence[object]], None] = lambda reached: None,
    ) -> None:
        if reduction not in ("sum", "mean"):
            raise OptionError(f"gradient_reduction={reduction!r}: write 'sum' or 'mean'.")
        self._aggregation = aggregation
        self._reduction = reduction
        self._before_common_pass = before_common_pass
        self._after_pass = after_pass
        self._in_replica = in_replica
        self._mean_loss = MeanLossCheck() if check_mean_loss and reduction == "sum" else None
        self.groups: list[ParameterGroup] = []
        self._by_key: weakref.WeakKeyDictionary[object, ParameterGroup] = weakref.WeakKeyDictionary()
        self._entries: dict[tuple[ParameterGroup, ...], _Entry] = {}
        self._varying: list[_Entry] = []
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
        group = self._by_key.get(key)
        if group is None:
            self._enter_generation(self._aggregation())
            self._made += at is None
            owner = weakref.ref(self)

            def drop(group: ParameterGroup) -> None:
                if (sync := owner()) is not None:
                    sync._drop([group])

            identity = (self._generation or 0, self._made) if at is None else at[0]
            group = ParameterGroup(self, identity, key, drop)
            self._by_key[key] = group
        if group not in self.groups:
            self.groups.append(group)
        group.append(parameter, None if at is None else at[1])
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

    def identity_of(self, key: Any) -> Identity | None:
        """Return the identity of a key's group, which is the same on all replicas, or None."""
        group = self._by_key.get(key)
        return None if group is None else group.identity

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
        """Return the loss of the whole batch from each replica's part."""
        if not self._in_replica() or not isinstance(loss, torch.Tensor):
            return loss
        aggregation = self._aggregation()
        total = loss.detach() * self.scale(aggregation.group.size)
        aggregation.group.all_reduce(total)
        return total

    @property
    def aggregates(self) -> bool:
        """True if there is more than one replica."""
        return self._aggregation().group.size > 1

    def detach(self) -> None:
        """Release all parameters. Their gradients are local again."""
        BACKWARD_PASSES.stop_listening(self)
        for group in self.groups:
            group.forget()
        self._drop(list(self.groups))
        self._by_key.clear()

    # What autograd calls -------------------------------------------------------------------------------------

    def begin(self, roots: tuple[Any, ...], create_graph: bool) -> None:
        """Move existing gradients aside before a pass."""
        self._pass = None
        if not self._in_replica():
            self._before_common_pass()
        aggregation = self._aggregation()
        if not self.groups or aggregation.group.size == 1:
            return
        self._enter_generation(aggregation)
        size, equal, mean_loss = aggregation.group.size, not self._in_replica(), None
        if not equal:
            mean_loss = self.mean_loss_of(roots)
        for group in self.groups:
            version = group.layout_version
            group.begin_pass()
            if group in self._overlapped and group.layout_version != version:
                self._forget_entries([group])
        self._pass = _Pass(
            aggregation=aggregation,
            synced=not self._unsynced,
            equal=equal,
            create_graph=create_graph,
            mean_loss=mean_loss,
            scale=self.scale(size),
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
        reached: Sequence[ParameterGroup] = ()
        if touched:
            if this.mean_loss is not None:
                raise this.mean_loss
            if this.equal:
                check_equal(this.aggregation.group, touched, str(callsite.current()))
                keep_equal(touched)
                self._count(touched)
            elif this.synced:
                reached = self._reduce(this, touched)
                self._count(reached)
            else:
                keep_local(touched, this.scale)
        for group in self.groups:
            group.end_pass()
        self._pass = None
        if reached:
            self._after_pass([key for group in reached if (key := group.key()) is not None])

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
        for entry in self._entries.values():
            for plan in entry.plans:
                plan.reset()
        self._pass = None

    def reached(self, inputs: Sequence[Any], gradients: Sequence[Any] | None) -> None:
        """Do nothing: `torch.autograd.grad` reaches mirrored parameters as any others."""

    # The pass, step by step ----------------------------------------------------------------------------------

    def _reduce(self, this: _Pass, touched: tuple[ParameterGroup, ...]) -> Sequence[ParameterGroup]:
        entry = self._entries.get(touched)
        if entry is None:
            entry = next((each for each in self._varying if set(touched) <= set(each.groups)), None)
        if entry is None or entry.versions != [group.layout_version for group in entry.groups]:
            entry = self._agree(this, touched)
        for plan in entry.plans:
            if not this.create_graph:
                plan.start_rest(this.aggregation, this.scale)
        for plan in entry.plans:
            (finish_with_graph if this.create_graph else finish)(plan, this.aggregation, this.scale)
        return entry.groups

    def _agree(self, this: _Pass, touched: tuple[ParameterGroup, ...]) -> _Entry:
        for group in self.groups:
            group.lay_out()
        groups, alike = agree(this.aggregation.group, self.groups, touched, str(callsite.current()))
        packs = this.aggregation.packs
        large = [group for group in groups if this.aggregation.is_groups_own and large_packs(group)]
        plans = [self._overlapped_plan(group, packs) for group in large]
        if small := [group for group in groups if group not in large]:
            plans.append(BucketPlan(small, packs))
        entry = _Entry(tuple(groups), [group.layout_version for group in groups], plans)
        if not alike:
            # In each pass a replica may reach any of these groups: all such passes count as one kind from now on.
            self._varying.append(entry)
            self._entries = {key: known for key, known in self._entries.items() if not set(key) <= set(groups)}
        self._entries[touched] = entry
        return entry

    def _overlapped_plan(self, group: ParameterGroup, packs: Packs) -> BucketPlan:
        plan = self._overlapped.get(group)
        if plan is None or plan.version != group.layout_version:
            if plan is not None:
                plan.detach()
            divided = large_packs(group) if packs == Packs() else packs
            plan = self._overlapped[group] = BucketPlan([group], divided or packs, self._start)
        return plan

    def _start(self, plan: BucketPlan, bucket: Bucket) -> bool:
        this = self._pass
        if this is None or not this.synced or this.equal or this.create_graph or this.mean_loss is not None:
            return False  # nothing is summed before the pass has ended
        if BACKWARD_PASSES.nesting_seen:
            return False
        plan.start_bucket(bucket, this.aggregation, this.scale)
        return True

    # Bookkeeping ---------------------------------------------------------------------------------------------

    def _drop(self, groups: list[ParameterGroup]) -> None:
        self.groups = [group for group in self.groups if group not in groups]
        self._forget_entries(groups)

    def _forget_entries(self, groups: Sequence[ParameterGroup]) -> None:
        gone = set(groups)
        self._entries = {key: entry for key, entry in self._entries.items() if gone.isdisjoint((*key, *entry.groups))}
        self._varying = [entry for entry in self._varying if gone.isdisjoint(entry.groups)]
        for group in groups:
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
            for group in self.groups:
                group.checked = False
