"""The reader of packs: it finds known objects by their numbers and makes the others.

A pack holds one pickle for each name, and all of them share one memo. A pickle refers to an object of an earlier pack
by its number (a persistent id), and to an object of an earlier name by its place in the memo.

A value that cannot be opened must not cost the others. An example: the pack has the names `x`, `model` and `z`, and
the class of `model` raises in its `__setstate__`::

    name      x          model                   z
    places    0 to 4     5 to 9                  10 to 12
    opened    the value  stops at place 7        refers to place 8

The shared memo is incomplete then. `_go_on_after` counts the places and buffers that the pickle of `model` would have
taken, from its opcodes alone, and reads on behind it: `model` is a placeholder with the reason, the places 5 to 9 hold
that placeholder, and `z`, which refers to one of them, raises and becomes a placeholder, too. A value that refers to
none of them is opened as usual.
"""

from __future__ import annotations

import collections
import importlib
import io
import pickle
import pickletools
import sys
import types
import typing
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from distnb.compat import cloudpickle_internals
from distnb.errors import CannotTravelError
from distnb.objects.code import definitions
from distnb.objects.constructors import ByOpener, open_storage
from distnb.objects.digesting import Side
from distnb.objects.memory.blocks import MemoryBlock
from distnb.objects.packing import OFFSET_BITS, Packed
from distnb.objects.placeholder import Placeholder, label_of

__all__ = ["Opener", "is_lost", "pairs_in"]


class Opener:
    """The reader of one pack, a value at a time. A value that cannot be opened becomes a placeholder.

    Args:
        packed: The pack.
        side: This process.
        find: The object of a number that this side knows.
        place: Where the memory of an accelerator lies here: a device of torch's, or "cpu".
        agreed: Names to be taken over; the values of others are copies, and nothing here becomes them.
        in_place: Whether memory that is known is written to as it is read, for agreed names.

    Attributes:
        roots: What was read: a list with one value for each name.
        failed: Why there are placeholders in what was read, by name.
        new_classes: Classes that were made.
        held_classes: Classes that were known, each with the state that arrived for it.
        new_memories: Memory that was made.
        referred: What references stood for: handles, and objects that live here. They did not arrive.
        parts_used: Parts of packs in which objects came that this pack has the numbers of.
        bound: Names in the namespace that classes were bound to on the way.
        named: What the pack named of this one's methods.
    """

    def __init__(
        self, packed: Packed, side: Side, find: Callable[[int], Any], place: str, agreed: set[str], *, in_place: bool
    ) -> None:
        self.packed = packed
        self.agreed = agreed
        self.find = find
        self.roots: list[Any] = []
        self.failed: dict[str, Exception] = {}
        self.new_classes: list[type] = []
        self.held_classes: list[tuple[type, dict[str, Any]]] = []
        self.new_memories: list[MemoryBlock] = []
        self.referred: list[Any] = []
        self.parts_used: set[int] = set()
        self.bound: list[str] = []
        self.named: dict[str, ByOpener] = {}
        self._in_place = in_place
        self._writes = False
        self._bare_classes: set[type] = set()  # those made that have no attributes yet
        self._side = side
        self._place = place
        self._buffers = [_writable(each) for each in packed.buffers]
        self._file = io.BytesIO(packed.data)
        self._reader: Any = _Unpickler(self._file, buffers=self._buffers)
        self._reader.opener = self

    @property
    def memo(self) -> Any:
        """Every object by its place."""
        return self._reader.memo

    def load(self, name: str) -> Any:
        """Read the next value, which is that of a name, and return it as it arrived."""
        start, self._writes = self._file.tell(), self._in_place and name in self.agreed
        try:
            root = self._reader.load()
        except Exception as error:  # whatever the user's classes raise  # noqa: BLE001
            root = [self.lost(name, error)]
            self._go_on_after(start, root)
        self.roots.append(root)
        return root[0]

    def lost(self, name: str, error: Exception) -> Placeholder:
        """Note that a value could not be opened, and return its placeholder."""
        self.failed[name] = error
        replacement = Placeholder(
            f"{label_of(name)} cannot be opened here: {type(error).__name__}: {error}. The cure: make it inside "
            "the distributed cell, or keep it out of what the cell reads."
        )
        vars(replacement)["why"] = error.with_traceback(None)
        return replacement

    def close(self) -> None:
        """End the reading, and break the cycles that would keep the values alive."""
        self._reader.opener = None
        for each in self.named.values():
            each.method = None

    def _go_on_after(self, start: int, root: list[Placeholder]) -> None:
        """Read on behind a value that could not be opened. `root` replaces it, and its item each of its parts."""
        counts, sound = collections.Counter[str](), 0
        self._file.seek(0)
        while self._file.tell() <= start:
            sound = counts["MEMOIZE"]
            counts.update(opcode.name for opcode, _, _ in pickletools.genops(self._file))
        known = self._reader.memo.copy()
        # Python's own: C's crashes when it is given a memo (3.11).
        reader: Any = _PythonUnpickler(self._file, buffers=self._buffers[counts["NEXT_BUFFER"] :])
        reader.opener = self
        lost = dict.fromkeys(range(sound, counts["MEMOIZE"]), root[0])
        reader.memo = _Memo({**{place: known[place] for place in range(sound)}, **lost, sound: root})
        self._reader = reader

    # -- what pickles name ---------------------------------------------------------------------------------------------

    def open_reference(self, token: Any) -> Any:
        """Return the object that a reference represents."""
        found = self._side.references.resolve(token)
        self.referred.append(found)
        return found

    def open_from_host(self, data: Any, dtype: Any, shape: tuple[int, ...], is_parameter: bool) -> Any:
        """Return a tensor that was on an accelerator, on this side's accelerator."""
        tensor = MemoryBlock.filled(data).tensor().view(dtype).reshape(shape).to(self._place)
        return sys.modules["torch"].nn.Parameter(tensor, False) if is_parameter else tensor

    def open_storage_from_host(self, data: Any, dtype: Any) -> Any:
        """Return a storage that was on an accelerator, on this side's accelerator."""
        tensor = MemoryBlock.filled(data).tensor().to(self._place)
        return open_storage(MemoryBlock(tensor, 0, tensor.nbytes), dtype)

    def open_memory(self, data: Any, resizable: bool) -> MemoryBlock:
        """Return a new block of memory."""
        memory = MemoryBlock.filled(data, resizable=resizable)
        self.new_memories.append(memory)
        return memory

    def update_memory(self, number: int, data: Any, resizable: bool) -> MemoryBlock:
        """Known memory, with other content unless data is None."""
        known: MemoryBlock = self.find(number)
        known.follow()
        if not known.is_there(known.start):
            if data is None:
                raise CannotTravelError("torch has resized the storage here that held it")
            return self.open_memory(data, resizable)
        if not self._writes:
            return MemoryBlock.filled(bytes(known.buffer()) if data is None else data, resizable=resizable)
        if data is None or known.write(data):
            return known
        return self.open_memory(data, resizable)

    def make_function(
        self, code: types.CodeType, globals_: dict[str, Any] | str | None, closure: Any
    ) -> types.FunctionType:
        """Return a function without its state, which may refer to it."""
        if globals_ is None:
            globals_ = self._side.user_ns
        elif isinstance(globals_, str):
            globals_ = vars(importlib.import_module(globals_))
        globals_.setdefault("__builtins__", __builtins__)
        return types.FunctionType(code, globals_, code.co_name, None, closure)

    def make_class(self, identity: str, kind: str, args: tuple[Any, ...], where: str | None) -> type:
        """Return a class that is known, or a new one without its attributes, which may refer to it."""
        classes, user_ns = self._side.classes, self._side.user_ns
        cls: Any = classes.get(identity)
        if cls is None:
            cls = _new_class(kind, args, classes)
            classes.add(identity, cls)
            self._bare_classes.add(cls)
        # Its name is bound at once, where it has none yet: what is opened with its attributes may be looked up by it.
        if where is not None and where not in user_ns:
            user_ns[where] = cls
            self.bound.append(where)
        made: type = cls
        return made

    def fill_class(self, cls: Any, state: dict[str, Any]) -> None:
        """Give a class its attributes."""
        if cls in self._bare_classes:
            self._bare_classes.discard(cls)
            self.new_classes.append(cls)
            cloudpickle_internals.fill_class(cls, (state, {}))
        else:  # it is merged when all has arrived
            self.held_classes.append((cls, state))

    def make_type_variable(
        self, identity: str, name: str, constraints: Any, bound: Any, kinds: dict[str, bool], module: str
    ) -> Any:
        """Return a type variable that is known, or a new one."""
        found = self._side.classes.get(identity)
        if found is None:
            found = typing.TypeVar(name, *constraints, bound=bound, **kinds)  # type: ignore[misc]
            found.__module__ = module
            self._side.classes.add(identity, found)
        return found


def _new_class(kind: str, args: tuple[Any, ...], classes: definitions.Classes) -> type:
    bases = args[0] if kind == "enum" else args[2]
    # A class that arrives is not a new definition: its bases are not notified, just as no instance is initialised.
    every = {each for base in bases if isinstance(base, type) for each in base.__mro__ if each in classes}
    hooks = {base: hook for base in every if (hook := vars(base).get("__init_subclass__")) is not None}
    for base in hooks:
        base.__init_subclass__ = classmethod(lambda cls, **keywords: None)  # type: ignore[assignment]
    try:
        if kind == "class" and args[0] in classes:
            metaclass, name, bases, keywords = args[:4]
            new: type = type.__new__(metaclass, name, bases, dict(keywords))
            return new
        make = cloudpickle_internals.make_enum if kind == "enum" else cloudpickle_internals.make_class
        made: type = make(*args)
        return made
    finally:
        for base, hook in hooks.items():
            base.__init_subclass__ = hook  # type: ignore[method-assign]


class _ByNames:
    opener: Opener

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)  # type: ignore[misc]
        if type(found) is not ByOpener:
            return found
        return self.opener.named.setdefault(name, ByOpener(name, getattr(self.opener, name)))

    def persistent_load(self, pid: Any) -> Any:
        self.opener.parts_used.add(pid >> OFFSET_BITS)
        return self.opener.find(pid)


class _Unpickler(_ByNames, pickle.Unpickler):
    """C's."""


class _PythonUnpickler(_ByNames, pickle._Unpickler):
    """Python's own."""


class _Memo(dict[int, Any]):
    """The memo after a value that could not be opened: a reference to a part of it raises its error."""

    def __getitem__(self, place: int) -> Any:
        found = super().__getitem__(place)
        if is_lost(found):
            raise vars(found)["why"]
        return found


def is_lost(obj: Any) -> bool:
    """Return whether an object is the placeholder of a value that arrived and could not be opened."""
    return type(obj) is Placeholder and "why" in vars(obj)


def pairs_in(packed: Packed) -> Iterator[tuple[int, int]]:
    """Yield (place in the memo, number) of each object in a pack that the opening side has already."""
    numbers_of_places, parts = array("Q"), packed.parts
    numbers_of_places.frombytes(packed.pairs)
    for place, number in zip(numbers_of_places[::2], numbers_of_places[1::2], strict=True):
        part, offset = divmod(number, 1 << OFFSET_BITS)
        yield place, parts[part] << OFFSET_BITS | offset


def _writable(frame: Any) -> Any:
    # Arrays are built on the very buffer, and a user may write to an array.
    view = memoryview(frame)
    return bytearray(view) if view.readonly else frame
