"""How gradients are cut into buckets, and one bucket's way through a collective.

A `Plan` covers the gradients that are reduced together: all small families that one backward pass reaches,
in one bucket per device and dtype; or one large family, in several buckets that start during the pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from distnb.collectives.families import Family
from distnb.collectives.packing import Pack, PackPool, Slot
from distnb.errors import GradientError

__all__ = ["Bucket", "Plan", "ReducingGroup", "Started", "Weighting"]


class Started(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when it is done, or raise ProgramAborted."""


class ReducingGroup(Protocol):
    """What gradient sync needs of a process group."""

    @property
    def size(self) -> int:
        """Number of replicas."""

    @property
    def generation(self) -> int:
        """Grows each time the group is formed anew."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum in place."""

    def all_reduce_start(self, tensor: torch.Tensor) -> Started:
        """Begin to sum in place."""

    def all_gather_uneven(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every replica's tensor; the first dimension may differ."""

    def all_gather_object(self, value: object) -> list[object]:
        """Every replica's object."""


class Weighting(NamedTuple):
    """What this replica's gradients count in the aggregate.

    Attributes:
        scale: Multiplies the gradients that the pass made; 0 for an empty slice, whatever they hold.
        local_scale: Multiplies parts that were gathered under no_sync.
        weight: The weight that rides with the bucket.
        divide_by_weight: Divide by the sum of the weights afterwards.
    """

    scale: float = 1.0
    local_scale: float = 1.0
    weight: float = 1.0
    divide_by_weight: bool = False


class Bucket:
    """Some of a plan's slots, all of one device and dtype, and their flat tensor while it travels."""

    def __init__(self, indices: list[int], slots: Sequence[Slot], whole: bool) -> None:
        self.indices = indices
        self.whole = whole
        self.pack: Pack | None = None
        self.waiting_for = len(indices)
        self._pool = PackPool([slots[index] for index in indices])
        self._started: Started | None = None
        self._complete = True

    def start(
        self, group: ReducingGroup, gradients: list[torch.Tensor | None], scale: float, weight: float, alone: bool
    ) -> None:
        """Pack the gradients and begin to reduce them; `alone` reduces them at once, which costs a little less."""
        pack = self._pool.take()
        self._complete = pack.fill(gradients, scale, weight)
        self.pack = pack
        if alone:
            group.all_reduce(pack.wire)
        else:
            self._started = group.all_reduce_start(pack.wire)

    def finish(self, divide_by_weight: bool) -> tuple[list[torch.Tensor], list[bool] | None]:
        """Wait. Returns the aggregated gradients, and which of them any replica had (None: all)."""
        pack = self.pack
        assert pack is not None
        if self._started is not None:
            self._started.wait()
        if divide_by_weight:
            pack.divide_by_weight()
        used = None if self._complete else pack.used()
        self.forget()
        return pack.views, used

    def forget(self) -> None:
        """Be ready for the next pass, whatever became of this one."""
        self.pack = None
        self._started = None
        self.waiting_for = len(self.indices)


class Plan:
    """The gradients of some families, laid out in buckets.

    Attributes:
        families: Whose gradients these are.
        members: Per index of the plan: (family, place in it).
        slots: Per index: how the gradient looks.
        sparse: The indices whose gradients are sparse: those are gathered, not packed.
        only: The family, where there is one and all of its parameters take part.
        launched: Number of buckets that have started in this pass, always the first ones.
    """

    def __init__(self, families: Sequence[Family], bucket_nbytes: int | None) -> None:
        self.families = tuple(families)
        self.members = [(family, place) for family in families for place in family.active]
        self.slots = [slot for family in families for slot in family.slots]
        self.sparse = [index for index, slot in enumerate(self.slots) if slot.sparse]
        self.overlapped = bucket_nbytes is not None
        self.launched = 0
        self.version = families[0].layout_version
        self.buckets = self._cut(bucket_nbytes)
        self.only = (
            families[0] if len(families) == 1 and len(families[0].active) == len(families[0].references) else None
        )
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}
        self._hooks: list[RemovableHandle] = []

    def _cut(self, bucket_nbytes: int | None) -> list[Bucket]:
        open_ones: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        cut: list[list[int]] = []
        dense = [index for index, slot in enumerate(self.slots) if not slot.sparse]
        # Gradients become ready roughly in the reverse of the order in which parameters were made.
        for index in reversed(dense) if bucket_nbytes is not None else dense:
            slot = self.slots[index]
            key = (slot.device, slot.dtype)
            open_ones.setdefault(key, []).append(index)
            sizes[key] = sizes.get(key, 0) + slot.nbytes
            if bucket_nbytes is not None and sizes[key] >= bucket_nbytes:
                cut.append(open_ones.pop(key))
                sizes[key] = 0
        cut.extend(open_ones.values())
        return [Bucket(indices, self.slots, indices == list(range(len(self.slots)))) for indices in cut]

    @property
    def low_precision(self) -> bool:
        """Whether some dtype cannot hold a sum of weights exactly."""
        return any(slot.dtype.itemsize < 4 for slot in self.slots)

    # Reducing --------------------------------------------------------------------------------------------

    def start_bucket(self, bucket: Bucket, group: ReducingGroup, weighting: Weighting, alone: bool) -> None:
        """Start one bucket, with the local parts of earlier passes in it."""
        if bucket.whole and self.only is not None:
            gradients = self.only.fresh()
        else:
            places = [self.members[index] for index in bucket.indices]
            gradients = [family.params[place].grad for family, place in places]
        scale = weighting.scale
        if any(family.local for family in self.families):
            places = [self.members[index] for index in bucket.indices]
            gradients = [
                family.with_local_part(place, gradient, scale, weighting.local_scale)
                for (family, place), gradient in zip(places, gradients, strict=True)
            ]
            scale = 1.0
        bucket.start(group, gradients, scale, weighting.weight, alone)
        self.launched += 1

    def take_away(self, bucket: Bucket) -> None:
        """After a bucket started during the pass: what arrives later must not be taken for what it carries."""
        for index in bucket.indices:
            family, place = self.members[index]
            if not family.is_gone(place):
                family.params[place].grad = None

    def refuse_leftovers(self) -> None:
        """Raise where a bucket started during the pass, and further gradients came for it afterwards."""
        for bucket in self.buckets[: self.launched]:
            for index in bucket.indices:
                family, place = self.members[index]
                if family.params[place].grad is not None:
                    raise GradientError(
                        f"Parameter {place} of {family.description} got gradients twice in one backward pass: it is "
                        "used inside and outside of a reentrant checkpoint, or two threads run backward at once. Use "
                        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or run the step again: from now "
                        "on this process aggregates at the end of the pass, where this is allowed."
                    )

    def reset(self) -> None:
        """Be ready for the next pass."""
        self.launched = 0
        for bucket in self.buckets:
            bucket.forget()

    # Overlap with the pass -------------------------------------------------------------------------------

    def attach(self, ready: ReadyBucket) -> None:
        """Have `ready(plan, bucket)` called during a pass when all gradients of the next bucket are there."""
        plan = weakref.ref(self)
        for index, (family, place) in enumerate(self.members):
            parameter = family.references[place]()
            if parameter is not None and index in self._bucket_of:
                hook = functools.partial(_arrived, plan, index, ready)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def arrived(self, index: int, ready: ReadyBucket) -> None:
        """Count a gradient in; start whatever has become complete, in order."""
        self._bucket_of[index].waiting_for -= 1
        while self.launched < len(self.buckets) and self.buckets[self.launched].waiting_for == 0:
            if not ready(self, self.buckets[self.launched]):
                return


class ReadyBucket(Protocol):
    """Told of a bucket whose gradients are all there. Returns whether it was started."""

    def __call__(self, plan: Plan, bucket: Bucket) -> bool: ...


def _arrived(plan: weakref.ref[Plan], index: int, ready: ReadyBucket, _parameter: torch.Tensor) -> None:
    found = plan()
    if found is not None:
        found.arrived(index, ready)
