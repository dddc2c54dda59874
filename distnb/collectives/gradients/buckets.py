"""How gradients are cut into buckets, and one bucket's way through a collective.

A `BucketPlan` covers the gradients that are reduced together: all small families that one backward pass reaches,
in one bucket per device and dtype; or one large family, in several buckets that start during the pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from distnb.collectives.algorithms.packs import Packs
from distnb.collectives.gradients.flat_packing import Pack, PackPool, Slot
from distnb.collectives.gradients.parameter_groups import ParameterGroup
from distnb.collectives.gradients.weighting import Weighting
from distnb.errors import GradientError

__all__ = ["Bucket", "BucketPlan", "ReducingGroup", "Started", "Sums", "bucket_nbytes", "is_large"]


# A family of at least this size is cut into buckets that start during the pass; smaller ones wait for its end.
OVERLAP_NBYTES = {"cpu": 2**20, "cuda": 4 * 2**20}
# A bucket holds at least so much, and at least an eighth of its family: each costs a round of messages.
BUCKET_NBYTES = {"cpu": 2**19, "cuda": 4 * 2**20}

_SALTS = 61
# So many buckets of a plan travel at once: a group has room for a few hundred messages that nobody has waited for.
_UNDER_WAY = 16

Member = tuple[ParameterGroup, int]
"""A parameter: its family, and its place there."""


class Started(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when it is done, or raise ProgramAborted."""


class Sums(Protocol):
    """What adds up gradients over the replicas."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum in place."""

    def all_reduce_start(self, tensor: torch.Tensor) -> Started:
        """Begin to sum in place."""


class ReducingGroup(Sums, Protocol):
    """What gradient sync needs of a process group."""

    @property
    def size(self) -> int:
        """Number of replicas."""

    @property
    def generation(self) -> int:
        """Grows each time the group is formed anew."""

    def all_gather_uneven(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every replica's tensor; the first dimension may differ."""

    def all_gather_object(self, value: object) -> list[object]:
        """Every replica's object."""


class Bucket:
    """Some of a plan's slots, all of one device and dtype, and their flat tensor while it travels."""

    def __init__(self, indices: list[int], slots: Sequence[Slot], members: Sequence[Member], salt: int) -> None:
        self.members = [members[index] for index in indices]
        self._families = list(dict.fromkeys(family for family, _ in self.members))
        self.pack: Pack | None = None
        self._pool = PackPool([slots[index] for index in indices], salt)
        self._started: Started | None = None
        self._complete = True

    def fresh(self) -> list[torch.Tensor | None]:
        """During a pass: the gradients that it made so far."""
        return [family.params[place].grad for family, place in self.members]

    def plain(self) -> bool:
        """During a pass: whether there was no gradient before it."""
        return not any(family.aside or family.local for family in self._families)

    def start(self, sums: Sums, gradients: list[torch.Tensor | None], scale: float, weight: float, alone: bool) -> None:
        """Pack the gradients and begin to reduce them; `alone` reduces them at once, which costs a little less."""
        pack = self._pool.take()
        self._complete = pack.fill(gradients, scale, weight)
        self.pack = pack
        if alone:
            sums.all_reduce(pack.wire)
        else:
            self._started = sums.all_reduce_start(pack.wire)

    def arrive(self) -> None:
        """Wait for the sums, if they are under way."""
        if self._started is not None:
            self._started.wait()
            self._started = None

    def finish(self, divide_by_weight: bool) -> tuple[list[torch.Tensor], list[bool] | None]:
        """Wait. Returns the aggregated gradients, and which of them any replica had (None: all)."""
        pack = self.pack
        assert pack is not None
        self.arrive()
        if divide_by_weight:
            pack.divide_by_weight()
        used = None if self._complete else pack.used()
        self.forget()
        return pack.views, used

    def forget(self) -> None:
        """Be ready for the next pass, whatever became of this one."""
        self.pack = None
        self._started = None


class BucketPlan:
    """The gradients of some families, laid out in buckets.

    Args:
        families: Whose gradients these are.
        packs: How those of each device and dtype are divided into buckets.
        overlapped: Buckets start during the pass, in the order in which gradients become ready.

    Attributes:
        families: Whose gradients these are.
        members: Per index of the plan: (family, place in it).
        slots: Per index: how the gradient looks.
        sparse: The indices whose gradients are sparse: those are gathered, not packed.
        launched: Number of buckets that have started in this pass, always the first ones.
    """

    def __init__(self, families: Sequence[ParameterGroup], packs: Packs, *, overlapped: bool) -> None:
        self.families = tuple(families)
        self.members = [(family, place) for family in families for place in family.active]
        self.slots = [slot for family in families for slot in family.slots]
        self.sparse = [index for index, slot in enumerate(self.slots) if slot.sparse]
        self.overlapped = overlapped
        self.launched = 0
        self.version = families[0].layout_version
        self.buckets = self._cut(packs)
        self._hooks: dict[Member, RemovableHandle] = {}
        self._last: dict[int, Member] | None = {}

    def _cut(self, packs: Packs) -> list[Bucket]:
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        dense = [index for index, slot in enumerate(self.slots) if not slot.sparse]
        # Gradients become ready roughly in the reverse of the order in which parameters were made.
        ordered = list(reversed(dense)) if self.overlapped else dense
        for index in ordered:
            slot = self.slots[index]
            kinds.setdefault((slot.device, slot.dtype), []).append(index)
        cut = [
            [indices[place] for place in places]
            for indices in kinds.values()
            for places in packs.cut([self.slots[index].nbytes for index in indices])
        ]
        # Buckets start in order: one whose last gradient comes early must not wait for those of another kind.
        position = {index: place for place, index in enumerate(ordered)}
        cut.sort(key=lambda indices: position[indices[-1]])
        # Buckets that start during the pass start in the order in which the pass reaches their families.
        salt = self.families[0].number % _SALTS if self.overlapped else 0
        return [Bucket(indices, self.slots, self.members, salt) for indices in cut]

    @property
    def low_precision(self) -> bool:
        """Whether some dtype cannot hold a sum of weights exactly."""
        return any(slot.dtype.itemsize < 4 for slot in self.slots)

    # Reducing --------------------------------------------------------------------------------------------

    def start_bucket(self, bucket: Bucket, sums: Sums, weighting: Weighting, alone: bool) -> None:
        """Start one bucket, with the local parts of earlier passes in it."""
        gradients = bucket.fresh()
        scale = weighting.scale
        if any(family.local for family in self.families):
            gradients = [
                family.with_local_part(place, gradient, scale, weighting.local_scale)
                for (family, place), gradient in zip(bucket.members, gradients, strict=True)
            ]
            scale = 1.0
        if self.launched >= _UNDER_WAY:
            self.buckets[self.launched - _UNDER_WAY].arrive()
        bucket.start(sums, gradients, scale, weighting.weight, alone)
        self.launched += 1

    def take_away(self, bucket: Bucket) -> None:
        """After a bucket started during the pass: what arrives later must not be taken for what it carries."""
        for family, place in bucket.members:
            if not family.is_gone(place):
                family.params[place].grad = None

    def refuse_leftovers(self) -> None:
        """Raise where a bucket started during the pass, and further gradients came for it afterwards."""
        for bucket in self.buckets[: self.launched]:
            for family, place in bucket.members:
                if family.params[place].grad is not None:
                    raise GradientError(
                        f"Parameter {place} of {family.description} got gradients twice in one backward pass: it is "
                        "used inside and outside of a reentrant checkpoint, or two threads run backward at once. Use "
                        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or run the step again: from now "
                        "on this process aggregates at the end of the pass, where this is allowed."
                    )

    def reset(self) -> None:
        """Be ready for the next pass."""
        if self._last and self.launched:
            self._keep_last_hooks(self._last)
        self.launched = 0
        for bucket in self.buckets:
            bucket.forget()

    # Overlap with the pass -------------------------------------------------------------------------------

    def attach(self, ready: ReadyBucket) -> None:
        """Have `ready(plan, bucket)` called during a pass when all gradients of the next bucket are there.

        The first pass has a hook on every parameter, and tells which gradient of each bucket comes last: hooks
        on those are enough later. Should the order change, buckets start later than they could.
        """
        plan = weakref.ref(self)
        for number, bucket in enumerate(self.buckets):
            for family, place in bucket.members:
                parameter = family.references[place]()
                if parameter is not None:
                    hook = functools.partial(_arrived, plan, number, (family, place), ready)
                    self._hooks[family, place] = parameter.register_post_accumulate_grad_hook(hook)

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def arrived(self, number: int, member: Member, ready: ReadyBucket) -> None:
        """A gradient is there: start whatever has become complete, in order."""
        if self._last is not None:
            self._last[number] = member
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if any(gradient is None for gradient in bucket.fresh()) or not ready(self, bucket):
                return

    def _keep_last_hooks(self, last: dict[int, Member]) -> None:
        for member in [member for member in self._hooks if member not in last.values()]:
            self._hooks.pop(member).remove()
        self._last = None


class ReadyBucket(Protocol):
    """Told of a bucket whose gradients are all there. Returns whether it was started."""

    def __call__(self, plan: BucketPlan, bucket: Bucket) -> bool: ...


def _arrived(
    plan: weakref.ref[BucketPlan], number: int, member: Member, ready: ReadyBucket, _parameter: torch.Tensor
) -> None:
    found = plan()
    if found is not None:
        found.arrived(number, member, ready)


def _size(family: ParameterGroup) -> tuple[int, str]:
    """(bytes, type of device) of the gradients that are packed."""
    dense = [slot for slot in family.slots if not slot.sparse]
    return sum(slot.nbytes for slot in dense), dense[0].device.type if dense else "cpu"


def is_large(family: ParameterGroup) -> bool:
    """Whether a family is worth several buckets."""
    nbytes, kind = _size(family)
    return nbytes >= OVERLAP_NBYTES.get(kind, OVERLAP_NBYTES["cuda"])


def bucket_nbytes(family: ParameterGroup) -> int:
    """The least size of a large family's buckets."""
    nbytes, kind = _size(family)
    return max(BUCKET_NBYTES.get(kind, BUCKET_NBYTES["cuda"]), nbytes // 8)
