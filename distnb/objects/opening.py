"""Opening what the other side packed: what it knows by numbers is found, or brought up to date."""

from __future__ import annotations

import collections
import importlib
import io
import pickle
import pickletools
import types
import typing
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from distnb.objects import code, packing
from distnb.objects.memory import Memory
from distnb.objects.packing import Packed, Side
from distnb.objects.placeholder import Placeholder

__all__ = ["Opener", "pairs_in", "stands_for_lost"]

_cloudpickle: Any = cloudpickle.cloudpickle  # what it knows of classes has no public name


class Opener:
    """Reads one pack, a value at a time. One that cannot be opened, whatever a user's class raises, is a placeholder.

    Args:
        packed: What was sent.
        side: This process.
        find: The object of a number that this side knows.
        place: Where the memory of an accelerator lies here: a device of torch's, or "cpu".

    Attributes:
        in_place: Whether memory that is known is written to; else what arrives is a copy.
        new_classes: Classes that were made.
        held_classes: Classes that were known, each with the state that arrived for it.
        new_memories: Memory that was made.
        resolved: What references stood for: handles, and objects that live here. They did not arrive.
        bound: Names in the namespace that classes were bound to on the way.
        failed: Why the value that was read last could not be opened; None if all went well.
    """

    def __init__(self, packed: Packed, side: Side, find: Callable[[int], Any], place: str) -> None:
        self.in_place = True
        self._bare_classes: set[type] = set()  # those made that have no attributes yet
        self.new_classes: list[type] = []
        self.held_classes: list[tuple[type, dict[str, Any]]] = []
        self.bound: list[str] = []
        self.new_memories: list[Memory] = []
        self.resolved: list[Any] = []
        self.failed: Exception | None = None
        self._side = side
        self._find = find
        self._place = place
        self._own: dict[tuple[str, str], Any] = {
            (method.__module__, method.__name__): getattr(self, f"_{method.__name__}")
            for method in (
                *(packing.open_reference, packing.open_special, packing.open_from_host),
                *(packing.open_memory, packing.update_memory),
                *(code.make_function, code.make_class, code.fill_class, code.make_type_variable),
            )
        }
        self._buffers = [_writable(each) for each in packed.buffers]
        self._file = io.BytesIO(packed.data)
        self._reader: Any = _Unpickler(self._file, buffers=self._buffers)
        self._reader.own, self._reader.find = self._own, find

    @property
    def memo(self) -> Any:
        """Every object by its place."""
        return self._reader.memo

    def load(self, label: str = "A value") -> Any:
        """The next value.

        Args:
            label: How messages call it.
        """
        start, self.failed = self._file.tell(), None
        try:
            return self._reader.load()
        except Exception as error:  # whatever the user's classes raise  # noqa: BLE001
            self.failed = error
            stands = Placeholder(
                f"{label} cannot be opened here: {type(error).__name__}: {error}. The cure: make it inside the "
                "distributed cell, or keep it out of what the cell reads."
            )
            vars(stands)["why"] = error.with_traceback(None)
            root = [stands]
            self._go_on_after(start, root)
            return root

    def close(self) -> None:
        """Nothing is read any more. What was read is then held by nobody but those who got it: no cycle keeps it."""
        self._own.clear()

    def _go_on_after(self, start: int, root: list[Placeholder]) -> None:
        """Read on behind a value that could not be opened. `root` stands for it, and its item for every part of it."""
        counts, sound = collections.Counter[str](), 0
        self._file.seek(0)
        while self._file.tell() <= start:
            sound = counts["MEMOIZE"]
            counts.update(opcode.name for opcode, _, _ in pickletools.genops(self._file))
        known = self._reader.memo.copy()
        # Python's own: C's crashes when it is given a memo (3.11).
        reader: Any = _PythonUnpickler(self._file, buffers=self._buffers[counts["NEXT_BUFFER"] :])
        reader.own, reader.find = self._own, self._find
        lost = dict.fromkeys(range(sound, counts["MEMOIZE"]), root[0])
        reader.memo = _Memo({**{place: known[place] for place in range(sound)}, **lost, sound: root})
        self._reader = reader

    # -- what pickles name ---------------------------------------------------------------------------------------------

    def _open_reference(self, token: Any) -> Any:
        found = self._side.references.resolve(token)
        self.resolved.append(found)
        return found

    def _open_special(self, word: str) -> Any:
        return self._side.resolve_special(word)

    def _open_from_host(self, host: Any, requires_grad: bool, is_parameter: bool) -> Any:
        tensor = host if self._place == "cpu" else host.to(self._place)
        if is_parameter:
            import torch

            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_(requires_grad)

    def _open_memory(self, data: Any, nbytes: int, device: str) -> Memory:
        memory = Memory.filled(data, device, self._place)
        self.new_memories.append(memory)
        return memory

    def _update_memory(self, number: int, data: Any) -> Memory:
        known: Memory = self._find(number)
        if not self.in_place:
            return Memory.filled(bytes(known.bytes()) if data is None else data, known.device, self._place)
        if data is not None:
            known.write(data)
        return known

    def _make_function(
        self, code: types.CodeType, globals_: dict[str, Any] | str | None, closure: Any
    ) -> types.FunctionType:
        if globals_ is None:
            globals_ = self._side.user_ns
        elif isinstance(globals_, str):
            globals_ = vars(importlib.import_module(globals_))
        globals_.setdefault("__builtins__", __builtins__)
        return types.FunctionType(code, globals_, code.co_name, None, closure)

    def _make_class(self, identity: str, kind: str, args: tuple[Any, ...], where: str | None) -> type:
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

    def _fill_class(self, cls: Any, state: dict[str, Any]) -> None:
        if cls in self._bare_classes:
            self._bare_classes.discard(cls)
            self.new_classes.append(cls)
            _cloudpickle._class_setstate(cls, (state, {}))
        else:  # it is merged when all has arrived
            self.held_classes.append((cls, state))

    def _make_type_variable(
        self, identity: str, name: str, constraints: Any, bound: Any, kinds: dict[str, bool], module: str
    ) -> Any:
        found = self._side.classes.get(identity)
        if found is None:
            found = typing.TypeVar(name, *constraints, bound=bound, **kinds)  # type: ignore[misc]
            found.__module__ = module
            self._side.classes.add(identity, found)
        return found


def _new_class(kind: str, args: tuple[Any, ...], classes: code.Classes) -> type:
    bases = args[0] if kind == "enum" else args[2]
    # A class that arrives is not defined anew: nobody hears of it, as nobody does of an instance.
    every = {each for base in bases if isinstance(base, type) for each in base.__mro__ if each in classes}
    hooks = {base: hook for base in every if (hook := vars(base).get("__init_subclass__")) is not None}
    for base in hooks:
        base.__init_subclass__ = classmethod(lambda cls, **keywords: None)  # type: ignore[assignment]
    try:
        if kind == "class" and args[0] in classes:
            metaclass, name, bases, keywords = args[:4]
            new: type = type.__new__(metaclass, name, bases, dict(keywords))
            return new
        make = _cloudpickle._make_skeleton_enum if kind == "enum" else _cloudpickle._make_skeleton_class
        made: type = make(*args)
        return made
    finally:
        for base, hook in hooks.items():
            base.__init_subclass__ = hook  # type: ignore[method-assign]


class _ByNames:
    own: dict[tuple[str, str], Any]
    find: Callable[[int], Any]

    def find_class(self, module: str, name: str) -> Any:
        found = self.own.get((module, name))
        return found if found is not None else super().find_class(module, name)  # type: ignore[misc]

    def persistent_load(self, pid: Any) -> Any:
        return self.find(pid)


class _Unpickler(_ByNames, pickle.Unpickler):
    """C's."""


class _PythonUnpickler(_ByNames, pickle._Unpickler):
    """Python's own."""


class _Memo(dict[int, Any]):
    """What refers to a value that could not be opened cannot be opened either."""

    def __getitem__(self, place: int) -> Any:
        found = super().__getitem__(place)
        if stands_for_lost(found):
            raise vars(found)["why"]
        return found


def stands_for_lost(obj: Any) -> bool:
    """Whether an object stands for a value that arrived and could not be opened."""
    return type(obj) is Placeholder and "why" in vars(obj)


def pairs_in(packed: Packed) -> Iterator[tuple[int, int]]:
    """(place in the memo, number) of each object in a pack that the opening side has already."""
    numbers = array("Q")
    numbers.frombytes(packed.pairs)
    return iter(zip(numbers[::2], numbers[1::2], strict=True))


def _writable(frame: Any) -> Any:
    # Arrays are built on the very buffer, and a user may write to an array.
    view = memoryview(frame)
    return bytearray(view) if view.readonly else frame
