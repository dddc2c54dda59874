"""The numbered objects of a pack, which both ends keep until all its values were sent again or are forgotten."""

from __future__ import annotations

import bisect
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import xxhash

from distnb.compat.pickle_internals import objects_in_memo
from distnb.objects.collecting import no_collection
from distnb.objects.memory.blocks import MemoryBlock
from distnb.objects.merging import ATOMS
from distnb.objects.packing import OFFSET_BITS, Packed, Packer

__all__ = ["PackTable", "pairs_with", "part_of", "serial_of"]

# The bits of a number, from the lowest on: OFFSET_BITS for the place in the part, 64 for the name's digest, and the
# serial of the pack.
_NAME_BITS = 64
_OFFSETS = (1 << OFFSET_BITS) - 1


def part_of(serial: int, name: str) -> int:
    """Return the number of a name's part of a pack."""
    return serial << _NAME_BITS | xxhash.xxh3_64_intdigest(name.encode())


def serial_of(number: int) -> int:
    """Return the serial of the pack to which the number of an object belongs."""
    return number >> OFFSET_BITS + _NAME_BITS


class PackTable:
    """The objects of one pack, by their places.

    Args:
        packed: The pack.
        roots: The lists, of one item each, in which the values were pickled.
        coder: The pickler or the opener. Its memo contains the places.

    Attributes:
        wanted: The current names of the values that the other end still has.
        serials_used: The serials of earlier packs to whose objects this pack refers by number.
    """

    def __init__(self, packed: Packed, roots: list[Any], coder: Any) -> None:
        self.serial = packed.serial
        self.names = list(packed.names)
        self.wanted = set(self.names)
        self.serials_used = {part >> _NAME_BITS for part in coder.parts_used}
        self._starts = packed.starts
        self._parts = [part_of(packed.serial, name) for name in packed.names]
        self._indices = {part: index for index, part in enumerate(self._parts)}
        self._batches = [(packed.names.index(name), batch) for name, batch in coder.batches]
        self._own: set[int] = set()  # the indices of parts whose objects have other numbers at the other end
        self._roots = roots
        self._coder = coder
        self._objects: dict[int, Any] | None = None
        self._numbers: dict[int, int] | None = None

    @property
    def objects(self) -> dict[int, Any]:
        """The objects that have numbers, by their places. They are read from the memo at the first use."""
        if self._objects is None:
            with no_collection():
                memo = self._coder.memo.copy()
                if isinstance(self._coder, Packer):
                    memo = dict(memo.values())
                # Objects that are sent by reference have ids, and no numbers.
                apart = {id(obj) for obj in (*self._roots, *self._coder.referred)}
                self._objects = {
                    place: obj
                    for place, obj in memo.items()
                    if (type(obj) not in ATOMS or type(obj) is MemoryBlock) and id(obj) not in apart
                }
                self._drop_own()
            # Release the arrived objects that were merged into existing ones.
            self._coder, self._roots = None, []
        return self._objects

    def replace(self, objects: dict[int, Any]) -> None:
        """Replace the arrived objects by the objects into which they were merged."""
        self._objects = objects
        self._numbers = None

    def rename(self, old: str, new: str) -> None:
        """Give a value another name."""
        self.names = [new if name == old else name for name in self.names]
        self.wanted = {new if name == old else name for name in self.wanted}

    def retire_numbers(self, parts: Iterable[int]) -> None:
        """Stop using the numbers of these parts. The other end has other numbers for their objects."""
        self._own.update(self._indices[part] for part in parts if part in self._indices)
        self._numbers = None
        if self._objects is not None:
            self._drop_own()

    def _drop_own(self) -> None:
        if self._own and self._objects is not None:
            self._objects = {
                place: obj for place, obj in self._objects.items() if self._index_of(place) not in self._own
            }

    def drop_unreferenced(self, newer: Sequence[PackTable]) -> list[int]:
        """Drop the unreferenced objects of values that are no longer wanted. Return the parts that this empties.

        This only frees memory: an object without references is never sent again. An object in a newer table has a newer
        number.
        """
        idle = {index for index, name in enumerate(self.names) if name not in self.wanted} - self._own
        places = sorted(place for place in self.objects if self._index_of(place) in idle)
        batched = {id(tensor) for index, batch in self._batches if index in idle for tensor in batch}
        self._numbers, left = None, set[int]()
        for place in places:  # containers come before their items
            key = id(self.objects[place])
            if type(self.objects[place]) is MemoryBlock or key in batched:
                continue  # arrays use the memory without a reference to the block
            if _references(self.objects, place) > _REFERENCES_OF_ONE_ALONE and not any(
                key in table.numbers for table in newer
            ):
                left.add(self._index_of(place))
            else:
                del self.objects[place]
        return [self._parts[index] for index in idle - left]

    @property
    def numbers(self) -> dict[int, int]:
        """The numbers by the `id()` of the objects."""
        if self._numbers is None:
            bases = [(part << OFFSET_BITS) - start for part, start in zip(self._parts, self._starts, strict=False)]
            with no_collection():
                if len(bases) == 1:
                    self._numbers = {id(obj): bases[0] + place for place, obj in self.objects.items()}
                else:
                    self._numbers = {
                        id(obj): bases[self._index_of(place)] + place for place, obj in self.objects.items()
                    }
        return self._numbers

    def number_at(self, place: int) -> int:
        """Return the number of the object at a place."""
        index = self._index_of(place)
        return self._parts[index] << OFFSET_BITS | (place - self._starts[index])

    def find(self, number: int) -> Any:
        """Return the object of a number."""
        return self.objects[self._starts[self._indices[number >> OFFSET_BITS]] + (number & _OFFSETS)]

    @property
    def idle_nbytes(self) -> int:
        """The bytes of memory of values that are no longer wanted, less the bytes of wanted values."""
        found = 0
        for index, batch in self._batches:
            found += sum(tensor.nbytes for tensor in batch) * (-1 if self.names[index] in self.wanted else 1)
        for place, obj in self.objects.items():
            if type(obj) is MemoryBlock:
                found += -obj.nbytes if self.names[self._index_of(place)] in self.wanted else obj.nbytes
        return found

    def put(self, number: int, obj: Any) -> None:
        """Give a number to another object, which represents the earlier one from now on."""
        place = self._starts[self._indices[number >> OFFSET_BITS]] + (number & _OFFSETS)
        if self.objects[place] is not obj:
            self.objects[place] = obj
            self._numbers = None

    def name_of(self, number: int) -> str:
        """Return the name of the value that brought an object."""
        return self.names[self._indices[number >> OFFSET_BITS]]

    def _index_of(self, place: int) -> int:
        """Return the index of the part that contains a place."""
        return bisect.bisect_right(self._starts, place) - 1


def _references(objects: dict[int, Any], place: int) -> int:
    return sys.getrefcount(objects[place])


_REFERENCES_OF_ONE_ALONE = _references({0: object()}, 0)


def pairs_with(packer: Packer, tables: Sequence[PackTable]) -> tuple[array[int], tuple[int, ...]]:
    """Return the pairs (place now, number before) of the objects in a pack that earlier packs have brought.

    In a pair, the part's number is replaced by its index in the second result, the numbers of parts.
    """
    pairs, parts = array("Q"), dict[int, int]()
    if tables:
        with no_collection():
            memo = packer.memo.copy() if _has_any(packer, tables) else {}
            for each in tables if memo else ():
                for key in each.numbers.keys() & memo.keys():
                    part, offset = divmod(each.numbers[key], 1 << OFFSET_BITS)
                    pairs.extend((memo[key][0], parts.setdefault(part, len(parts)) << OFFSET_BITS | offset))
            del memo
    return pairs, tuple(parts)


def _has_any(packer: Packer, tables: Sequence[PackTable]) -> bool:
    """Return whether a pack has an object of these tables. This takes a fraction of the time of copying its memo."""
    objects = objects_in_memo(packer)
    if sum(len(each.numbers) for each in tables) < len(objects):
        return not set[int]().union(*(each.numbers for each in tables)).isdisjoint(map(id, objects))
    ids = set(map(id, objects))
    return any(not ids.isdisjoint(each.numbers) for each in tables)
