"""The reader of packs, which finds known objects by their numbers and creates the others.

A pack contains one pickle for each name, and all of them share one memo. A pickle refers to an object of an earlier
pack by its number (a persistent id), and to an object of an earlier name by its place in the memo.

A value that cannot be opened must not prevent the opening of the others. An example: the pack has the names `x`,
`model` and `z`, and the class of `model` raises in its `__setstate__`::

    name      x          model                   z
    places    0 to 4     5 to 9                  10 to 12
    opened    the value  stops at place 7        refers to place 8

The shared memo is then incomplete. `_skip_failed` counts the places and buffers that the pickle of `model` takes, from
its opcodes alone, and continues behind this pickle. `model` becomes a placeholder with the reason, which fills the
places 5 to 9. `z` refers to one of these places, so its opening raises, and it becomes a placeholder, too. A value
without such a reference is opened as usual.
"""

from __future__ import annotations

import collections
import importlib
import io
import pickle
import pickletools
import sys
import types
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from distnb.compat import cloudpickle_internals
from distnb.errors import CannotTravelError
from distnb.objects.code import definitions
from distnb.objects.collecting import no_collection
from distnb.objects.constructors import ByOpener, open_storage
from distnb.objects.digesting import Side
from distnb.objects.memory.blocks import COPIED_NBYTES, MemoryBlock, TensorBatch
from distnb.objects.memory.plain_tensors import open_batch
from distnb.objects.packing import OFFSET_BITS, Packed
from distnb.objects.placeholder import CURE_FOR_MODULES, Placeholder, label_of

__all__ = ["Opener", "is_lost", "pairs_in"]


class Opener:
    """The reader of one pack, a value at a time. A value that cannot be opened becomes a placeholder.

    Args:
        packed: The pack.
        side: This process.
        find: Returns the object of a number that this side knows.
        place: The device for tensors that were on an accelerator: one of torch's devices, or "cpu".
        agreed: The names whose values update the objects here. The values of other names are copies.
        in_place: True if the values of agreed names are read into the known blocks of memory.

    Attributes:
        roots: A list with one value for each name that was read.
        failed: The error of each value that could not be opened, by name.
        new_classes: The classes that were created.
        held_classes: The known classes, each after the name of the value that brought it, with the state that arrived.
        new_memories: The blocks of memory that were created.
        batches: The batches of tensors, each with the name of the value in which they are.
        referred: The objects behind references: handles, and objects that stay here. They did not arrive.
        parts_used: The parts of earlier packs to whose objects this pack refers by number.
        bound: The names in the namespace that were bound to classes while they were read.
        named: The references to this opener's methods in the pack, by the method's name.
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
        self.held_classes: list[tuple[str, type, dict[str, Any]]] = []
        self.new_memories: list[MemoryBlock] = []
        self.batches: list[tuple[str, TensorBatch]] = []
        self.referred: list[Any] = []
        self.parts_used: set[int] = set()
        self.bound: list[str] = []
        self.named: dict[str, ByOpener] = {}
        self._in_place = in_place
        self._writes = False
        self._name = ""
        self._bare_classes: set[type] = set()  # new classes that have no attributes yet
        self._side = side
        self._place = place
        self._buffers = [_writable(each) for each in packed.buffers]
        self._file = io.BytesIO(packed.data)
        self._reader: Any = _Unpickler(self._file, buffers=self._buffers)
        self._reader.opener = self

    @property
    def memo(self) -> Any:
        """The objects by their places."""
        return self._reader.memo

    @no_collection()
    def load(self, name: str) -> Any:
        """Read the next value, which belongs to `name`, and return it as it arrived."""
        start, self._writes, self._name = self._file.tell(), self._in_place and name in self.agreed, name
        try:
            root = self._reader.load()
        except Exception as error:  # the user's classes may raise any error  # noqa: BLE001
            root = [self.lost(name, error)]
            self._skip_failed(start, root)
        self.roots.append(root)
        return root[0]

    def lost(self, name: str, error: Exception) -> Placeholder:
        """Note that a value could not be opened, and return its placeholder."""
        self.failed[name] = error
        cure = "make it inside the distributed cell, or keep it out of what the cell reads"
        if isinstance(error, ModuleNotFoundError):
            cure = CURE_FOR_MODULES
        replacement = Placeholder(
            f"{label_of(name)} cannot be opened here: {type(error).__name__}: {error}. The cure: {cure}."
        )
        vars(replacement)["why"] = error.with_traceback(None)
        return replacement

    def close(self) -> None:
        """End the reading, and break the cycles that would keep the values alive."""
        self._reader.opener = None
        for each in self.named.values():
            each.method = None

    def _skip_failed(self, start: int, root: list[Placeholder]) -> None:
        """Continue behind a value that could not be opened. The placeholder in `root` replaces all its parts."""
        counts, sound = collections.Counter[str](), 0
        self._file.seek(0)
        while self._file.tell() <= start:
            sound = counts["MEMOIZE"]
            counts.update(opcode.name for opcode, _, _ in pickletools.genops(self._file))
        known = self._reader.memo.copy()
        # The unpickler in Python: the one in C crashes when its memo is set (3.11).
        reader: Any = _PythonUnpickler(self._file, buffers=self._buffers[counts["NEXT_BUFFER"] :])
        reader.opener = self
        lost = dict.fromkeys(range(sound, counts["MEMOIZE"]), root[0])
        reader.memo = _Memo({**{place: known[place] for place in range(sound)}, **lost, sound: root})
        self._reader = reader

    # -- methods that pickles call -------------------------------------------------------------------------------------

    def open_reference(self, token: Any) -> Any:
        """Return the object that a reference represents."""
        found = self._side.references.resolve(token)
        self.referred.append(found)
        return found

    def open_from_host(self, data: Any, dtype: Any, shape: tuple[int, ...], is_parameter: bool) -> Any:
        """Return a tensor that was on an accelerator, on this process's device."""
        tensor = MemoryBlock.filled(data).tensor().view(dtype).reshape(shape).to(self._place)
        return sys.modules["torch"].nn.Parameter(tensor, False) if is_parameter else tensor

    def open_storage_from_host(self, data: Any, dtype: Any) -> Any:
        """Return a storage that was on an accelerator, on this process's device."""
        tensor = MemoryBlock.filled(data).tensor().to(self._place)
        return open_storage(MemoryBlock(tensor, 0, tensor.nbytes), dtype)

    def open_batch(self, data: Any, dtype: Any, shapes: list[tuple[int, ...]]) -> TensorBatch:
        """Return the tensors of a batch."""
        batch = open_batch(data, dtype, shapes)
        self.batches.append((self._name, batch))
        return batch

    def memory_of(self, tensor: Any) -> MemoryBlock:
        """Return the block of memory of a tensor that came in a batch."""
        memory = MemoryBlock.of_storage(tensor.untyped_storage())
        self.new_memories.append(memory)
        return memory

    def open_memory(self, data: Any, resizable: bool) -> MemoryBlock:
        """Return a new block of memory."""
        memory = self._filled(data, resizable)
        self.new_memories.append(memory)
        return memory

    def _filled(self, data: Any, resizable: bool) -> MemoryBlock:
        return MemoryBlock.filled(data, self._side.resizable_nbytes if resizable else COPIED_NBYTES)

    def update_memory(self, number: int, data: Any, resizable: bool) -> MemoryBlock:
        """Return a known block of memory. If `data` is not None, the block gets this content.

        Args:
            number: The number of the block, or of the tensor whose memory it is.
            data: The new content.
            resizable: True if torch can resize the memory where it comes from.
        """
        found: Any = self.find(number)
        known = found if type(found) is MemoryBlock else self.memory_of(found)
        known.follow()
        if not known.is_there(known.start):
            if data is None:
                raise CannotTravelError("torch has resized the storage that contained it on this side")
            return self.open_memory(data, resizable)
        if not self._writes:
            return self._filled(bytes(known.buffer()) if data is None else data, resizable)
        if data is None or known.write(data):
            return known
        return self.open_memory(data, resizable)

    def make_function(
        self, code: types.CodeType, globals_: dict[str, Any] | str | None, closure: Any
    ) -> types.FunctionType:
        """Return a function without its state, which is set later because it may refer to the function."""
        if globals_ is None:
            globals_ = self._side.user_ns
        elif isinstance(globals_, str):
            globals_ = vars(importlib.import_module(globals_))
        globals_.setdefault("__builtins__", __builtins__)
        return types.FunctionType(code, globals_, code.co_name, None, closure)

    def make_class(self, identity: str, kind: str, args: tuple[Any, ...], where: str | None) -> type:
        """Return a known class, or a new one without its attributes, which may refer to the class."""
        classes, user_ns = self._side.classes, self._side.user_ns
        cls: Any = classes.get(identity)
        if cls is None:
            cls = _new_class(kind, args, classes)
            classes.add(identity, cls)
            self._bare_classes.add(cls)
        # Bind an unbound name at once, because objects among the class's attributes may look up the class by name.
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
        else:  # a known class is merged when all values have been read
            self.held_classes.append((self._name, cls, state))

    def make_named_type(
        self, identity: str, kind: type, args: tuple[Any, ...], keywords: dict[str, Any], module: str
    ) -> Any:
        """Return a known type variable or `NewType`, or a new one."""
        found = self._side.classes.get(identity)
        if found is None:
            found = kind(*args, **keywords)
            found.__module__ = module
            self._side.classes.add(identity, found)
        return found


def _new_class(kind: str, args: tuple[Any, ...], classes: definitions.Classes) -> type:
    bases = args[0] if kind == "enum" else args[2]
    # An arriving class is not a new definition. So `__init_subclass__` of its bases is not called, just as unpickling
    # does not call an instance's `__init__`.
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
    """The unpickler in C."""


class _PythonUnpickler(_ByNames, pickle._Unpickler):
    """The unpickler in Python, whose memo can be replaced."""


class _Memo(dict[int, Any]):
    """The memo after a value that could not be opened. A reference to a part of the value raises the value's error."""

    def __getitem__(self, place: int) -> Any:
        found = super().__getitem__(place)
        if is_lost(found):
            raise vars(found)["why"]
        return found


def is_lost(obj: Any) -> bool:
    """Return whether an object is the placeholder of an arrived value that could not be opened."""
    return type(obj) is Placeholder and "why" in vars(obj)


def pairs_in(packed: Packed) -> Iterator[tuple[int, int]]:
    """Yield (place in the memo, number) of each object in a pack that the receiver already has."""
    places_and_numbers, parts = array("Q"), packed.parts
    places_and_numbers.frombytes(packed.pairs)
    for place, number in zip(places_and_numbers[::2], places_and_numbers[1::2], strict=True):
        part, offset = divmod(number, 1 << OFFSET_BITS)
        yield place, parts[part] << OFFSET_BITS | offset


def _writable(frame: Any) -> Any:
    # Arrays use the buffer's own memory, and the user may write to them.
    view = memoryview(frame)
    return bytearray(view) if view.readonly else frame
