"""Opening what the other side packed: what it knows by numbers is found, or brought up to date."""

from __future__ import annotations

import collections
import functools
import io
import pickle
import pickletools
from array import array
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from distnb.objects import code, packing
from distnb.objects.memory import Memory
from distnb.objects.packing import Packed, Side
from distnb.objects.placeholder import Placeholder

__all__ = ["Opener", "pairs_in"]


class Opener:
    """Reads one pack, a value at a time.

    What cannot be opened, whatever a user's class raises, is a placeholder, and all else is as it was sent.

    Args:
        packed: What was sent.
        side: This process.
        find: The object of a number that this side knows.
        place: Where the memory of an accelerator lies here: a device of torch's, or "cpu".

    Attributes:
        user_ns: The globals of functions that arrive.
        in_place: Whether memory that is known is written to; else what arrives is a copy.
        made_classes: Classes that are new here and have no attributes yet.
        new_classes: Those that have got them.
        held_classes: Classes that were known, each with the state that arrived for it.
        new_memories: Memory that was made.
        resolved: What references stood for: handles, and objects that live here. They did not arrive.
        bound: Names in the namespace that classes were bound to on the way.
        label: How messages call the value that is read.
        failed: What the value that was read last could not be opened for; None if all went well.
    """

    def __init__(self, packed: Packed, side: Side, find: Callable[[int], Any], place: str) -> None:
        self.user_ns = side.user_ns
        self.in_place = True
        self.made_classes: set[type] = set()
        self.new_classes: list[type] = []
        self.held_classes: list[tuple[type, dict[str, Any]]] = []
        self.bound: list[str] = []
        self.new_memories: list[Memory] = []
        self.resolved: list[Any] = []
        self.side = side
        self._find = find
        self._place = place
        self._own: dict[tuple[str, str], Any] = {
            (packing.__name__, "open_reference"): self._resolve,
            (packing.__name__, "open_special"): side.resolve_special,
            (packing.__name__, "open_memory"): self._open_memory,
            (packing.__name__, "update_memory"): self._update_memory,
            (packing.__name__, "open_from_host"): self._open_from_host,
        }
        for function in (code.make_function, code.make_class, code.fill_class, code.make_type_variable):
            self._own[code.__name__, function.__name__] = functools.partial(function, self)
        self.label = ""
        self.failed: Exception | None = None
        self._data = packed.data
        self._buffers = [_writable(each) for each in packed.buffers]
        self._file = io.BytesIO(packed.data)
        self._reader: _Quick | _Patient = _Quick(self, self._file, buffers=self._buffers)

    @property
    def memo(self) -> Any:
        """Every object by its place."""
        return self._reader.memo

    def load(self) -> Any:
        """The next value."""
        start, self.failed = self._file.tell(), None
        try:
            return self._reader.load()
        except Exception:  # whatever the user's classes raise  # noqa: BLE001
            self._reader = _Patient(self, start)
            return self._reader.load()

    def close(self) -> None:
        """Nothing is read any more. What was read is then held by nobody but those who got it: no cycle keeps it."""
        self._own.clear()
        del self._reader.opener

    def own(self, module: str, name: str) -> Any:
        """What a name in a pickle means here; None for what it means anywhere."""
        return self._own.get((module, name))

    def find(self, number: int) -> Any:
        """The object of a number."""
        return self._find(number)

    def begun(self, start: int) -> tuple[io.BytesIO, list[Any], dict[int, Any]]:
        """To go on reading from the beginning of a value: the file, the buffers that are left, and the memo."""
        file, counts = io.BytesIO(self._data), collections.Counter[str]()
        while file.tell() < start:
            counts.update(code.name for code, _, _ in pickletools.genops(file))
        memo = {place: obj for place, obj in self._reader.memo.copy().items() if place < counts["MEMOIZE"]}
        return file, self._buffers[counts["NEXT_BUFFER"] :], memo

    def _resolve(self, token: Any) -> Any:
        found = self.side.references.resolve(token)
        self.resolved.append(found)
        return found

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
        if data is None:
            return known if self.in_place else Memory.filled(bytes(known.bytes()), known.device, self._place)
        if not self.in_place:
            return Memory.filled(data, known.device, self._place)
        known.write(data)
        return known


class _Quick(pickle.Unpickler):
    def __init__(self, opener: Opener, file: Any, *, buffers: Any) -> None:
        self.opener = opener
        super().__init__(file, buffers=buffers)

    def find_class(self, module: str, name: str) -> Any:
        own = self.opener.own(module, name)
        return own if own is not None else super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return self.opener.find(pid)


_Slow: Any = pickle._Unpickler  # Python's own: its steps can be replaced


class _Patient(_Slow):  # type: ignore[misc]
    """Goes on where an object cannot be made, with a placeholder for it; slow, and only used after a failure."""

    def __init__(self, opener: Opener, start: int) -> None:
        self.opener = opener
        self._why: dict[int, Exception] = {}  # by the `id()` of placeholders, which the memo holds
        file, buffers, memo = opener.begun(start)
        super().__init__(file, buffers=buffers)
        opener._file = file
        self.memo = memo

    def find_class(self, module: str, name: str) -> Any:
        own = self.opener.own(module, name)
        try:
            return own if own is not None else super().find_class(module, name)
        except Exception as error:  # noqa: BLE001
            return self._placeholder(error)

    def persistent_load(self, pid: Any) -> Any:
        return self.opener.find(pid)

    def _placeholder(self, error: Exception) -> Placeholder:
        self.opener.failed = error = self.opener.failed or error  # what fails after it fails for it
        made = Placeholder(
            f"{self.opener.label or 'A value'} cannot be opened here: {type(error).__name__}: {error}. The cure: make "
            "it inside the distributed cell, or keep it out of what the cell reads."
        )
        self._why[id(made)] = error
        return made

    def _made(self, operands: int, make: Callable[[Any], None]) -> None:
        """An opcode that takes operands from the stack and puts an object there."""
        rest, given = self.stack[:-operands], self.stack[-operands:]
        try:
            if type(given[0]) is Placeholder:
                self.stack[:] = [*rest, given[0]]
            else:
                make(self)
        except Exception as error:  # noqa: BLE001
            self.stack[:] = [*rest, self._placeholder(error)]

    def _filled(self, operands: int, fill: Callable[[Any], None]) -> None:
        """An opcode that fills the object below its operands, which are marked if there are any number of them."""
        obj = self.metastack[-1][-1] if not operands else self.stack[-1 - operands]
        rest = self.metastack[-1][:-1] if not operands else self.stack[: -1 - operands]
        try:
            if type(obj) is not Placeholder:
                fill(self)
                return
            if not operands:
                self.pop_mark()
        except Exception as error:  # noqa: BLE001
            stands, obj = obj, self._placeholder(error)
            for place, known in self.memo.items():
                if known is stands:
                    self.memo[place] = obj
        self.stack[:] = [*rest, obj]

    def _found(self, operands: int, find: Callable[[Any], None]) -> None:
        """An opcode that puts an object there that was met before."""
        find(self)
        if type(self.stack[-1]) is Placeholder:
            self.opener.failed = self.opener.failed or self._why.get(id(self.stack[-1]))

    dispatch: ClassVar[dict[int, Any]] = dict(_Slow.dispatch)


def _with(way: Any, operands: int, known: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda reader: way(reader, operands, known)


for _code, _way, _operands in (
    (pickle.BINGET, _Patient._found, 0),
    (pickle.LONG_BINGET, _Patient._found, 0),
    (pickle.REDUCE, _Patient._made, 2),
    (pickle.NEWOBJ, _Patient._made, 2),
    (pickle.NEWOBJ_EX, _Patient._made, 3),
    (pickle.BUILD, _Patient._filled, 1),
    (pickle.APPEND, _Patient._filled, 1),
    (pickle.SETITEM, _Patient._filled, 2),
    (pickle.APPENDS, _Patient._filled, 0),
    (pickle.SETITEMS, _Patient._filled, 0),
    (pickle.ADDITEMS, _Patient._filled, 0),
):
    _Patient.dispatch[_code[0]] = _with(_way, _operands, _Patient.dispatch[_code[0]])


def pairs_in(packed: Packed) -> Iterator[tuple[int, int]]:
    """(place in the memo, number) of each object in a pack that the opening side has already."""
    numbers = array("Q")
    numbers.frombytes(packed.pairs)
    return iter(zip(numbers[::2], numbers[1::2], strict=True))


def _writable(frame: Any) -> Any:
    # Arrays are built on the very buffer, and a user may write to an array.
    view = memoryview(frame)
    return bytearray(view) if view.readonly else frame
