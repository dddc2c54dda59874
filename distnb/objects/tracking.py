"""An end of a pair of processes that keep objects equal: the values the other end has, their digests and numbers.

Both ends work alike. Before a program the notebook digests the values that it reads, and packs those that the engines
lack or have with other content. The engines open the pack. After the program they digest the same values again and
pack what changed, and the notebook opens that. A digest is compared only with an earlier digest of the same end.

Every object has a number, equal at both ends and on all engines that have packed the same value. It consists of the
serial of the pack, a digest of the name, and the object's place in that name's part of the pickle's memo. It does not
depend on the other content of the pack. Each end keeps the numbers of a pack until all its names have been sent again
or are forgotten. When a value is sent again, pairs of numbers identify the objects in it that the receiver already has.
The receiver updates them in place, so they keep their identity.

An example. The notebook has `records = [a, b]` with `a = [1]` and `b = [2]`, and sends it in pack 8::

    place in the part "records"    0                   1          2    3
    object                         (list of the root)  records    a    b

A replica runs `records.reverse()`. The digest differs, so the engine packs the value again, as pack 9. The places are
different now, and the pairs (place now, number before) identify the objects::

    place                          1                   2                 3
    object                         records             b                 a
    pair                           (1, 8/records/1)    (2, 8/records/3)  (3, 8/records/2)

The notebook finds its own `records`, `b` and `a` by these numbers and only changes the order in its list: `records` is
still the same list, and `records[1] is a`. By place, `a` would have received the content of `b`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from distnb.objects.code.definitions import parts_of
from distnb.objects.collecting import no_collection
from distnb.objects.digesting import Digester, Digests, Side
from distnb.objects.memory.blocks import MemoryBlock, MemoryBlocks
from distnb.objects.merging import Merge
from distnb.objects.opening import Opener, is_lost, pairs_in
from distnb.objects.pack_tables import PackTable, pairs_with, part_of, serial_of
from distnb.objects.packing import OFFSET_BITS, Packed, Packer
from distnb.objects.placeholder import Placeholder, cure_for, label_of, refusal

__all__ = ["Tracker"]

_IDLE_NBYTES = 1 << 20


@dataclass
class _Record:
    """The value that the other end has under a name, and its digest."""

    root: Any
    digest: bytes
    parts: tuple[Any, ...] | None = None  # see `parts_of`: a function with the same parts need not be pickled again


class Tracker:
    """An end of the pair.

    Args:
        side: This process.
        place: The device for tensors that were on an accelerator: one of torch's devices, or "cpu".
    """

    def __init__(self, side: Side, place: str = "cpu") -> None:
        self.side = side
        self._place = place
        self._records: dict[str, _Record] = {}
        self._tables: dict[int, PackTable] = {}
        self._tentative: PackTable | None = None  # the objects of the latest pack, which have earlier numbers, too
        self._shrunk: set[int] = set()  # the serials of tables with values that recently ceased to be wanted
        self._memories = MemoryBlocks()

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def root(self, name: str) -> Any:
        """Return this end's object for the value that the other end has under a name."""
        return self._records[name].root

    @property
    def names(self) -> list[str]:
        """The names under which the other end has values."""
        return list(self._records)

    # -- comparing -----------------------------------------------------------------------------------------------------

    @no_collection()
    def digest(
        self, values: Mapping[str, Any], digests: Digests | None = None, create: Callable[[], Digester] | None = None
    ) -> Digests:
        """Digest values.

        Args:
            values: The values by name.
            digests: Earlier digests, to which these are added.
            create: Creates the pickler when the first value has to be pickled; None for a `Digester`.
        """
        digests = Digests() if digests is None else digests
        digester: Digester | None = None  # created on demand, which takes longer than comparing a function's parts
        waiting = dict(values)
        while waiting:
            for name, value in waiting.items():
                record = self._records.get(name)
                if record is not None and record.parts is not None and record.parts == parts_of(value):
                    digests.add_function(value)
                    digests.by_name[name] = record.digest
                    continue
                if digester is None:
                    digester = Digester(self.side) if create is None else create()
                    digester.seen = digests
                digester.begin(name, value)
                try:
                    digests.by_name[name] = digester.digest_of(value)
                    if digester.plain:
                        digests.plain[name] = digester.plain
                    if digester.arranged:
                        digests.unordered.add(name)
                except Exception as error:  # pickling may raise any error  # noqa: BLE001
                    digests.refused[name] = _refused(name, value, error)
                    digests.by_name[name] = repr(digests.refused[name]).encode()
            waiting = {name: cls for name, cls in digests.classes.items() if name not in digests.by_name}
        return digests

    def lacking(self, values: Mapping[str, Any], digests: Digests) -> list[str]:
        """Return the names under which the other end has no value, another object, or one with another digest."""
        return [
            name
            for name, value in values.items()
            if (record := self._records.get(name)) is None
            or record.root is not value
            or record.digest != digests.by_name[name]
        ]

    # -- sending -------------------------------------------------------------------------------------------------------

    @no_collection()
    def pack(
        self,
        serial: int,
        values: Mapping[str, Any],
        digests: Digests,
        lacking: Iterable[str],
        held: dict[str, set[str]] | None = None,
        *,
        tentative: bool = False,
    ) -> Packed:
        """Pack the values that the other end lacks, and record that it has them.

        Args:
            serial: The serial of the pack, unique at both ends.
            values: All values that a program reads or has read. Values that are not lacking are sent by number.
            digests: The digests of the values.
            lacking: The names of the lacking values.
            held: A dict that receives, for each packed name, the names of the values that brought objects in its value.
            tentative: True if the other end may refuse the new numbers. The objects keep their earlier numbers, too,
                until `settle`.
        """
        names = list(lacking)
        kept = {name for name in values if name in self._records} - set(names)
        tables = list(self._tables.values())
        sources = [table for table in tables if not kept.isdisjoint(table.wanted)]
        of_classes = self._parts_of_classes(
            {name: values[name] for name in names if issubclass(type(values[name]), type)}
        )

        def known(obj: Any) -> int | None:
            # A kept value may refer to changed memory or to a changed class: other parts of the memory have changed,
            # and a class has a digest of its own.
            if type(obj) is MemoryBlock or id(obj) in of_classes:
                return None
            for table in sources:
                number = table.numbers.get(id(obj))
                if number is not None and (came_with := table.name_of(number)) in kept & table.wanted:
                    packer.parts_used.add(number >> OFFSET_BITS)
                    if held is not None:
                        held.setdefault(name, set()).add(came_with)
                    return number
            return None

        while True:
            packer = Packer(self.side, known if sources else None, self.number_of, self._memories)
            packer.seen.large = digests.large
            roots = [[digests.refused.get(name, values[name])] for name in names]
            name, ends = "", [0]
            try:
                for name, root in zip(names, roots, strict=True):
                    packer.begin(name, root[0])
                    if name in digests.plain:
                        packer.send_together(name, self._new(digests.plain[name]))
                    packer.dump(root)
                    ends.append(packer.file.tell())
                roots.append([])  # its place is the end of the last part
                packer.dump(roots[-1])
                starts = tuple(map(packer.place_of, roots))
                break
            except Exception as error:  # pickling may raise any error
                if name in digests.refused:
                    raise
                digests.refused[name] = _refused(name, values[name], error)
        pairs, parts = pairs_with(packer, tables)
        data = packer.file.getvalue()
        pickles = [memoryview(data)[start:end] for start, end in itertools.pairwise(ends)]
        packed = Packed(
            serial=serial,
            names=tuple(names),
            data=data,
            buffers=tuple(packer.buffers),
            starts=starts,
            pairs=pairs.tobytes(),
            parts=parts,
            pickle_digests=tuple(map(xxhash.xxh3_64_digest, pickles)),
        )
        if held is not None and pairs:
            for within, found in packed.parts_within().items():
                held.setdefault(within, set()).update(self.name_of(part << OFFSET_BITS) for part in found)
        table = PackTable(packed, roots, packer)
        if tentative:
            self._tentative = self._tables[table.serial] = table
        else:
            self._add(table)
        for name in names:
            self._records[name] = _Record(values[name], digests.by_name[name], parts_of(values[name]))
        return packed

    @property
    def is_settled(self) -> bool:
        """True if no value has been packed tentatively since `settle`."""
        return self._tentative is None

    def settle(self, refused: Collection[int] = ()) -> None:
        """End the use of the earlier numbers of values that were packed tentatively.

        Args:
            refused: The parts of packs whose numbers the other end does not use. Their values keep the earlier numbers.
        """
        table, self._tentative = self._tentative, None
        if table is not None and self._tables.pop(table.serial, None) is not None:
            table.wanted = {name for name in table.wanted if part_of(table.serial, name) not in refused}
            self._add(table)

    def _parts_of_classes(self, classes: Mapping[str, type]) -> set[int]:
        """Return the `id()`s of classes and of all objects within them."""
        found = set(map(id, classes.values()))
        digester = Digester(self.side)
        for name, cls in classes.items():
            with contextlib.suppress(Exception):  # a class that cannot be pickled is not sent
                digester.begin(name, cls)
                digester.digest_of(cls)
                found |= digester.memo.copy().keys()
        return found

    def pack_loose(self, values: Mapping[str, Any], *, apart: bool = False) -> Packed:
        """Pack values that neither end tracks.

        Args:
            values: The values by name.
            apart: True to pack a placeholder for a value that cannot be pickled, instead of raising the error.
        """
        values = dict(values)
        while True:
            packer, name = Packer(self.side, None, None, MemoryBlocks()), ""
            try:
                for name, value in values.items():
                    packer.label, packer.root = (label_of(name), value) if apart else ("", None)
                    packer.dump([value])
                break
            except Exception as error:  # pickling may raise any error
                if not apart or type(values[name]) is Placeholder:
                    raise
                values[name] = _refused(name, values[name], error)
        return Packed(
            serial=0,
            names=tuple(values),
            data=packer.file.getvalue(),
            buffers=tuple(packer.buffers),
            copies=self.side.copying,
        )

    def open_loose(self, packed: Packed) -> dict[str, Any]:
        """Open the values that `pack_loose` packed. A value that cannot be opened becomes a placeholder."""
        opener = self.opening(packed, ())
        for name in packed.names:
            opener.load(name)
        return self.merge(opener, common=())

    def _add(self, table: PackTable) -> None:
        self._keep_tables(table.wanted)
        self._tables[table.serial] = table

    def _keep_tables(self, names: Iterable[str]) -> None:
        gone = set(names)
        for each in self._tables.values():
            if not each.wanted.isdisjoint(gone):
                each.wanted.difference_update(gone)
                self._shrunk.add(each.serial)
        kept: set[int] = set()
        waiting = [table for table in self._tables.values() if table.wanted]
        while waiting:
            table = waiting.pop()
            if table.serial not in kept:
                kept.add(table.serial)
                waiting += [self._tables[serial] for serial in table.serials_used if serial in self._tables]
        for serial in self._tables.keys() - kept:
            del self._tables[serial]

    # -- receiving -----------------------------------------------------------------------------------------------------

    def opening(self, packed: Packed, agreed: Iterable[str] | None = None, *, in_place: bool = True) -> Opener:
        """Return an opener of a pack. Load all values with it, and then call `merge`.

        Args:
            packed: The pack that the other end sent.
            agreed: The names whose values update the objects here; None for all. The values of other names are copies.
            in_place: True if the values of agreed names are read into the known blocks of memory.
        """
        agreed = set(packed.names) if agreed is None else set(agreed)
        return Opener(packed, self.side, self.find, self._place, agreed, in_place=in_place)

    @no_collection()
    def merge(
        self,
        opener: Opener,
        substitutes: Mapping[int, Any] | None = None,
        common: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Return all values of a pack, by name. Known objects are updated.

        Args:
            opener: The opener, which has loaded all values.
            substitutes: Objects that replace arrived objects, by the objects' numbers here.
            common: The names whose objects have the same numbers at both ends; None for all.
        """
        packed = opener.packed
        for name in opener.bound:
            if name not in packed.names:
                self.side.user_ns.pop(name, None)
        table = PackTable(packed, opener.roots, opener)
        values = {name: root[0] for name, root in zip(packed.names, opener.roots, strict=True)}
        common = packed.names if common is None else common
        counterparts = self._counterparts(table, packed)
        taken = {id(obj): obj for obj in opener.referred}
        if substitutes:
            places = [(place, number) for place, number in pairs_in(packed) if number in substitutes]
            taken |= {id(table.objects[place]): substitutes[number] for place, number in places}
        held_classes = [
            (cls, state) for name, cls, state in opener.held_classes if name in opener.agreed and not packed.copies
        ]
        if counterparts or held_classes or opener.new_classes:
            objects = table.objects if common else {}
            merge = Merge(counterparts, taken)
            for name in filter(opener.agreed.__contains__, packed.names):
                try:
                    values[name] = merge.merged(values[name])
                except Exception as error:  # the user's classes may raise any error  # noqa: BLE001
                    values[name] = opener.lost(name, error)
            merge.classes(held_classes, opener.new_classes)
            table.replace({place: merge.final(obj) for place, obj in objects.items()})
        if common:  # from now on both ends have these objects
            table.wanted = set(common)
            table.retire_numbers(part_of(packed.serial, name) for name in packed.names if name not in table.wanted)
            self._add(table)
            for memory in opener.new_memories:
                self._memories.add(memory)
            for _, batch in opener.batches:
                self._memories.add_later(batch)
        opener.close()
        return values

    def _counterparts(self, table: PackTable, packed: Packed) -> dict[int, Any]:
        """Return the known objects by the `id()` of the objects that arrived for them, without forgotten ones."""
        found = {}
        for place, number in pairs_in(packed):
            if serial_of(number) not in self._tables:
                continue
            new = table.objects.get(place)
            with contextlib.suppress(KeyError):  # the object was dropped, because nothing referred to it
                old = self.find(number)
                if new is not None and old is not new and not is_lost(new):
                    found[id(new)] = old
        return found

    def has(self, number: int) -> bool:
        """Return whether a number belongs to an object here. An object that was sent again has a newer number."""
        try:
            self.find(number)
        except KeyError:
            return False
        return True

    def put(self, number: int, obj: Any) -> None:
        """Give a number to another object, which represents the earlier one from now on."""
        self._table_of(number).put(number, obj)

    def find(self, number: int) -> Any:
        """Return the object of a number."""
        return self._table_of(number).find(number)

    def retire_numbers(self, parts: Iterable[int]) -> None:
        """Stop using the numbers of these parts of packs. The other end has other numbers for their objects."""
        for part in parts:
            table = self._tables.get(serial_of(part << OFFSET_BITS))
            if table is not None:
                table.retire_numbers((part,))

    def _table_of(self, number: int) -> PackTable:
        return self._tables[serial_of(number)]

    def accept(self, values: Mapping[str, Any]) -> None:
        """Record that the other end has these values as they are now."""
        digests = self.digest(values).by_name
        for name, value in values.items():
            self._records[name] = _Record(value, digests[name], parts_of(value))

    # -- forgetting ----------------------------------------------------------------------------------------------------

    def forget(self, names: Iterable[str]) -> None:
        """Forget names under which the other end no longer has a value, or has an unknown one."""
        gone = list(names)
        if gone:
            self._drop(gone)
            # Drop tables of which only classes are wanted, since classes are found by their ids.
            alone = [table.wanted for table in self._tables.values() if all(name[0] == "%" for name in table.wanted)]
            self._drop(set().union(*alone))

    def drop_unreferenced(self) -> list[int]:
        """Drop the unreferenced objects of values that are no longer wanted, but whose packs are kept for other values.

        Returns:
            The parts of packs of which at most memory is left. Neither end should use their numbers any more.
        """
        tables = [self._tables[serial] for serial in self._shrunk if serial in self._tables]
        self._shrunk.clear()
        newest_first = sorted(self._tables.values(), key=lambda table: -table.serial)
        return [
            part
            for table in tables
            for part in table.drop_unreferenced([each for each in newest_first if each.serial > table.serial])
        ]

    def send_again(self, names: Iterable[str]) -> None:
        """Send values again when they are next read."""
        for name in names:
            self._records[name] = _Record(self.root(name), b"")  # an empty digest differs from every other

    def send_again_with(self, names: Iterable[str]) -> None:
        """Send the other values of a pack again if its forgotten values are large, since the pack keeps them alive."""
        gone = set(names)
        for table in self._tables.values():
            if not gone.isdisjoint(table.names) and table.idle_nbytes > _IDLE_NBYTES:
                self.send_again(table.wanted & self._records.keys())

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._records.pop(name, None)
        self._keep_tables(names)

    def rename(self, old: str, new: str) -> None:
        """Rename a value that both ends have, and forget the value that had the new name."""
        self._drop((new,))
        record = self._records.pop(old, None)
        if record is None:
            return
        self._records[new] = record
        for table in self._tables.values():
            if old in table.wanted:
                table.rename(old, new)

    def clear(self) -> None:
        """Forget everything: the other end has no values."""
        self._tentative = None
        self._records.clear()
        self._tables.clear()

    def number_of(self, obj: Any) -> int | None:
        """Return the latest number of an object that the other end has, or None."""
        for table in reversed(self._tables.values()):
            number = table.numbers.get(id(obj))
            if number is not None:
                return number
        if type(obj) is MemoryBlock and obj.of_tensor is not None:
            return self.number_of(obj.of_tensor())
        return None

    def _new(self, tensors: list[Any]) -> list[Any]:
        """Return those tensors that the other end does not have."""
        new = set(self.without_numbers(list(map(id, tensors))))
        return tensors if len(new) == len(tensors) else [tensor for tensor in tensors if id(tensor) in new]

    def without_numbers(self, keys: list[int]) -> list[int]:
        """Return those `id()`s of objects that belong to no object that the other end has."""
        for table in reversed(self._tables.values()):
            if not keys:
                break
            numbers = table.numbers
            keys = [key for key in keys if key not in numbers]
        return keys

    def number_of_memory(self, start: int, nbytes: int) -> int | None:
        """Return the number of a block of memory that contains these bytes and that the other end has, or None."""
        memory = self._memories.of(start, nbytes)
        return None if memory is None else self.number_of(memory)

    def name_of(self, number: int) -> str:
        """Return the name of the value that brought an object."""
        return self._table_of(number).name_of(number)

    def names_within(self, ids: KeysView[int]) -> set[str]:
        """Return the names of the values that brought the objects with these `id()`s."""
        return {
            table.name_of(table.numbers[key]) for table in self._tables.values() for key in table.numbers.keys() & ids
        }


def _refused(name: str, value: Any, error: Exception) -> Placeholder:
    """Return the placeholder of a value that cannot be pickled."""
    return Placeholder(refusal(label_of(name), value, value, cure_for(value), error))
