"""Variables that live once: tensors of all replicas of a machine that lie in memory which they have in common.

Programs hold the same tensors as under any strategy, each replica its own objects; only the memory behind them is the
same. What a program changes in place is this replica's at first (see `collectives/arena.py`), exactly as if it had a
copy; when the replicas next *settle*, which all do together, what each of them has changed to the same values becomes
the common one. What they changed to different values is an error.

An accelerator computes with its own memory only. A replica on one holds, of each variable that is trained, a *copy* in
the device's memory; the variable itself is in the common memory of the host all the same. What a program changes in
place is the copy, and settling takes it over in the same way; whoever writes to the variable has the copies *renewed*.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from distnb.collectives.shared_memory.segment import SharedMemory
from distnb.errors import OutOfSyncError
from distnb.runtime.central.memory_layout import Region, digest, layout_of, memory_of, on_host

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["LARGE_NBYTES", "SharedVariables"]

LARGE_NBYTES = 4096
"""A tensor that no optimizer changes is worth sharing from this size on: a page."""

_ALIGNMENT = 64


@dataclass
class _Place:
    """Where one tensor lies, or what it is a copy of."""

    tensor: weakref.ref[torch.Tensor]
    label: str
    region: Region
    own: torch.Tensor
    common: torch.Tensor

    def still_holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies here, and was not given other memory (`p.data = …`, `module.to(…)`)."""
        own = self.own
        if self.region.copy is not None:
            return not on_host(tensor) and tensor.dtype is own.dtype and tensor.shape == own.shape
        return (
            on_host(tensor)
            and tensor.data_ptr() == own.data_ptr()
            and tensor.dtype is own.dtype
            and tensor.shape == own.shape
            and tensor.stride() == own.stride()
        )


@dataclass(frozen=True)
class _Offer:
    """A tensor that is to be shared, as each replica describes its own.

    Attributes:
        digest: Of its memory: only what is equal everywhere can be shared.
        memory: What it shares its memory with: the number of a region, or ("new", the first such tensor's number).
    """

    label: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    nbytes: int
    digest: bytes
    memory: Any


class SharedVariables:
    """The variables of one strategy, as this replica sees them.

    Args:
        group: Gives the process group of the present generation.
    """

    def __init__(self, group: Callable[[], Group]) -> None:
        self._group = group
        self._generation: int | None = None
        self._places: dict[int, _Place] = {}
        self._regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
        self._arenas: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
        self._known: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}  # in the same order on every replica
        self._awaited: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._expected = 0
        self._numbers = 0
        self._loads: list[int] = []

    # Who is one ---------------------------------------------------------------------------------------------------

    def expect(self, label: str, tensor: torch.Tensor) -> None:
        """Share a tensor, if it is worth it, from the next time on that the replicas settle. All expect the same."""
        identity, known = id(tensor), self._known
        # What nobody trains is never written to in the common memory: on an accelerator the copies would be all of it.
        large = tensor.nbytes >= LARGE_NBYTES and on_host(tensor)
        if identity in known or not (tensor.requires_grad or is_lazy(tensor) or large):
            return
        known[identity] = (label, weakref.ref(tensor, lambda _: known.pop(identity, None)))
        self._expected += 1
        self._awaited[self._expected] = known[identity]

    def region_of(self, tensor: object) -> Region | None:
        """Where a tensor lies; None if it is not shared."""
        place = self._places.get(id(tensor))
        return place.region if place is not None and place.tensor() is tensor else None

    def put(self, label: str, tensor: torch.Tensor, region: Region) -> None:
        """Have a tensor lie in a region: its shape, strides and place in its memory stay.

        One on an accelerator stays where it is, as a copy of what is in the region.
        """
        layout = layout_of(tensor)
        views = [
            torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, layout.offset, tensor.shape, layout.stride)
            for storage in (region.own, region.common)
        ]
        identity = id(tensor)
        gone = weakref.ref(tensor, lambda _: self._places.pop(identity, None))
        self._places[identity] = _Place(gone, label, region, *views)
        if on_host(tensor):
            tensor.data = views[0]
        else:
            region.copy = weakref.ref(tensor)

    def masters(self, tensors: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """The common memory of those tensors that are copies of it, as tensors of the host."""
        places = [self._places.get(id(tensor)) for tensor in tensors]
        return {
            tensor: place.common.detach()
            for place in places
            if place is not None and place.region.copy is not None and (tensor := place.tensor()) is not None
        }

    def renew(self, tensors: Iterable[torch.Tensor]) -> None:
        """Bring what is in the common memory to those tensors that are copies of it."""
        with torch.no_grad():
            for tensor, master in self.masters(tensors).items():
                tensor.detach().copy_(master)

    @contextmanager
    def opened(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """While this is entered, what is written to these tensors is written to the common memory."""
        found = [place for tensor in tensors if (place := self._places.get(id(tensor))) is not None]
        places = [place for place in found if place.region.copy is None]
        try:
            for place in places:
                _point(place, place.common)
            yield
        finally:
            for place in places:
                _point(place, place.own)

    # Together -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Share what is to be shared, and make common what all replicas changed alike. All replicas call this.

        When it returns, every replica has called it.

        Raises:
            OutOfSyncError: They changed a variable to different values.
            CollectiveError: They cannot share memory.
        """
        group = self._group()
        if group.size == 1:
            return
        if group.generation != self._generation:
            self._start_anew(group)
        self._let_go_of_replaced()
        changed = {arena: pages for arena in self._arenas if (pages := arena.changed())}
        copies = {region.number for region in list(self._regions.values()) if region.copy_differs()}
        waits = any(
            (tensor := reference()) is not None and not is_lazy(tensor) for _, reference in self._awaited.values()
        )
        told = torch.stack(group.all_gather(torch.tensor([waits, bool(changed or copies)], device="cpu")))
        if bool(told[:, 1].any()):
            self._publish(group, changed, copies)
        if bool(told[:, 0].any()):
            self._take_in(group)

    def allot(self, group: Group, wanted: Sequence[tuple[int, int]]) -> list[Region]:
        """New memory for several regions. All replicas call this with the same.

        Args:
            group: The replicas.
            wanted: The size and the owner of each.
        """
        begins, end = [], 0
        for nbytes, _ in wanted:
            begins.append(end)
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        arena = SharedMemory(group, end)
        self._arenas.add(arena)
        made = []
        for begin, (nbytes, owner) in zip(begins, wanted, strict=True):
            self._numbers += 1
            region = Region(self._numbers, owner, arena, begin, nbytes)
            self._regions[region.number] = region
            made.append(region)
        return made

    def _start_anew(self, group: Group) -> None:
        """A program was ended, or replicas were replaced: whoever is there now shares everything that there is."""
        self._generation = group.generation
        self._let_go_of_replaced()
        self._places, self._loads = {}, [0] * group.size
        self._regions, self._arenas = weakref.WeakValueDictionary(), weakref.WeakSet()
        self._awaited = dict(enumerate(self._known.values()))
        self._expected, self._numbers = len(self._awaited), 0

    def _let_go_of_replaced(self) -> None:
        """Tensors that a program gave other memory move to common memory once more."""
        for identity, place in list(self._places.items()):
            tensor = place.tensor()
            if tensor is None or place.still_holds(tensor):
                continue
            here = place.region.copy is None and on_host(tensor)
            if here and tensor.data_ptr() == place.common.data_ptr():  # a program was ended while it was open
                tensor.data = place.own
                continue
            del self._places[identity]
            self._known.pop(identity, None)
            self.expect(place.label, tensor)

    # What was changed -----------------------------------------------------------------------------------------------

    def _publish(self, group: Group, changed: Mapping[SharedMemory, Sequence[int]], copies: AbstractSet[int]) -> None:
        pages = {arena: set(numbers) for arena, numbers in changed.items()}
        mine = [
            region.number
            for region in list(self._regions.values())
            if region.number in copies or (region.arena in pages and not pages[region.arena].isdisjoint(region.pages))
        ]
        numbers = sorted({number for told in group.all_gather_object(mine) for number in told})
        regions = {number: self._regions.get(number) for number in numbers}
        digests = {number: digest(region.seen()) for number, region in regions.items() if region is not None}
        everyones: list[dict[int, bytes]] = group.all_gather_object(digests)
        for number in numbers:
            # One that a replica's garbage collector has freed is nobody's any more.
            if len({told[number] for told in everyones if number in told}) > 1:
                raise self._drifted(number, everyones)
        for number, region in regions.items():
            writers = [rank for rank, told in enumerate(everyones) if number in told]
            if region is not None and writers[0] == group.rank:
                memory_of(region.common).copy_(region.seen())
        group.barrier()
        for arena, own in changed.items():
            arena.forget(own)

    def _drifted(self, number: int, everyones: Sequence[Mapping[int, bytes]]) -> OutOfSyncError:
        place = next((place for place in list(self._places.values()) if place.region.number == number), None)
        shown = f"{place.label} of shape {list(place.own.shape)}" if place is not None else "a variable"
        first = everyones[0].get(number)
        unlike = [str(rank) for rank, told in enumerate(everyones) if told.get(number, first) != first]
        return OutOfSyncError(
            f"Under central storage there is one {shown}, and replicas changed it in place to different values "
            f"(replica {', '.join(unlike)} and replica 0, for example). Change it by an optimizer's step; in the same "
            "way on every replica; or to a value that was brought together first, "
            "distnb.get_replica_context().all_reduce(op, value). What each replica needs for itself is a plain tensor."
        )

    # What is new ----------------------------------------------------------------------------------------------------

    def _take_in(self, group: Group) -> None:
        tensors: dict[int, torch.Tensor] = {}
        for number, (_, reference) in list(self._awaited.items()):
            tensor = reference()
            if tensor is None or (not is_lazy(tensor) and not _can_be_shared(tensor)):
                del self._awaited[number]
            elif not is_lazy(tensor):
                tensors[number] = tensor
        offers = self._offers(tensors)
        told: list[dict[int, _Offer]] = group.all_gather_object(offers)
        # Garbage collectors run when they like: what is gone on one replica is of no use to the others.
        common = [number for number in offers if all(number in each for each in told)]
        for number in common:
            del self._awaited[number]
        if not common or any(each[number] != offers[number] for each in told for number in common):
            warnings.warn(
                f"The replicas do not hold the same {len(common) or len(offers)} variables of central storage, such as "
                f"{next(iter(offers.values())).label if offers else 'those of another replica'}: each keeps copies of "
                "its own, as under MirroredStrategy.",
                UserWarning,
                stacklevel=2,
            )
            return
        regions = self._regions_for(group, [(number, offers[number]) for number in common])
        for number in common:
            region, tensor = regions[number], tensors[number]
            if region.owner == group.rank and self.region_of(tensor) is None:
                region.write(tensor)
        group.barrier()
        for number in common:
            self.put(offers[number].label, tensors[number], regions[number])

    def _offers(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, _Offer]:
        known: dict[int, Any] = {region.own.data_ptr(): region.number for region in self._regions.values()}
        offers = {}
        for number, tensor in tensors.items():
            layout = layout_of(tensor)
            # Each tensor of an accelerator is a copy of a memory of its own.
            memory = known.setdefault(layout.address, ("new", number)) if on_host(tensor) else ("new", number)
            offers[number] = _Offer(
                self._awaited[number][0],
                tuple(tensor.shape),
                layout.stride,
                str(tensor.dtype),
                layout.nbytes,
                digest(tensor),
                (memory, layout.offset),
            )
        return offers

    def _regions_for(self, group: Group, offers: Sequence[tuple[int, _Offer]]) -> dict[int, Region]:
        """The region of each tensor: an existing one, or a new one of the replica that has least to do."""
        wanted: dict[Any, tuple[int, int]] = {}
        for _, offer in offers:
            memory = offer.memory[0]
            if isinstance(memory, tuple) and memory not in wanted:
                owner = self._loads.index(min(self._loads))
                self._loads[owner] += offer.nbytes
                wanted[memory] = (offer.nbytes, owner)
        made: dict[Any, Region] = {}
        if wanted:
            made = dict(zip(wanted, self.allot(group, list(wanted.values())), strict=True))
        return {number: made.get(offer.memory[0]) or self._regions[offer.memory[0]] for number, offer in offers}


def _point(place: _Place, view: torch.Tensor) -> None:
    tensor = place.tensor()
    if tensor is not None:
        tensor.data = view


def _can_be_shared(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0
