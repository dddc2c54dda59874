"""Object graphs on their way between notebook and engines: what is by reference, what by value, what cannot go."""

from __future__ import annotations

import asyncio
import importlib
import io
import pickle
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distnb.errors import NamespaceError
from distnb.wire import codec
from distnb.wire.code import names_of_code, reduce_code, source_of
from distnb.wire.codec import Parcel
from distnb.wire.digests import is_array, is_tensor
from distnb.wire.memory import is_buffer, owner_of
from distnb.wire.messages import ObjectId
from distnb.wire.twins import is_value_twin
from distnb.wire.views import carrier_among, reduce_view

__all__ = ["GraphPickler", "GraphUnpickler", "Side", "Unsendable"]

_LOCK = type(threading.Lock())

_CURES: tuple[tuple[tuple[type, ...], str], ...] = (
    (
        (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
        "make it inside the distributed cell, or turn it into a list",
    ),
    ((io.IOBase,), "open it inside the distributed cell, by its path"),
    (
        (_LOCK, type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore),
        "make it inside the distributed cell",
    ),
    ((socket.socket,), "connect inside the distributed cell"),
    ((threading.Thread, subprocess.Popen), "start it inside the distributed cell"),
    ((asyncio.AbstractEventLoop, asyncio.Future), "await it in the notebook, and use its result"),
    ((types.FrameType, types.TracebackType), "keep its text (traceback.format_exc()) instead"),
)
_UNSENDABLE = tuple(kind for kinds, _ in _CURES for kind in kinds)
_SENDABLE_IO = (io.BytesIO, io.StringIO)


class Unsendable(NamespaceError):
    """An object in a graph cannot travel.

    Attributes:
        obj: The object.
        cure: What the user can do.
    """

    def __init__(self, obj: Any, cure: str) -> None:
        self.obj = obj
        self.cure = cure
        super().__init__(f"an object of type {type(obj).__qualname__} cannot travel: {cure}")


class Side:
    """The objects that every process has one of, and which therefore travel as a word.

    Args:
        user_ns: This process's user namespace.
    """

    def __init__(self, user_ns: dict[str, Any]) -> None:
        self.user_ns = user_ns
        self._streams: tuple[int, int] | None = None
        self._words: dict[int, str] = {}

    def specials(self) -> dict[int, str]:
        """The word of each such object, by its `id()`."""
        streams = id(sys.stdout), id(sys.stderr)
        if self._streams != streams:
            self._streams = streams
            words = ("user_ns", "main", "stdout", "stderr", "shell")
            self._words = {id(found): word for word in words if (found := self.resolve(word)) is not None}
        return self._words

    def resolve(self, word: str) -> Any:
        """The object here that a word stands for."""
        match word:
            case "user_ns":
                return self.user_ns
            case "main":
                return sys.modules["__main__"]
            case "stdout":
                return sys.stdout
            case "stderr":
                return sys.stderr
        ask = self.user_ns.get("get_ipython")
        return ask() if callable(ask) else None


class GraphPickler(codec.Pickler):
    """Pickles graphs; what `ids` knows goes by reference.

    Attributes:
        names: Global names of the user's namespace that functions on the way read.
        attributes: Other names in their code, to tell submodules.
        dynamic: Some function may read any name.
        sources: Texts of the cells that defined those functions.
        roots: The `id()` of objects that are on the way anyway, and the addresses of such tensors' storages.
        carriers: Arrays and buffers on the way in whose memory tensors may lie.
        neighbours: Gives the objects with ids that lie in the memory of an array or tensor.
    """

    def __init__(
        self,
        file: io.BytesIO,
        side: Side,
        ids: dict[int, ObjectId],
        rules: Mapping[type, Callable[[Any], Any] | None] | None = None,
    ) -> None:
        self._side = side
        self._ids = ids
        self._specials = side.specials()
        self._rules = {} if rules is None else rules
        self.roots: set[int] = set()
        self.carriers: list[Any] = []
        self.neighbours: Callable[[Any], list[tuple[ObjectId, Any]]] = lambda obj: []
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.dynamic = False
        self.sources: dict[str, str] = {}
        super().__init__(file)

    def persistent_id(self, obj: Any) -> Any:
        known = self._ids.get(id(obj))
        if known is not None:
            return known
        special = self._specials.get(id(obj))
        if special is not None:
            return special
        rule = self._rules.get(type(obj))
        return None if rule is None else rule(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            self._look_into(obj)
        elif isinstance(obj, _UNSENDABLE) and not isinstance(obj, _SENDABLE_IO):
            raise Unsendable(obj, next(cure for kinds, cure in _CURES if isinstance(obj, kinds)))
        elif type(obj) is types.ModuleType or isinstance(obj, types.ModuleType):
            if getattr(obj, "__spec__", None) is not None:
                return importlib.import_module, (obj.__name__,)
        elif is_array(obj):
            return self._reduce_array(obj)
        elif is_tensor(obj):
            return self._reduce_tensor(obj)
        reduced = reduce_code(self, obj, self._side.user_ns)
        if reduced is NotImplemented:
            reduced = self.reduce_tensor_data(obj)
        return reduced

    def _look_into(self, function: types.FunctionType) -> None:
        if function.__globals__ is not self._side.user_ns:
            return
        used = names_of_code(function.__code__)
        self.names |= used.names
        self.attributes |= used.attributes
        self.dynamic = self.dynamic or used.dynamic
        found = source_of(function.__code__)
        if found is not None:
            self.sources[found[0]] = found[1]

    def _reduce_array(self, array: Any) -> Any:
        """A view travels as a view when its base is there or on the way anyway, or is hardly larger."""
        near = carrier_among(self._neighbours_there(array), array)
        if near is not None:
            return reduce_view(near, array, elements=True)
        owner = owner_of(array)
        if owner is array:
            self.carriers.append(array)
            return NotImplemented
        if is_array(owner):
            whole = owner.flags.c_contiguous and id(owner) not in self._ids
            nbytes, is_root = owner.nbytes, id(owner) in self.roots
        elif is_buffer(owner):
            whole, nbytes, is_root = id(owner) not in self._ids, 0, True
        else:  # a tensor's storage
            owner = self._storages.setdefault(owner._cdata, owner)
            whole = carrier_among([owner], array) is not None
            nbytes, is_root = owner.nbytes(), owner.data_ptr() in self.roots
        if not whole or (not is_root and nbytes > 4 * array.nbytes):
            return NotImplemented
        return reduce_view(owner, array, elements=False)

    def _neighbours_there(self, obj: Any) -> list[Any]:
        """Objects of the notebook that lie in the same memory, and that the other side has, too."""
        return [
            other
            for identity, other in self.neighbours(obj)
            if is_value_twin(identity) and self._ids.get(id(other)) == identity
        ]

    def _reduce_tensor(self, tensor: Any) -> Any:
        near = carrier_among(self._neighbours_there(tensor), tensor) if tensor.numel() else None
        come = None
        if near is None and self.carriers and tensor.numel() and tensor.device.type == "cpu":
            come = carrier_among(self.carriers, tensor)
        carrier = come if near is None else near
        if tensor.is_leaf and tensor.grad is None and not vars(tensor) and carrier is None:
            return self.reduce_from_device(tensor)
        kind = type(tensor)
        # A copy of what has a graph is cut off from it.
        requires_grad, gradient = (tensor.requires_grad, tensor.grad) if tensor.is_leaf else (False, None)
        # As state, so that a tensor may stand in its own attributes.
        state = (requires_grad, gradient, vars(tensor))
        if carrier is not None:
            make, args = reduce_view(carrier, tensor, elements=near is not None)
            return make, args, state, None, None, _fill_tensor
        plain = tensor.detach()
        reduced = self.reduce_from_device(plain)
        make, args = plain.__reduce_ex__(5)[:2] if reduced is NotImplemented else reduced
        return _make_tensor, (kind, make, args), state, None, None, _fill_tensor


def _make_tensor(kind: type, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import torch

    tensor = make(*args)
    return torch.nn.Parameter(tensor, requires_grad=False) if kind is torch.nn.Parameter else tensor


def _fill_tensor(tensor: Any, state: tuple[bool, Any, dict[str, Any]]) -> None:
    requires_grad, gradient, attributes = state
    if requires_grad:
        tensor.requires_grad_()
    tensor.grad = gradient
    vars(tensor).update(attributes)


class GraphUnpickler(codec.Unpickler):
    """Reads what `GraphPickler` wrote; `find` gives the objects that came by reference."""

    def __init__(self, parcel: Parcel, side: Side, find: Callable[[Any], Any]) -> None:
        self._side = side
        self._find = find
        super().__init__(io.BytesIO(bytes(parcel.frames[0])), buffers=map(_writable, parcel.frames[1:]))

    def persistent_load(self, pid: Any) -> Any:
        return self._side.resolve(pid) if isinstance(pid, str) else self._find(pid)


def _writable(frame: Any) -> Any:
    # Arrays are built on the very buffer, and a user may write to an array.
    view = memoryview(frame)
    if not view.readonly:
        return frame
    # Where the sender's array was read-only, pickle wrapped the buffer that arrived, and that is nobody else's.
    whole = memoryview(view.obj)
    return whole if not whole.readonly and whole.nbytes == view.nbytes else bytearray(view)


def pack_all(pickler: GraphPickler, file: io.BytesIO, values: Sequence[Any]) -> Parcel:
    """Dump several values through one pickler, so that what they share stays shared."""
    for value in values:
        pickler.dump(value)
    return Parcel([file.getbuffer(), *pickler.buffers])


def picklable_error(error: BaseException) -> bool:
    """Whether an exception is how pickling says that it cannot pickle something."""
    kinds = (
        Unsendable,
        pickle.PicklingError,
        TypeError,
        AttributeError,
        NotImplementedError,
        RecursionError,
        ValueError,
        RuntimeError,
    )
    return isinstance(error, kinds)
