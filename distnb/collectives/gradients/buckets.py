"""Buckets of gradients, and one bucket's way through a collective.

A `BucketPlan` covers the gradients that are reduced together: all small parameter groups that one backward pass
reaches, in one bucket per device and dtype; or one large group, in several buckets that start during the pass.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.hooks import RemovableHandle

from distnb.collectives.algorithms.aggregation import Aggregation
from distnb.collectives.algorithms.flat_packs import Pack, Packs, Slot
from distnb.collectives.gradients.parameter_groups import AGGREGATED, ParameterGroup
from distnb.compat import torch_internals
from distnb.errors import GradientError

if TYPE_CHECKING:
    from distnb.collectives.group.interface import PendingCollective
    from distnb.collectives.shared_memory.shared_sum import SharedWork

__all__ = ["Bucket", "BucketPlan", "large_packs"]


# A parameter group of at least this size is cut into buckets that start during the pass; smaller ones wait for its end.
OVERLAP_NBYTES = {"cpu": 2**20, "cuda": 4 * 2**20}
# The least size of a bucket, which also holds at least an eighth of its group: each costs a round of messages.
BUCKET_NBYTES = {"cpu": 2**19, "cuda": 4 * 2**20}

_SALTS = 61
# The number of buckets of a plan under way at once: a group has room for a few hundred messages that nobody has waited
# for.
_UNDER_WAY = 16

GradientPlace = tuple[ParameterGroup, int]
"""A parameter: its group, and its place there."""


class Bucket:
    """A group of gradients of one device and dtype, and the flat tensor in which they are sent.

    The tensor's views become the parameters' `.grad`, so nothing is copied back. Users may keep gradients for longer
    than a step, so it is reused only if nobody else holds one of its views or shares its memory. It has `salt` more
    elements than needed, so that two buckets which replicas start in different orders differ in size and are not
    mistaken for each other.
    """

    def __init__(self, members: Sequence[GradientPlace], slots: Sequence[Slot], salt: int) -> None:
        self.members = members
        self._groups = list(dict.fromkeys(group for group, _ in members))
        self._slots, self._salt = slots, salt
        self._packs: list[tuple[Pack, tuple[int, int]]] = []
        self._pack: Pack | None = None
        self._started: PendingCollective | SharedWork | None = None
        self._complete = True

    def fresh(self) -> list[torch.Tensor | None]:
        """Return the gradients that the running pass made so far."""
        return [group.params[place].grad for group, place in self.members]

    def is_plain(self) -> bool:
        """Return whether no parameter had a gradient before the running pass."""
        return not any(group.aside for group in self._groups)

    def start(self, aggregation: Aggregation, scale: float) -> None:
        """Pack the gradients, with those accumulated under no_sync, and start to sum them."""
        gradients = self.fresh()
        if any(group.local for group in self._groups):
            pairs = zip(self.members, gradients, strict=True)
            gradients = [group.contribution(place, gradient, scale) for (group, place), gradient in pairs]
            scale = 1.0
        pack = self._pack = self._idle_pack()
        self._complete = all(gradient is not None for gradient in gradients)
        self._started = aggregation.all_reduce_start(pack.wire, lambda wire: pack.fill(gradients, scale, wire))

    def wait(self) -> None:
        """Wait for the sums, if they are under way."""
        if self._started is not None:
            self._started.wait()
            self._started = None

    def finish(self) -> tuple[list[torch.Tensor], list[bool] | None]:
        """Wait, and return the sums and the parameters for which any replica had a gradient (None: all)."""
        self.wait()
        pack, self._pack = self._pack, None
        assert pack is not None
        used = None if self._complete else (pack.extra[: len(self.members)] != 0).tolist()
        return pack.views, used

    def reset(self) -> None:
        """Prepare for the next pass, even if this one failed."""
        self._pack = self._started = None

    def _idle_pack(self) -> Pack:
        for pack, references in self._packs:
            if _COUNTS_ARE_EXACT and _references(pack) == references:
                return pack
        pack = Pack(self._slots, len(self._slots) + self._salt)
        for view in pack.views:
            AGGREGATED.add(view)
        del view  # no name may hold a view when the references are counted
        # Keep at most two: a program that keeps the gradients of many steps must be their only owner.
        self._packs = [(pack, _references(pack)), *self._packs[:1]]
        return pack


def _references(pack: Pack) -> tuple[int, int]:
    # Python objects that name a view, autograd and optimizers included (the object of a tensor that C++ holds
    # counts once more); and tensors or arrays that share the memory without being a view of ours.
    names = sum(map(sys.getrefcount, pack.views))
    return names, torch_internals.uses_of_storage(pack.flat)


def _counts_are_exact() -> bool:
    """Return whether a tensor's Python reference count shows that a parameter holds it as `.grad`."""
    if not torch_internals.CAN_COUNT_USES:
        return False
    gradient, parameter = torch.zeros(1), torch.nn.Parameter(torch.zeros(1))
    before = sys.getrefcount(gradient)
    parameter.grad = gradient
    return sys.getrefcount(gradient) == before + 1


# If torch counts differently, every step takes a new pack, which is slower and still correct.
_COUNTS_ARE_EXACT = _counts_are_exact()


class BucketPlan:
    """The gradients of some parameter groups, laid out in buckets.

    Args:
        groups: The parameter groups.
        packs: How those of each device and dtype are divided into buckets.
        start: Needed for one large group whose buckets start during the pass, in the order in which gradients become
            ready. Called, possibly on autograd's thread, when all gradients of the next bucket are ready; returns
            whether it has started the bucket.

    Attributes:
        sparse: The parameters whose gradients are sparse, and therefore gathered, not packed.
        version: The layout version of the (first) group.
        identity: The identity of the (first) group.
        launched: Number of buckets that have started in this pass, always the first ones.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        packs: Packs,
        start: Callable[[BucketPlan, Bucket], bool] | None = None,
    ) -> None:
        members = [(group, place) for group in groups for place in group.slots]
        self.sparse = [(group, place) for group, place in members if group.slots[place].sparse]
        self.version = groups[0].layout_version
        self.identity = groups[0].identity
        self.launched = 0
        self._start = start
        salt = groups[0].identity[1] % _SALTS if start is not None else 0
        self.buckets = self._cut(packs, [member for member in members if member not in self.sparse], salt)
        self._hooks: dict[GradientPlace, RemovableHandle] = {}
        self._last: dict[int, GradientPlace] | None = {}
        if start is not None:
            self._attach()

    def _cut(self, packs: Packs, members: list[GradientPlace], salt: int) -> list[Bucket]:
        if self._start is not None:
            members.reverse()  # roughly the order in which gradients become ready
        slots = [group.slots[place] for group, place in members]
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, slot in enumerate(slots):
            kinds.setdefault((slot.device, slot.dtype), []).append(index)
        cut = [
            [indices[place] for place in places]
            for indices in kinds.values()
            for places in packs.cut([slots[index].nbytes for index in indices])
        ]
        # Buckets start in order: one whose gradients are ready early must not wait for one of another kind.
        cut.sort(key=lambda indices: indices[-1])
        return [Bucket([members[i] for i in indices], [slots[i] for i in indices], salt) for indices in cut]

    # Reducing --------------------------------------------------------------------------------------------

    def start_bucket(self, bucket: Bucket, aggregation: Aggregation, scale: float) -> None:
        """Start the next bucket."""
        if self.launched >= _UNDER_WAY:
            self.buckets[self.launched - _UNDER_WAY].wait()
        bucket.start(aggregation, scale)
        self.launched += 1

    def start_rest(self, aggregation: Aggregation, scale: float) -> None:
        """Start, after the pass, the buckets that have not started during it.

        Raises:
            GradientError: A bucket started during the pass, and further gradients came for it afterwards.
        """
        for bucket in self.buckets[: self.launched]:
            for (group, place), gradient in zip(bucket.members, bucket.fresh(), strict=True):
                if gradient is not None:
                    raise GradientError(
                        f"Parameter {place} of {group.description} got gradients twice in one backward pass: it is "
                        "used inside and outside of a reentrant checkpoint, or two threads run backward at once. Use "
                        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or run the step again: from now "
                        "on this process aggregates at the end of the pass, where this is allowed."
                    )
        for bucket in self.buckets[self.launched :]:
            self.start_bucket(bucket, aggregation, scale)

    def reset(self) -> None:
        """Prepare for the next pass."""
        if self._last and self.launched:
            # The first pass has shown which gradient of each bucket is ready last: hooks on these are enough from now
            # on. (A hook takes 3.5 µs.) If the order changes, buckets start later than they could.
            for member in [member for member in self._hooks if member not in self._last.values()]:
                self._hooks.pop(member).remove()
            self._last = None
        self.launched = 0
        for bucket in self.buckets:
            bucket.reset()

    # Overlap with the pass -------------------------------------------------------------------------------

    def _attach(self) -> None:
        plan = weakref.ref(self)
        for number, bucket in enumerate(self.buckets):
            for group, place in bucket.members:
                parameter = group.references[place]()
                if parameter is not None:
                    hook = functools.partial(_arrived, plan, number, (group, place))
                    self._hooks[group, place] = parameter.register_post_accumulate_grad_hook(hook)

    def detach(self) -> None:
        """Stop starting buckets during a pass."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def arrived(self, number: int, member: GradientPlace) -> None:
        """Handle the arrival of a bucket's gradient: start the buckets that are complete, in order."""
        if self._last is not None:
            self._last[number] = member
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if self._start is None or any(g is None for g in bucket.fresh()) or not self._start(self, bucket):
                return
            # A gradient that arrives later must not be mistaken for one in the bucket.
            for group, place in bucket.members:
                group.params[place].grad = None


def _arrived(plan: weakref.ref[BucketPlan], number: int, member: GradientPlace, _parameter: torch.Tensor) -> None:
    found = plan()
    if found is not None:
        found.arrived(number, member)


def large_packs(group: ParameterGroup) -> Packs | None:
    """Return the division of a group's gradients if it is worth several buckets, and None for a smaller one."""
    dense = [slot for slot in group.slots.values() if not slot.sparse]
    nbytes = sum(slot.nbytes for slot in dense)
    kind = "cpu" if not dense or dense[0].device.type == "cpu" else "cuda"
    return Packs(max(BUCKET_NBYTES[kind], nbytes // 8)) if nbytes >= OVERLAP_NBYTES[kind] else None
