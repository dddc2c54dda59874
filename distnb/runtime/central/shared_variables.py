"""Variables in central storage: tensors of all replicas of a machine that share one memory.

Each replica has its own tensor objects, as under any strategy. Only the memory behind them is the same. A program's
in-place change is private to its replica at first (see `collectives/shared_memory/segment.py`), as if the replica had a
copy. All replicas *synchronise* together. A change to the same values on all of them then becomes the common value, and
changes to different values are an error:

    replica 0: w.fill_(2)    replica 1: w.fill_(2)    synchronise: w is 2, once
    replica 0: w.fill_(2)    replica 1: w.fill_(3)    synchronise: OutOfSyncError

For parameters on an accelerator, the replicas share the host tensors (`host_tensors.py`).
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from distnb.collectives.shared_memory.segment import SharedMemory
from distnb.errors import OutOfSyncError
from distnb.runtime.central.host_tensors import HostTensors

if TYPE_CHECKING:
    from distnb.collectives.gradients.parameter_groups import Identity
    from distnb.collectives.group.interface import Group

__all__ = ["SharedVariables"]

_ALIGNMENT = 64

_Number = tuple[int, ...]
"""The number of a shared tensor, the same on every replica: (0, *identity of a parameter's group, its place there); or
for a tensor of `expect_once` (1, a count). A replica that was added or replaced knows parameters in another order."""


@dataclass(eq=False)
class _Place:
    """The place of a tensor in shared memory.

    Attributes:
        number: The number of the tensor.
        owner: The replica that updates the tensor.
        own: A view for the running program. A write makes the page private to this replica.
        common: A view for the owner's updates. All replicas see its writes.
    """

    tensor: weakref.ref[torch.Tensor]
    label: str
    number: _Number
    owner: int
    memory: SharedMemory
    pages: range
    own: torch.Tensor
    common: torch.Tensor

    def point(self, view: torch.Tensor) -> None:
        tensor = self.tensor()
        if tensor is not None:
            tensor.data = view

    def still_holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor still uses this memory. `p.data = …` and `module.to(…)` give it other memory."""
        own = self.own
        same = tensor.device == own.device and tensor.dtype is own.dtype and tensor.data_ptr() == own.data_ptr()
        return same and tensor.shape == own.shape and tensor.stride() == own.stride()


class _Offer(NamedTuple):
    """A replica's description of a tensor to share. The tensor is shared if all replicas' descriptions are equal."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    digest: bytes  # the digest of its content
    nbytes: int  # of its storage
    offset: int


class SharedVariables:
    """The shared variables of one strategy on this replica.

    Attributes:
        hosts: The host tensors of parameters on an accelerator.
    """

    def __init__(self, group: Callable[[], Group]) -> None:
        self.hosts = HostTensors()
        self._group = group
        self._generation: int | None = None
        self._places: dict[int, _Place] = {}
        self._memories: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
        self._known: dict[int, tuple[str, weakref.ref[torch.Tensor], _Number]] = {}
        self._awaited: dict[_Number, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._expected_once = 0
        self._loads: list[int] = []

    def expect(self, label: str, tensor: torch.Tensor, group: Identity, place: int) -> None:
        """Share a variable, a parameter at a place of a group, from the next synchronisation on.

        All replicas must expect the same variables.
        """
        identity, known = id(tensor), self._known
        if identity not in known:
            number = (0, *group, place)
            reference = weakref.ref(tensor, lambda _: known.pop(identity, None))
            known[identity] = (label, reference, number)
            self._awaited[number] = (label, reference)

    def expect_once(self, label: str, tensor: torch.Tensor) -> None:
        """Share a tensor from the next synchronisation on, until it loses its place, such as in a new generation.

        The caller must then expect it again. (A variable of `expect` is shared again automatically.)
        """
        if self.owner_of(tensor) is None:
            self._expected_once += 1
            self._awaited[1, self._expected_once] = (label, weakref.ref(tensor))

    def owner_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the replica that updates a tensor, or None if the tensor is not shared."""
        place = self._places.get(id(tensor))
        return place.owner if place is not None and place.tensor() is tensor else None

    def open(self, tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
        """Direct writes to these tensors to the common memory, and return a function that ends this."""
        places = [place for tensor in tensors if (place := self._places.get(id(tensor))) is not None]
        for place in places:
            place.point(place.common)

        def close() -> None:
            for place in places:
                place.point(place.own)

        return close

    def synchronise(self) -> None:
        """Publish the changes that all replicas have made, and share the tensors that are expected.

        All replicas must call this. It is a barrier: it returns after every replica has called it.

        Raises:
            OutOfSyncError: The replicas changed a variable to different values.
        """
        group = self._group()
        if group.size == 1:
            return
        if group.generation != self._generation:
            self._restart(group)
        self._release_replaced()
        self.hosts.update()
        changed = {memory: pages for memory in self._memories if (pages := memory.changed())}
        waits = any((one := awaited()) is not None and not is_lazy(one) for _, awaited in self._awaited.values())
        gathered = torch.stack(group.all_gather(torch.tensor([waits, bool(changed)], device="cpu")))
        if bool(gathered[:, 1].any()):
            self._publish(group, changed)
        if bool(gathered[:, 0].any()):
            self._collect(group)

    def _restart(self, group: Group) -> None:
        """Discard all places and expect all variables again, for a new generation of replicas.

        A program has failed, or replicas were replaced.
        """
        self._generation = group.generation
        self._release_replaced()
        self._places, self._loads = {}, [0] * group.size
        self._memories = weakref.WeakSet()
        self._awaited = {number: (label, reference) for label, reference, number in list(self._known.values())}
        self._expected_once = 0

    def _release_replaced(self) -> None:
        """Expect tensors again to which a program has given other memory."""
        for identity, place in list(self._places.items()):
            tensor = place.tensor()
            if tensor is not None and not place.still_holds(tensor):
                del self._places[identity]
                self._await_again(tensor)
        for tensor in self.hosts.release_replaced():
            self._await_again(tensor)

    def _await_again(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._known:
            label, reference, number = self._known[id(tensor)]
            self._awaited[number] = (label, reference)

    # Changed tensors ------------------------------------------------------------------------------------------------

    def _publish(self, group: Group, changed: Mapping[SharedMemory, Sequence[int]]) -> None:
        pages = {memory: set(numbers) for memory, numbers in changed.items()}
        places = {place.number: place for place in list(self._places.values())}
        mine = [
            number
            for number, place in places.items()
            if place.memory in pages and not pages[place.memory].isdisjoint(place.pages)
        ]
        numbers = sorted({number for theirs in group.all_gather_object(mine) for number in theirs})
        digests = {number: _digest(_bytes(places[number].own)) for number in numbers if number in places}
        everyones: list[dict[_Number, bytes]] = group.all_gather_object(digests)
        for number in numbers:
            # A replica that has freed its tensor has no digest, and is left out of the comparison.
            if len({theirs[number] for theirs in everyones if number in theirs}) > 1:
                raise _drifted(places.get(number), number, everyones)
        for number in digests:
            if next(rank for rank, theirs in enumerate(everyones) if number in theirs) == group.rank:
                _bytes(places[number].common).copy_(_bytes(places[number].own))
        group.barrier()
        for memory, own in changed.items():
            memory.forget(own)

    # New tensors ----------------------------------------------------------------------------------------------------

    def _collect(self, group: Group) -> None:
        tensors: dict[_Number, torch.Tensor] = {}
        seen: set[int] = set()
        for number, (_, reference) in list(self._awaited.items()):
            tensor = reference()
            is_known = id(tensor) in seen or (tensor is not None and self.owner_of(tensor) is not None)
            if tensor is None or is_known or not (is_lazy(tensor) or _can_be_shared(tensor)):
                del self._awaited[number]
            elif not is_lazy(tensor):
                seen.add(id(tensor))
                tensors[number] = self.hosts.of(tensor)
        # Tensors that share a storage, such as views, must keep sharing it, so they are not moved.
        there = [*tensors.values(), *(place.own for place in list(self._places.values()))]
        memories = Counter(tensor.untyped_storage().data_ptr() for tensor in there)
        for number, tensor in list(tensors.items()):
            if memories[tensor.untyped_storage().data_ptr()] > 1:
                del self._awaited[number], tensors[number]
        offers = {number: _offer(tensor) for number, tensor in tensors.items()}
        labels = {number: self._awaited[number][0] for number in tensors}
        everyones: list[tuple[dict[_Number, _Offer], set[_Number]]]
        everyones = group.all_gather_object((offers, set(self._awaited)))
        gathered = [theirs for theirs, _ in everyones]
        # Garbage collectors run at different times. A tensor that one replica has freed, or a new one never got, is not
        # shared. A lazy one is awaited.
        common = sorted(number for number in offers if all(number in theirs for theirs in gathered))
        apart = {number for number in offers if not all(number in awaited for _, awaited in everyones)}
        for number in apart.union(common):
            del self._awaited[number]
        unlike = [number for number in common if any(each[number] != offers[number] for each in gathered)]
        if unlike:
            warnings.warn(
                f"The replicas do not hold the same values of {len(unlike)} variables of central storage, such as "
                f"{labels[unlike[0]]}: each keeps copies of these, as under MirroredStrategy.",
                UserWarning,
                stacklevel=2,
            )
        common = [number for number in common if number not in unlike]
        if not common:
            return
        sizes = [-(-offers[number].nbytes // _ALIGNMENT) * _ALIGNMENT for number in common]
        *begins, nbytes = accumulate(sizes, initial=0)
        memory = SharedMemory(group, nbytes)
        self._memories.add(memory)
        places = []
        for number, begin in zip(common, begins, strict=True):
            owner = self._loads.index(min(self._loads))  # the replica that owns the fewest bytes
            self._loads[owner] += offers[number].nbytes
            place = _placed(tensors[number], labels[number], offers[number], number, owner, memory, begin)
            places.append(place)
            if owner == group.rank:
                _bytes(places[-1].common).copy_(_bytes(tensors[number]))
        group.barrier()
        for number, place in zip(common, places, strict=True):
            self._put(tensors[number], place)

    def _put(self, tensor: torch.Tensor, place: _Place) -> None:
        identity = id(tensor)
        place.tensor = weakref.ref(tensor, lambda _: self._places.pop(identity, None))
        self._places[identity] = place
        tensor.data = place.own


def _drifted(place: _Place | None, number: _Number, everyones: Sequence[Mapping[_Number, bytes]]) -> OutOfSyncError:
    shown = f"{place.label} of shape {list(place.own.shape)}" if place is not None else "a variable"
    first = everyones[0].get(number)
    unlike = [str(rank) for rank, theirs in enumerate(everyones) if theirs.get(number, first) != first]
    return OutOfSyncError(
        f"Under central storage there is one {shown}, and replicas changed it in place to different values "
        f"(replica {', '.join(unlike)} and replica 0, for example). Change it by an optimizer's step; in the same "
        "way on every replica; or to a value that was reduced first, distnb.get_replica_context().all_reduce(op, "
        "value). For a value that differs by replica use a plain tensor."
    )


def _offer(tensor: torch.Tensor) -> _Offer:
    storage, shape, stride = tensor.untyped_storage(), tuple(tensor.shape), tuple(tensor.stride())
    digest = _digest(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return _Offer(
        shape=shape,
        stride=stride,
        dtype=str(tensor.dtype),
        digest=digest,
        nbytes=storage.nbytes(),
        offset=int(tensor.storage_offset()),
    )


def _placed(
    tensor: torch.Tensor, label: str, offer: _Offer, number: _Number, owner: int, memory: SharedMemory, begin: int
) -> _Place:
    """Return a place for a tensor in shared memory, with the tensor's shape, strides and offset."""
    own, common = (
        torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            part.untyped_storage(), offer.offset, tensor.shape, offer.stride
        )
        for part in (memory.own(begin, offer.nbytes), memory.common(begin, offer.nbytes))
    )
    pages = memory.pages(begin, offer.nbytes)
    return _Place(
        tensor=weakref.ref(tensor),
        label=label,
        number=number,
        owner=owner,
        memory=memory,
        pages=pages,
        own=own,
        common=common,
    )


def _can_be_shared(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())


def _digest(content: torch.Tensor) -> bytes:
    return hashlib.blake2b(content.numpy().data, digest_size=16).digest()
