"""The pickler of both sides: cloudpickle's, at C speed, with a reducer for what pickle does badly.

It is used in two ways. *Looking* at a value gives its digest: nothing is sent, and nothing needs to be opened again.
*Packing* values makes what the other side opens, with numbers in the place of what that has already.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
import xxhash

from distnb.errors import CannotTravelError
from distnb.objects import code
from distnb.objects.memory import Memories, Memory, array_window, dense_tensor, plain_array, tensor_window
from distnb.objects.placeholder import Placeholder, cure_for, is_unsendable, refusal

__all__ = ["Looker", "Packer", "Packed", "References", "Side", "out_of_band"]

_HEAP_TYPE = 1 << 9
_INLINE_NBYTES = 1024  # below this a buffer of its own costs more than it saves


class References(Protocol):
    """What one side sends by reference: objects that live on the engines, and the notebook's handles of them."""

    def token(self, obj: Any) -> Any:
        """What stands for an object; None for one that is sent by value."""
        ...

    def look(self, obj: Any) -> Any:
        """What stands for an object in a digest; None for one whose content counts."""
        ...

    def resolve(self, token: Any) -> Any:
        """The object, on this side, that a token of the other side stands for."""
        ...


@dataclass
class Side:
    """This process, as far as packing has to know it.

    Attributes:
        user_ns: Its namespace.
        references: What it sends by reference.
        classes: Those that it has sent or received by value.
        copying: What it sends is a copy of objects that stay: tensors without the graph behind them, and an object that
            cannot be pickled is an error, not a placeholder.
    """

    user_ns: dict[str, Any]
    references: References
    classes: code.Classes = field(default_factory=code.Classes)
    copying: bool = False

    def special(self, obj: Any) -> str | None:
        """The word for an object that every process has one of."""
        if obj is sys.stdout:
            return "stdout"
        if obj is sys.stderr:
            return "stderr"
        ask = self.user_ns.get("get_ipython")
        return "shell" if ask is not None and callable(ask) and obj is ask() else None

    def resolve_special(self, word: str) -> Any:
        """The object here that a word stands for."""
        if word in ("stdout", "stderr"):
            return getattr(sys, word)
        ask = self.user_ns.get("get_ipython")
        return ask() if callable(ask) else None


@dataclass(frozen=True)
class Packed:
    """Values as they are sent: one pickle for each, with one memo for all, and the buffers beside them.

    Attributes:
        serial: Numbers the objects in it, together with their place in the memo.
        names: What each of them is the value of, in order.
        data, buffers: The pickles and their buffers.
        pairs: (place in the memo, number that the other side knows the object by), one after the other.
    """

    serial: int
    names: tuple[str, ...]
    data: Any
    buffers: tuple[Any, ...]
    pairs: bytes = b""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.data) + sum(memoryview(each).nbytes for each in self.buffers)

    def __reduce__(self) -> Any:
        buffers = tuple(pickle.PickleBuffer(each) for each in self.buffers)
        return Packed, (self.serial, self.names, pickle.PickleBuffer(self.data), buffers, self.pairs)


# Named in pickles; where they are opened the opener puts its own methods in their place.
def open_reference(token: Any) -> Any:
    """The object that lives elsewhere."""
    raise NotImplementedError


def open_special(word: str) -> Any:
    """The object that every process has one of."""
    raise NotImplementedError


def open_memory(data: Any, nbytes: int, device: str) -> Memory:
    """New memory."""
    raise NotImplementedError


def update_memory(number: int, data: Any) -> Memory:
    """Known memory, with other content."""
    raise NotImplementedError


def open_from_host(host: Any, requires_grad: bool, is_parameter: bool) -> Any:
    """A tensor that was on an accelerator, on this side's."""
    raise NotImplementedError


def open_array(memory: Memory, dtype: Any, shape: Any, strides: Any, offset: int, writeable: bool) -> Any:
    """An array on some memory."""
    import numpy

    if not memory.nbytes:
        array = numpy.ndarray(shape, dtype)
    else:
        array = numpy.ndarray(shape, dtype, memory.bytes(), offset, strides)
    array.flags.writeable = writeable
    return array


def open_tensor(memory: Memory, dtype: Any, shape: Any, stride: Any, offset: int, kind: type, pinned: Any) -> Any:
    """A tensor on some memory; its gradient and attributes follow as state."""
    import torch

    whole = memory.tensor()
    tensor = torch.empty(0, dtype=dtype, device=whole.device)
    with torch.no_grad():
        tensor.set_(whole.untyped_storage(), whole.storage_offset() // dtype.itemsize + offset, shape, stride)
    return tensor if kind is torch.Tensor else kind(tensor, requires_grad=False)


def fill_tensor(tensor: Any, state: tuple[bool, Any, dict[str, Any]]) -> None:
    """Give a tensor its gradient and its attributes."""
    requires_grad, gradient, attributes = state
    if requires_grad:
        tensor.requires_grad_()
    tensor.grad = gradient
    if attributes:
        vars(tensor).update(attributes)


def open_storage(memory: Memory) -> Any:
    """A storage on some memory."""
    return memory.tensor().untyped_storage()


def open_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception without a call of its own `__init__`, which may want other arguments; Python's own is called."""
    error = kind.__new__(kind, *args)
    base: Any = next(each for each in kind.__mro__ if not each.__flags__ & _HEAP_TYPE)
    with contextlib.suppress(TypeError):
        base.__init__(error, *args)
    error.args = args
    return error


def open_module(name: str) -> Any:
    """A module by its name; a placeholder where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return Placeholder(
            f"The module {name} cannot be imported on this replica ({error}). The cure: install it where the engines "
            "run, or add its folder to sys.path in a cell."
        )


class Looker(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles to be digested.

    Attributes:
        names: Global names of the namespace that functions on the way read.
        attributes: Other names in their code, to tell submodules.
        dynamic: Some function may read any name.
        sources: Texts of the cells that defined those functions, by file name.
        classes: Those that are sent by value: their content is looked at by itself.
        looked_at: The class whose content is looked at now.
        label, root: How messages call what is pickled, and what it is.
    """

    def __init__(self, side: Side, keep: Callable[[pickle.PickleBuffer], bool] | None = None) -> None:
        self.file = io.BytesIO()
        self.side = side
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.dynamic = False
        self.sources: dict[str, str] = {}
        self.classes: dict[type, None] = {}
        self.looked_at: type | None = None
        self.label = ""
        self.root: Any = None
        self._rules: dict[type, Callable[[Any, Any], Any]] = dict(_RULES)
        self._digests: list[bytes] = []
        super().__init__(self.file, protocol=5, buffer_callback=keep or _digests_into(self._digests))

    def digest_of(self, value: Any) -> bytes:
        """A digest of all that a value is."""
        self.file.seek(0)
        self.file.truncate()
        self._digests.clear()
        self.clear_memo()
        self.dump(value)
        with self.file.getbuffer() as stream:
            hasher = xxhash.xxh3_128(stream)
        for each in self._digests:
            hasher.update(each)
        return hasher.digest()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        rule = self._rules.get(kind)
        if rule is None:
            rule = self._rules[kind] = _rule_for(kind)
        return rule(self, obj)

    # -- what a digest is made of, and a pack otherwise ----------------------------------------------------------------

    def reference(self, obj: Any) -> Any:
        """What stands for an object that is not sent by value."""
        return self.side.references.look(obj)

    def array(self, array: Any) -> Any:
        """An array's content."""
        if not plain_array(array):
            return NotImplemented
        data = array if array.flags.c_contiguous else array.copy(order="C")
        nbytes = data.nbytes
        if nbytes < _INLINE_NBYTES:
            return _content, (
                array.dtype.str if array.dtype.names is None else array.dtype.descr,
                array.shape,
                data.tobytes(),
            )
        # As bytes: some kinds of elements (dates) have no buffers.
        return _content, (array.dtype.str, array.shape, pickle.PickleBuffer(_bytes_view(data)))

    def tensor(self, tensor: Any) -> Any:
        """A tensor's content, its gradient's, and its attributes."""
        if not tensor.requires_grad:
            try:
                data = tensor.numpy()  # at once, where NumPy knows its kind: data sets have thousands of small ones
            except (TypeError, RuntimeError):
                return self._tensor_by_bytes(tensor)
            extra = (tensor.grad, tensor.__dict__) if tensor.grad is not None or tensor.__dict__ else None
            if data.nbytes < _INLINE_NBYTES:
                return _content, (data.dtype.char, data.shape, data.tobytes(), extra)
            if data.flags.c_contiguous:
                return _content, (data.dtype.char, data.shape, pickle.PickleBuffer(data), extra)
        return self._tensor_by_bytes(tensor)

    def _tensor_by_bytes(self, tensor: Any) -> Any:
        """The same for any dense tensor."""
        if not dense_tensor(tensor):
            return self.other(tensor)
        plain = tensor.detach()
        if plain.device.type != "cpu":
            plain = plain.cpu()
        flat = plain if plain.is_contiguous() else plain.contiguous()
        extra = (tensor.grad if tensor.is_leaf else None, tensor.__dict__ or None)
        kind = (str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad, type(tensor).__name__)
        data = _bytes_of(flat)
        if data.nbytes < _INLINE_NBYTES:
            return _content, (kind, data.tobytes(), *extra)
        return _content, (kind, pickle.PickleBuffer(data), *extra)

    def storage(self, storage: Any) -> Any:
        """A storage's bytes."""
        import torch

        data: Any = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().numpy()
        return _content, (pickle.PickleBuffer(data),)

    # -- what both are made of alike -----------------------------------------------------------------------------------

    def function(self, function: types.FunctionType) -> Any:
        """A function by value, with its names noted."""
        if function.__globals__ is self.side.user_ns:
            self.look_into(function)
        reference = self.reference(function)
        return reference if reference is not None else code.reduce_function(function, self.side.user_ns)

    def look_into(self, function: types.FunctionType) -> None:
        """Note what a function of the namespace reads."""
        used = code.names_of_code(function.__code__)
        self.names |= used.names
        self.attributes |= used.attributes
        self.dynamic = self.dynamic or used.dynamic
        found = code.source_of(function.__code__)
        if found is not None:
            self.sources[found[0]] = found[1]

    def a_class(self, cls: type) -> Any:
        """A class by its name, or as one that is looked at by itself."""
        reduced = code.reduce_class(cls, self.side.classes) if cls is self.looked_at else code.kind_of_class(cls)
        if reduced is not True:
            return reduced
        self.classes[cls] = None
        return _content, ("class", self.side.classes.id_of(cls))

    def module(self, module: types.ModuleType) -> Any:
        """A module by its name."""
        if getattr(module, "__spec__", None) is None and module.__name__ != "__main__":
            return NotImplemented
        return open_module, (module.__name__,)

    def cache(self, cached: Any) -> Any:
        """A function with a cache, and nothing in it."""
        from distnb.objects.plain import is_importable

        if is_importable(cached):
            return NotImplemented
        state = {key: value for key, value in cached.__dict__.items() if key != "__wrapped__"}
        return code.make_cache, (cached.__wrapped__, cached.cache_parameters()), state

    def instance(self, obj: Any) -> Any:
        """Any other object: as it says itself, or a placeholder."""
        reference = self.reference(obj)
        if reference is not None:
            return reference
        word = self.side.special(obj)
        if word is not None:
            return open_special, (word,)
        if is_unsendable(obj):
            return self.refused(obj, None)
        if isinstance(obj, BaseException) and type(obj).__reduce__ is BaseException.__reduce__:
            return open_exception, (type(obj), obj.args), obj.__dict__ or None
        return self.other(obj)

    def other(self, obj: Any) -> Any:
        """As an object says itself how it is pickled."""
        kind = type(obj)
        if kind in self.dispatch_table:
            return NotImplemented
        try:
            return obj.__reduce_ex__(5)
        except Exception as error:  # whatever a user's class raises  # noqa: BLE001
            return self.refused(obj, error)

    def refused(self, obj: Any, error: Exception | None) -> Any:
        """A placeholder for an object that cannot be sent."""
        text = refusal(self.label, self.root, obj, cure_for(obj), error)
        if self.side.copying:
            raise CannotTravelError(text)
        return Placeholder, (text,)


def _content(*parts: Any) -> None:
    """Named in pickles that are digested; never called."""


def _bytes_view(array: Any) -> Any:
    import numpy

    return array.reshape(-1).view(numpy.uint8)


def _bytes_of(flat: Any) -> Any:
    """The bytes of a contiguous tensor on the host, as an array."""
    import torch

    if flat.dtype is torch.float32 or flat.dtype is torch.int64:
        return flat.numpy()
    return flat.reshape(-1).view(torch.uint8).numpy()


# The two callbacks are no methods of the pickler's: those would be a cycle that holds all that was packed.


def _digests_into(digests: list[bytes]) -> Callable[[pickle.PickleBuffer], bool]:
    """Keeps digests of buffers instead of these; of memory that is seen again, the one it had."""
    seen: dict[tuple[int, int], bytes] = {}

    def keep(buffer: pickle.PickleBuffer) -> bool:
        import numpy

        raw = buffer.raw()
        key = numpy.frombuffer(raw, dtype=numpy.uint8).__array_interface__["data"][0], raw.nbytes
        digest = seen.get(key)
        if digest is None:
            digest = seen[key] = xxhash.xxh3_128_digest(raw)
        digests.append(digest)
        return False

    return keep


def out_of_band(buffers: list[Any]) -> Callable[[pickle.PickleBuffer], bool]:
    """Keeps large buffers out of the pickle."""

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _INLINE_NBYTES:
            return True
        buffers.append(raw)
        return False

    return keep


class Packer(Looker):
    """Pickles to be opened.

    Args:
        known: Gives the number of an object that the other side has as it is, else None.
        number_of: Gives the number of one that it has, perhaps with other content.
        memories: Memory that is known.
    """

    def __init__(
        self,
        side: Side,
        known: Callable[[Any], int | None] | None,
        number_of: Callable[[Any], int | None],
        memories: Memories,
    ) -> None:
        self.buffers: list[Any] = []
        self._number_of = number_of
        self._memories = memories
        if known is not None:
            self.persistent_id = known  # asked for every object: only where there is something to be found
        super().__init__(side, out_of_band(self.buffers))

    def reference(self, obj: Any) -> Any:
        token = self.side.references.token(obj)
        return None if token is None else (open_reference, (token,))

    def array(self, array: Any) -> Any:
        if not plain_array(array):
            return NotImplemented
        memory, offset = array_window(array, self._memories)
        if offset < 0:
            return open_array, (memory, array.dtype, array.shape, None, 0, bool(array.flags.writeable))
        return open_array, (memory, array.dtype, array.shape, array.strides, offset, bool(array.flags.writeable))

    def tensor(self, tensor: Any) -> Any:
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            # Memory that torch may not show as bytes goes as a copy on the host; views become tensors of their own.
            requires_grad = tensor.is_leaf and tensor.requires_grad
            return open_from_host, (tensor.detach().cpu(), requires_grad, type(tensor).__name__ == "Parameter")
        if not dense_tensor(tensor):
            return self.other(tensor)
        if tensor.grad_fn is not None or (tensor.requires_grad and not tensor.is_leaf):
            if not self.side.copying:
                return self.graph(tensor)
            tensor = tensor.detach()
        memory, offset = tensor_window(tensor, self._memories)
        size = tensor.element_size()
        if offset % size:
            memory, offset = tensor_window(tensor.detach().clone(), Memories())
        state = (tensor.requires_grad, tensor.grad if tensor.is_leaf else None, tensor.__dict__ or None)
        args = (memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset // size, type(tensor), None)
        if state == (False, None, None):
            return open_tensor, args
        return open_tensor, args, state, None, None, fill_tensor

    def a_class(self, cls: type) -> Any:
        return code.reduce_class(cls, self.side.classes)

    def graph(self, tensor: Any) -> Any:
        """A tensor with a graph of operations behind it, which stays in its process."""
        reference = self.reference(tensor)
        if reference is not None:
            return reference
        cure = "pass on tensor.detach(), or compute it inside the distributed cell"
        return Placeholder, (
            refusal(
                self.label,
                self.root,
                tensor,
                cure,
                "it has a graph of operations behind it, which stays in its process",
            ),
        )

    def storage(self, storage: Any) -> Any:
        import torch

        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return open_storage, (tensor_window(whole, self._memories)[0],)

    def memory(self, memory: Memory) -> Any:
        """The bytes, unless the other side has them."""
        data = memory.bytes()
        number = self._number_of(memory)
        digest = xxhash.xxh3_128_digest(data) if data.nbytes else b""
        shown = pickle.PickleBuffer(data) if data.nbytes else b""
        known, memory.digest = memory.digest, digest
        if number is None:
            return open_memory, (shown, memory.nbytes, memory.device)
        return update_memory, (number, None if known == digest else shown)


def _reduce_tensor(pickler: Looker, tensor: Any) -> Any:
    reference = pickler.reference(tensor)
    return reference if reference is not None else pickler.tensor(tensor)


def _reduce_other_tensor(pickler: Looker, tensor: Any) -> Any:
    """A tensor of a class of its own: as a plain one where only a copy on the host can be sent."""
    if tensor.device.type in ("cpu", "cuda", "meta"):
        return pickler.instance(tensor)
    return _reduce_tensor(pickler, tensor)


def _rule_for(kind: type) -> Callable[[Any, Any], Any]:
    """How objects of a type are reduced: a method of the pickler."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "UntypedStorage"):
        if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return _reduce_tensor
        if issubclass(kind, torch.Tensor) and kind.__reduce_ex__ is torch.Tensor.__reduce_ex__:
            return _reduce_other_tensor
        if kind is torch.UntypedStorage:
            return lambda pickler, obj: pickler.storage(obj)
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind in (numpy.ndarray, numpy.memmap):
        return lambda pickler, obj: pickler.array(obj)
    if issubclass(kind, type):
        return lambda pickler, obj: pickler.a_class(obj)
    if issubclass(kind, types.ModuleType):
        return lambda pickler, obj: pickler.module(obj)
    return lambda pickler, obj: pickler.instance(obj)


_RULES: dict[type, Callable[[Any, Any], Any]] = {
    types.FunctionType: lambda pickler, obj: pickler.function(obj),
    types.CellType: lambda pickler, obj: code.reduce_cell(obj),
    types.CodeType: lambda pickler, obj: NotImplemented,
    functools._lru_cache_wrapper: lambda pickler, obj: pickler.cache(obj),
    functools.cached_property: lambda pickler, obj: (
        functools.cached_property,
        (obj.func,),
        {"attrname": obj.attrname, "__doc__": obj.__doc__},
    ),
    typing.TypeVar: lambda pickler, obj: code.reduce_type_variable(obj, pickler.side.classes),
    weakref.ref: lambda pickler, obj: (weakref.ref, (obj(),)),
    Memory: lambda pickler, obj: pickler.memory(obj),
    Placeholder: lambda pickler, obj: obj.__reduce__(),
}
