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

import bisect
import contextlib
import gc
import itertools
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from distnb.objects.code.definitions import parts_of
from distnb.objects.digesting import Digester, Digests, Side
from distnb.objects.memory.blocks import MemoryBlock, MemoryBlocks
from distnb.objects.merging import ATOMS, Merge
from distnb.objects.opening import Opener, is_lost, pairs_in
from distnb.objects.packing import OFFSET_BITS, Packed, Packer
from distnb.objects.placeholder import Placeholder, cure_for, label_of, refusal

__all__ = ["Copies", "Tracker", "part_of"]

# The bits of a number, from the lowest on: OFFSET_BITS for the place in the part, 64 for the name's digest, and the
# serial of the pack.
_NAME_BITS = 64
_OFFSETS = (1 << OFFSET_BITS) - 1
_IDLE_NBYTES = 1 << 20


def part_of(serial: int, name: str) -> int:
    """Return the number of a name's part of a pack."""
    return serial << _NAME_BITS | xxhash.xxh3_64_intdigest(name.encode())


@dataclass
class _Record:
    """The value that the other end has under a name, and its digest."""

    root: Any
    digest: bytes
    parts: tuple[Any, ...] | None = None  # see `parts_of`: a function with the same parts need not be pickled again


class _Table:
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
        self._own: set[int] = set()  # the indices of parts whose objects have other numbers at the other end
        self._roots = roots
        self._coder = coder
        self._objects: dict[int, Any] | None = None
        self._numbers: dict[int, int] | None = None

    @property
    def objects(self) -> dict[int, Any]:
        """The objects that have numbers, by their places. They are read from the memo at the first use."""
        if self._objects is None:
            with _no_collection():  # hundreds of thousands of new entries would start many collections
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

    def drop_unreferenced(self, newer: Sequence[_Table]) -> list[int]:
        """Drop the unreferenced objects of values that are no longer wanted. Return the parts that this empties.

        This only frees memory: an object without references is never sent again. An object in a newer table has a newer
        number.
        """
        idle = {index for index, name in enumerate(self.names) if name not in self.wanted} - self._own
        places = sorted(place for place in self.objects if self._index_of(place) in idle)
        self._numbers, left = None, set[int]()
        for place in places:  # containers come before their items
            if type(self.objects[place]) is MemoryBlock:
                continue  # arrays use the memory without a reference to the block
            key = id(self.objects[place])
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
            with _no_collection():
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


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Copy(NamedTuple):
    """An object of a pack as it arrived.

    Attributes:
        number_there: Its number at the other end.
        obj: The object. A class is this end's own.
        state: The attributes of a class as they arrived; None for another object.
    """

    number_there: int
    obj: Any
    state: dict[str, Any] | None


class Copies(NamedTuple):
    """The content of a pack as it arrived.

    Attributes:
        roots: The values by name.
        objects: The objects that this end knows, by their numbers here.
        failed: The error of each value that could not be opened, by name.
        new_classes: The classes that were created.
        referred: The objects behind references, which did not arrive.
    """

    roots: dict[str, Any]
    objects: dict[int, _Copy]
    failed: dict[str, Exception]
    new_classes: list[type]
    referred: list[Any]


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
        self._tables: dict[int, _Table] = {}
        self._tentative: _Table | None = None  # the objects of the latest pack, which have earlier numbers, too
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
            roots = [[digests.refused.get(name, values[name])] for name in names]
            name, ends = "", [0]
            try:
                for name, root in zip(names, roots, strict=True):
                    packer.begin(name, root[0])
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
        pairs, parts = _pairs(packer, tables)
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
        table = _Table(packed, roots, packer)
        if tentative:
            self._tentative = self._tables[table.serial] = table
        else:
            self._add(table)
        for name in names:
            self._records[name] = _Record(values[name], digests.by_name[name], parts_of(values[name]))
        return packed

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
            packer, name = Packer(self.side, None, lambda obj: None, MemoryBlocks()), ""
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

    def _add(self, table: _Table) -> None:
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
        table = _Table(packed, opener.roots, opener)
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
        opener.close()
        return values

    def _counterparts(self, table: _Table, packed: Packed) -> dict[int, Any]:
        """Return the known objects by the `id()` of the objects that arrived for them, without forgotten ones."""
        found = {}
        for place, number in pairs_in(packed):
            if number >> OFFSET_BITS + _NAME_BITS not in self._tables:
                continue
            new = table.objects.get(place)
            with contextlib.suppress(KeyError):  # the object was dropped, because nothing referred to it
                old = self.find(number)
                if new is not None and old is not new and not is_lost(new):
                    found[id(new)] = old
        return found

    def copies(self, packed: Packed) -> Copies:
        """Return the content of a pack as it arrived."""
        opener = self.opening(packed, ())
        for name in packed.names:
            opener.load(name)
        table = _Table(packed, opener.roots, opener)
        objects = table.objects
        states = {id(cls): state for _, cls, state in opener.held_classes}
        for name in opener.bound:
            self.side.user_ns.pop(name, None)
        opener.close()
        return Copies(
            roots={name: root[0] for name, root in zip(packed.names, opener.roots, strict=True)},
            objects={
                number: _Copy(table.number_at(place), objects[place], states.get(id(objects[place])))
                for place, number in pairs_in(packed)
                if place in objects and not is_lost(objects[place]) and self._has(number)
            },
            failed=opener.failed,
            new_classes=opener.new_classes,
            referred=opener.referred,
        )

    def merge_copies(
        self,
        names: Collection[str],
        copies: Sequence[Copies],
        sources: Mapping[int, Copies],
        substitutes: Mapping[int, Any],
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Merge values of which several packs contain versions. Return the values, and the errors, by name.

        The other ends no longer have equal values, so each value is sent again when it is next read.

        Args:
            names: The names of the values.
            copies: The packs. An object is taken from the first pack that contains it.
            sources: The packs from which other objects are taken, by number.
            substitutes: Objects that replace others, by number.
        """
        counterparts, versions = dict[int, Any](), dict[int, Any]()
        taken = {id(obj): obj for each in copies for obj in each.referred}
        states: dict[type, dict[str, Any]] = {}
        chosen: dict[int, Any] = {}
        for each in copies:
            for number, (_, obj, state) in each.objects.items():
                source = sources.get(number, each)
                if state is not None and source is each:
                    states.setdefault(obj, state)
                elif number in substitutes:
                    taken[id(obj)] = substitutes[number]
                elif state is None:
                    chosen.setdefault(number, source.objects[number].obj)
                    versions[id(obj)] = chosen[number]
                    counterparts[id(chosen[number])] = self.find(number)
        merge = Merge(counterparts, taken, versions)
        values = dict[str, Any]()
        failed = {name: error for each in copies for name, error in each.failed.items() if name in names}
        for name, root in ((name, root) for each in copies for name, root in each.roots.items()):
            if name in names and name not in values and name not in failed:
                try:
                    values[name] = merge.merged(root)
                    self._records[name].digest = b""  # an empty digest differs from every other
                except Exception as error:  # the user's classes may raise any error  # noqa: BLE001
                    failed[name] = error
        merge.classes(states.items(), (cls for each in copies for cls in each.new_classes))
        for number, obj in chosen.items():
            if merge.has_merged(obj):
                self._table_of(number).put(number, merge.final(obj))
        return values, failed

    def _has(self, number: int) -> bool:
        """Return whether a number belongs to an object here. An object that was sent again has a newer number."""
        try:
            self.find(number)
        except KeyError:
            return False
        return True

    def find(self, number: int) -> Any:
        """Return the object of a number."""
        return self._table_of(number).find(number)

    def retire_numbers(self, parts: Iterable[int]) -> None:
        """Stop using the numbers of these parts of packs. The other end has other numbers for their objects."""
        for part in parts:
            table = self._tables.get(part >> _NAME_BITS)
            if table is not None:
                table.retire_numbers((part,))

    def _table_of(self, number: int) -> _Table:
        return self._tables[number >> OFFSET_BITS + _NAME_BITS]

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

    def send_again_with(self, names: Iterable[str]) -> None:
        """Send the other values of a pack again if its forgotten values are large, since the pack keeps them alive."""
        gone = set(names)
        for table in self._tables.values():
            if not gone.isdisjoint(table.names) and table.idle_nbytes > _IDLE_NBYTES:
                for name in table.wanted & self._records.keys():
                    self._records[name] = _Record(self.root(name), b"")  # an empty digest differs from every other

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
        return None

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


def _pairs(packer: Packer, tables: Sequence[_Table]) -> tuple[array[int], tuple[int, ...]]:
    """Return the pairs (place now, number before) of the objects in a pack that earlier packs have brought.

    In a pair, the part's number is replaced by its index in the second result, the numbers of parts.
    """
    pairs, parts = array("Q"), dict[int, int]()
    if tables:
        with _no_collection():
            memo = packer.memo.copy()
            for each in tables:
                for key in each.numbers.keys() & memo.keys():
                    part, offset = divmod(each.numbers[key], 1 << OFFSET_BITS)
                    pairs.extend((memo[key][0], parts.setdefault(part, len(parts)) << OFFSET_BITS | offset))
            del memo
    return pairs, tuple(parts)


def _refused(name: str, value: Any, error: Exception) -> Placeholder:
    """Return the placeholder of a value that cannot be pickled."""
    return Placeholder(refusal(label_of(name), value, value, cure_for(value), error))
