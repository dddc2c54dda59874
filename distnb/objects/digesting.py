"""The pickler of both sides, which extends cloudpickle's by reducers of its own, and the digests of pickles.

*Digesting* a value computes the digest of its pickle and finds the objects in it. The pickle is neither sent nor
opened. `packing` derives from this class the pickler of values that are sent.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
import xxhash

from distnb.compat import accelerate_internals, matplotlib_internals, pandas_internals, transformers_internals
from distnb.compat.keras_core import reduce_input
from distnb.compat.pickle_internals import objects_in_memo
from distnb.errors import CannotTravelError
from distnb.objects import constructors, keras_archives
from distnb.objects.code import definitions
from distnb.objects.code.hidden_functions import functions_within, hides_parts
from distnb.objects.constructors import ByOpener
from distnb.objects.memory.blocks import (
    BYTES_AT,
    PLAIN_DTYPES,
    MemoryBlock,
    TensorBatch,
    bytes_of,
    dense_tensor,
    is_stored,
    plain_memory,
)
from distnb.objects.memory.mapped_files import file_of, window_of
from distnb.objects.memory.plain_tensors import digests_of, plain_among
from distnb.objects.memory.received_memory import digest_at
from distnb.objects.placeholder import Placeholder, cure_for, is_unsendable, label_of, refusal
from distnb.objects.plain import is_importable
from distnb.objects.world_bound import is_training_arguments, is_world_bound

__all__ = ["INLINE_NBYTES", "Digester", "Digests", "References", "Side", "content", "on_accelerator"]

INLINE_NBYTES = 1024
"""The size in bytes below which a separate buffer costs more than it saves."""

_LARGE_NBYTES = 64 << 10


class References(Protocol):
    """The objects that one side sends by reference: objects that stay on the engines, and the notebook's handles."""

    def token(self, obj: Any) -> Any:
        """Return the token that represents an object, or None if the object is sent by value."""

    def digest_token(self, obj: Any) -> Any:
        """Return the tuple that represents an object in a digest, or None if its content is digested."""

    def referred(self, keys: Iterable[int]) -> set[int]:
        """Return the `id()`s, among those of tensors, of tensors for which `digest_token` returns a token."""

    def send_by_value(self, parts: Any) -> None:
        """Send these tensors by value, since they are parts of a tensor that is sent by value.

        Args:
            parts: A structure of tuples and tensors.
        """

    def resolve(self, token: Any) -> Any:
        """Return this side's object for a token of the other side."""


@dataclass
class Side:
    """The state of this process that packing needs.

    Attributes:
        user_ns: The namespace.
        references: The objects that it sends by reference.
        classes: The classes that it has sent or received by value.
        copying: True if it sends copies of objects that stay here. Tensors are then sent without their graphs, and an
            object that cannot be pickled raises an error instead of becoming a placeholder.
        resizable_nbytes: The size up to which a tensor that can be resized where it comes from can be resized here.
    """

    user_ns: dict[str, Any]
    references: References
    classes: definitions.Classes = field(default_factory=definitions.Classes)
    copying: bool = False
    resizable_nbytes: int = 64 << 20


@dataclass
class Digests:
    """The digests of some values, and what was found while they were computed.

    Attributes:
        by_name: The digest of each value.
        names: Names of the namespace that functions in the values read.
        attributes: Other names in the functions' code. They show which submodules it uses.
        imports: The modules that the functions import (see `CodeNames`).
        sources: Texts of the cells that defined the functions, by file name.
        dynamic: True if one of the functions may read any name.
        unordered: The names of values with a set whose items each process has in an order of its own.
        refused: Placeholders for values that cannot be packed at all, by name.
        classes: Classes in the values that are sent by value, each under a name of its own.
        large: The digests of large memory by (address, size in bytes), for packing, with the object that keeps the
            memory alive, since another object's would get its address.
        plain: The plain tensors in each value that has any, for packing, by the value's name.
    """

    by_name: dict[str, bytes] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    sources: dict[str, str] = field(default_factory=dict)
    dynamic: bool = False
    unordered: set[str] = field(default_factory=set)
    refused: dict[str, Placeholder] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)
    large: dict[tuple[int, int], tuple[bytes, Any]] = field(default_factory=dict)
    plain: dict[str, list[Any]] = field(default_factory=dict)

    def add_function(self, function: types.FunctionType) -> None:
        """Add the names that a function of the namespace reads."""
        used = definitions.names_of_code(function.__code__)
        self.names |= used.names
        self.attributes |= used.attributes
        self.imports |= used.imports
        self.dynamic = self.dynamic or used.dynamic
        found = definitions.source_of(function.__code__)
        if found is not None:
            self.sources[found[0]] = found[1]


class Digester(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler of values whose pickles are digested.

    Args:
        side: This process.
        seen: Receives the findings in the values; None for a new object.
        file, keep: The file for the pickle, and the function that receives each buffer. By default both are digested.

    Attributes:
        seen: The findings in the values.
        digested_class: The class whose content is being digested. Other classes have digests of their own.
        label, root: The label of the pickled value in messages, and the value.
        arranged: The items of the sets in the most recently digested value whose order depends on addresses, arranged
            by their content. By the `id()` of the set.
        plain: The plain tensors in the most recently digested value.
    """

    persistent_id: Callable[[Any], Any]

    def __init__(
        self,
        side: Side,
        seen: Digests | None = None,
        file: io.BytesIO | None = None,
        keep: Callable[[pickle.PickleBuffer], bool] | None = None,
    ) -> None:
        self.side = side
        self.seen = Digests() if seen is None else seen
        self.digested_class: type | None = None
        self.label = ""
        self.root: Any = None
        self.digested = DigestedPickle()
        self.arranged: dict[int, list[Any]] = {}
        self._rules: dict[type, Callable[[Any, Any], Any]] = dict(_RULES)
        self._reached: dict[int, Any] = {}
        self._met: list[Any] = []  # tensors in the value that is being pickled, which are digested afterwards
        self.plain: list[Any] = []
        super().__init__(file or self.digested, protocol=5, buffer_callback=keep or self.digested.keep)

    def begin(self, name: str, value: Any) -> None:
        """Begin to pickle the value of a name."""
        self.label, self.root = label_of(name), value
        self.digested_class = value if issubclass(type(value), type) else None

    def digest_of(self, value: Any) -> bytes:
        """Return a digest of a value and everything in it."""
        self.arranged.clear()
        digest = self._digest_of(value)
        if self.digested.may_hold_sets and (found := self._sets()):
            self.arrange(found)
            self.persistent_id = lambda obj: self.arranged.get(id(obj))  # called for every object
            digest = self._digest_of(value)
        return digest

    def _sets(self) -> list[Any]:
        """Return the sets in the pickled value that have several items."""
        pickled = objects_in_memo(self)
        if _SETS.isdisjoint(map(type, pickled)):
            return []
        return [obj for obj in pickled if type(obj) in _SETS and len(obj) > 1]

    def arrange(self, sets: Iterable[Any]) -> None:
        """Arrange the items of sets by their content, without that of the sets in them.

        The order of a set's items depends on its history, {0, 8} and {8, 0} for example, or on their addresses.
        """
        ids = set(map(id, sets))
        digester = Digester(self.side)
        digester.persistent_id = lambda obj: "a set" if id(obj) in ids else None
        for each in sets:
            kinds = set(map(type, each))
            if len(kinds) == 1 and kinds <= _SORTED:
                items = sorted(each)
            else:
                keys = dict[int, bytes]()
                for item in each:
                    with contextlib.suppress(Exception):  # the user's classes may raise any error
                        keys[id(item)] = digester.digest_of(item)
                items = sorted(each, key=lambda item: keys.get(id(item), b""))
            self.arranged[id(each)] = [type(each).__name__, *items]

    def _digest_of(self, value: Any) -> bytes:
        self.digested.begin()
        self._reached.clear()
        self._met.clear()
        self.plain = []
        self.clear_memo()
        self.dump(value)
        while self._met:  # a tensor may hold others, such as its gradient
            met, self._met = self._met, []
            self._digest_tensors(met)
        return self.digested.digest()

    def _digest_tensors(self, tensors: list[Any]) -> None:
        """Digest tensors of which the pickle only has the places: plain ones together, others by their reductions."""
        alone = self.alone(list(map(id, tensors)))
        plain = plain_among([tensor for tensor in tensors if id(tensor) not in alone] if alone else tensors)
        digests, kinds = digests_of(plain)
        self.digested.add(kinds + b"".join(digests))
        self.plain += plain.tensors
        if max(plain.sizes, default=0) >= _LARGE_NBYTES:
            for tensor, *window, digest in zip(plain.tensors, plain.addresses, plain.sizes, digests, strict=True):
                if window[1] >= _LARGE_NBYTES:
                    self.seen.large[window[0], window[1]] = digest, tensor
        if len(plain.tensors) < len(tensors):
            together = set(map(id, plain.tensors))
            others = [(place, each) for place, each in enumerate(tensors) if id(each) not in together]
            self.dump([(place, _reduce_tensor(self, tensor)) for place, tensor in others])

    def alone(self, keys: list[int]) -> set[int]:
        """Return the `id()`s, among those of tensors, of tensors to which other rules than their content apply."""
        return self.side.references.referred(keys)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        rule = self._rules.get(kind)
        if rule is None:
            rule = self._rules[kind] = _rule_for(kind)
        return rule(self, obj)

    # -- reductions that the packer overrides --------------------------------------------------------------------------

    def reference(self, obj: Any) -> Any:
        """Return the reduction of an object that is not sent by value."""
        found = self.side.references.digest_token(obj)
        return None if found is None else (content, found)

    def array(self, array: Any) -> Any:
        """Reduce an array by its content."""
        if array.dtype.hasobject:
            return NotImplemented
        if array.base is not None and (mapped := file_of(array)) is not None:
            return content, (mapped[0], window_of(array))  # both sides have the file's content
        data = array if array.flags.c_contiguous else array.copy(order="C")
        kind = array.dtype.str if array.dtype.names is None else array.dtype.descr
        # The view as bytes is needed because arrays of some dtypes (dates) have no buffers.
        if data is array and data.nbytes >= _LARGE_NBYTES:
            self.digested.nbytes += data.nbytes
            shown: Any = self._digest_at(data.__array_interface__["data"][0], data.nbytes, data)
        elif data.nbytes < INLINE_NBYTES:
            shown = data.tobytes()
        else:
            shown = pickle.PickleBuffer(data.reshape(-1).view("u1"))
        return content, (kind, array.shape, shown)

    def _digest_at(self, address: int, nbytes: int, owner: Any) -> bytes:
        digest = digest_at(address, nbytes)
        if nbytes >= _LARGE_NBYTES:
            self.seen.large[address, nbytes] = digest, owner
        return digest

    def place(self, tensor: Any) -> Any:
        """Reduce a tensor of torch's own class to its place. `_digest_tensors` follows."""
        self._met.append(tensor)
        return content, ()

    def tensor(self, tensor: Any) -> Any:
        """Reduce a tensor by its content, its gradient and its attributes."""
        plain = plain_memory(tensor)
        if plain is None:
            return self._any_tensor(tensor)
        address, nbytes = plain
        if nbytes < INLINE_NBYTES:
            shown = BYTES_AT[nbytes](address).raw
        else:
            shown = self._digest_at(address, nbytes, tensor)
        return content, (PLAIN_DTYPES[tensor.dtype], (*tensor.shape,), shown)

    def _any_tensor(self, tensor: Any) -> Any:
        """Reduce a tensor of any kind."""
        data = tensor.detach().cpu() if on_accelerator(tensor) else tensor
        if not dense_tensor(data):
            return self.special_tensor(tensor)
        if not is_stored(data):
            if data.untyped_storage().nbytes():
                return self.unstored_tensor(tensor)
            return content, ("emptied", str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
        memory = bytes_of(data if data.is_contiguous() else data.detach().contiguous())
        more = tensor.requires_grad, tensor.grad if tensor.is_leaf else None, tensor.__dict__ or None
        kind = str(tensor.dtype), tuple(tensor.shape), type(tensor).__name__
        return content, (kind, xxhash.xxh3_128_digest(memory), more)

    def storage(self, storage: Any) -> Any:
        """Reduce a storage by its content, the memory behind tensors."""
        import torch

        from distnb.compat.torch_internals import untyped_storage

        plain = untyped_storage(storage)
        kind = str(storage.dtype) if plain is not storage else ""
        data = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(plain).cpu()
        return content, ("storage", kind, bytes(bytes_of(data)))

    # -- reductions for digests and packs ------------------------------------------------------------------------------

    def special_tensor(self, tensor: Any) -> Any:
        """Reduce a tensor without plain memory (conjugate, sparse, nested, quantized or meta) by torch's own rule."""
        import torch

        from distnb.compat.torch_internals import negative_view

        if tensor.is_conj():
            made: Any = torch.conj, (tensor.detach().conj(),)
        elif tensor.is_neg():
            made = negative_view, (negative_view(tensor.detach()),)
        elif tensor.is_mkldnn:
            made = torch.Tensor.to_mkldnn, (tensor.detach().to_dense(),)
        else:
            made = self.other(tensor)
        self.side.references.send_by_value(made[1])
        if made[0] is Placeholder or len(made) > 2:
            return made
        state = (tensor.requires_grad, tensor.grad if tensor.is_leaf else None, tensor.__dict__ or None)
        return made if state == (False, None, None) else (*made, state, None, None, constructors.fill_tensor)

    def unstored_tensor(self, tensor: Any) -> Any:
        """Reduce a tensor whose storage is too small for it."""
        held = tensor.untyped_storage().nbytes()
        why = f"its storage has {held} bytes, but its shape needs {tensor.nbytes}: torch could not resize it"
        return Placeholder, (refusal(self.label, self.root, tensor, "assign a new tensor instead", why),)

    def function(self, function: types.FunctionType) -> Any:
        """Reduce a function by value, and note its names."""
        if function.__globals__ is self.side.user_ns:
            self.seen.add_function(function)
        reference = self.reference(function)
        return reference if reference is not None else definitions.reduce_function(function, self.side.user_ns)

    def a_class(self, cls: type) -> Any:
        """Reduce a class by its name, or by its id if it is sent by value and has a digest of its own."""
        if cls is self.digested_class or not definitions.is_by_value(cls):
            return definitions.reduce_class(cls, self.side.classes)
        identity = self.side.classes.id_of(cls)
        self.seen.classes[f"%{identity}"] = cls
        return content, ("class", identity)

    def module(self, module: types.ModuleType) -> Any:
        """Reduce a module by its name."""
        if getattr(module, "__spec__", None) is None and module.__name__ != "__main__":
            return NotImplemented
        return constructors.open_module, (module.__name__,)

    def cache(self, cached: Any) -> Any:
        """Reduce a function with a cache. The copy's cache is empty."""
        if is_importable(cached):
            return NotImplemented
        state = {key: value for key, value in cached.__dict__.items() if key != "__wrapped__"}
        return definitions.make_cache, (cached.__wrapped__, cached.cache_parameters()), state

    def instance(self, obj: Any) -> Any:
        """Reduce any other object by its own rule for pickling, or to a placeholder."""
        reference = self.reference(obj)
        if reference is not None:
            return reference
        if obj is sys.stdout or obj is sys.stderr:
            return getattr, (sys, "stdout" if obj is sys.stdout else "stderr")
        if is_unsendable(obj):
            return self.refused(obj, None)
        if isinstance(obj, BaseException) and type(obj).__reduce__ is BaseException.__reduce__:
            cause = None if self.side.copying else obj.__cause__  # a copy is shown alone
            made = constructors.open_exception, (type(obj), obj.args)
            if cause is None and not obj.__dict__:
                return made
            return (*made, (obj.__dict__, cause), None, None, constructors.fill_exception)
        return self.other(obj)

    def window(self, view: memoryview) -> Any:
        """Reduce a view of a whole object by that object. Other views are refused."""
        whole = memoryview(view.obj)
        if (view.nbytes, view.format, view.shape, view.readonly) == (
            whole.nbytes,
            whole.format,
            whole.shape,
            whole.readonly,
        ):
            return memoryview, (view.obj,)
        return self.refused(view, None)

    def table(self, table: Any) -> Any:
        """Reduce a table or column of pandas."""
        return self.instance(table)

    def symbolic(self, obj: Any) -> Any:
        """Reduce a symbolic tensor of Keras, to a placeholder if it is the output of layers."""
        reduced = self.reference(obj) or reduce_input(obj)
        if reduced is obj:
            return self.other(obj)
        return reduced if reduced is not None else self.refused(obj, None)

    def world_bound(self, obj: Any) -> Any:
        """Reduce an object that stores the processes it was made in. A digest treats it like any other object."""
        return self.instance(obj)

    def by_state(self, obj: Any) -> Any:
        """Reduce an object to all its attributes instead of by its class's own rule. Copies use the class's rule."""
        reference = self.reference(obj)
        if reference is not None:
            return reference
        return self.other(obj) if self.side.copying else (copyreg.__newobj__, (type(obj),), vars(obj))  # type: ignore[attr-defined]

    def other(self, obj: Any) -> Any:
        """Reduce an object by its own rule for pickling."""
        kind = type(obj)
        if kind in self.dispatch_table:
            return NotImplemented
        if hides_parts(kind):
            for function in functions_within(obj, self.side.user_ns, self._reached):
                self.seen.add_function(function)
        try:
            return accelerate_internals.without_mark(obj.__reduce_ex__(5))
        except Exception as error:  # whatever a user's class raises  # noqa: BLE001
            return self.refused(obj, error)

    def refused(self, obj: Any, error: Exception | None) -> Any:
        """Return the reduction of a placeholder for an object that cannot be sent."""
        text = refusal(self.label, self.root, obj, cure_for(obj), error)
        if self.side.copying:
            raise CannotTravelError(text)
        return Placeholder, (text,)


_SETS = frozenset({set, frozenset})
_SORTED = frozenset({int, str, bytes})  # kinds of items that can be compared with each other
# The opcodes with which the pickle of a set with items begins, and that of a frozenset ends. One opcode alone would be
# found in most large pickles, as a part of a number. The pickler writes both of a pair at once.
_SET = pickle.EMPTY_SET + pickle.MEMOIZE + pickle.MARK
_FROZENSET = pickle.FROZENSET + pickle.MEMOIZE
_RARE = 100


class DigestedPickle:
    """A file that digests the pickle written to it and keeps nothing.

    Attributes:
        nbytes: The pickle's size so far, with its buffers.
        may_hold_sets: False if there are no sets in the pickle, except empty ones.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.may_hold_sets = False
        self._hasher = xxhash.xxh3_128()
        self._buffers: list[bytes] = []

    def begin(self) -> None:
        """Begin another pickle."""
        self.nbytes = 0
        self.may_hold_sets = False
        self._hasher.reset()
        self._buffers.clear()

    def add(self, data: bytes) -> None:
        """Digest content of tensors, which is not part of the pickle."""
        self._hasher.update(data)

    def write(self, data: Any) -> None:
        """Digest a part of the pickle."""
        self.nbytes += len(data)
        self.may_hold_sets = self.may_hold_sets or _holds(data, _SET) or _holds(data, _FROZENSET)
        self._hasher.update(data)

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Digest a buffer, and leave it out of the pickle."""
        raw = buffer.raw()
        self.nbytes += raw.nbytes
        self._buffers.append(xxhash.xxh3_128_digest(raw))
        return False

    def digest(self) -> bytes:
        """Return the digest of the pickle and its buffers."""
        for each in self._buffers:
            self._hasher.update(each)
        self._buffers.clear()
        return self._hasher.digest()


def _holds(data: bytes, opcodes: bytes) -> bool:
    """Return whether opcodes are in a part of a pickle.

    A byte that is rare is found ten times as fast as several bytes.
    """
    first = opcodes[:1]
    if data.count(first) > len(data) // _RARE:
        return opcodes in data
    place = data.find(first)
    while place >= 0 and not data.startswith(opcodes, place):
        place = data.find(first, place + 1)
    return place >= 0


def content(*parts: Any) -> None:
    """Represent the constructor of an object in a pickle that is digested. Never called."""


def on_accelerator(tensor: Any) -> bool:
    """Return whether a tensor's memory is on an accelerator."""
    return tensor.device.type not in ("cpu", "meta")


def _reduce_to_place(pickler: Digester, tensor: Any) -> Any:
    return pickler.place(tensor)


def _reduce_tensor(pickler: Digester, tensor: Any) -> Any:
    reference = pickler.reference(tensor)
    return reference if reference is not None else pickler.tensor(tensor)


def _reduce_other_tensor(pickler: Digester, tensor: Any) -> Any:
    """Reduce a tensor of a subclass. If it is on an accelerator, a copy on the host is sent, as of a plain tensor."""
    return _reduce_tensor(pickler, tensor) if on_accelerator(tensor) else pickler.instance(tensor)


def _reduce_dispatching_tensor(pickler: Digester, tensor: Any) -> Any:
    """Reduce a tensor whose class defines `__torch_dispatch__`.

    The copy on the host of a tensor of an accelerator's Python class is a plain tensor. Fake and distributed tensors
    have no memory of their own, and keep their class.
    """
    plain = on_accelerator(tensor) and type(tensor.detach().new_empty(0, device="cpu")) is sys.modules["torch"].Tensor
    if plain:
        return _reduce_tensor(pickler, tensor)
    reference = pickler.reference(tensor)
    if reference is not None:
        return reference
    # torch warns that a pickle lacks the tensor's hooks. They are attributes, which do not travel.
    return pickler.instance(tensor.detach() if tensor._backward_hooks else tensor)


def _reduce_storage(pickler: Digester, storage: Any) -> Any:
    reference = pickler.reference(storage)
    return reference if reference is not None else pickler.storage(storage)


def _pickled_without_state() -> list[type]:
    """Return the classes of loaded libraries whose pickles contain the constructor's arguments but not the state."""
    keras = sys.modules.get("keras")
    metric = getattr(getattr(keras, "metrics", None), "Metric", None)
    return [metric] if metric is not None else []


def _rule_for(kind: type) -> Callable[[Any, Any], Any]:
    """Return the method of the pickler that reduces objects of a type."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "UntypedStorage"):
        if kind is torch.Tensor:
            return _reduce_to_place
        if kind is torch.nn.Parameter:
            return _reduce_tensor
        if kind in (torch.UntypedStorage, torch.storage.TypedStorage):
            return _reduce_storage
        if issubclass(kind, torch.Tensor) and kind.__reduce_ex__ is torch.Tensor.__reduce_ex__:
            dispatch: Any = getattr(kind, "__torch_dispatch__", None)
            plain = dispatch is torch.Tensor.__torch_dispatch__
            return _reduce_other_tensor if plain else _reduce_dispatching_tensor
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind in (numpy.ndarray, numpy.memmap):
        return lambda pickler, obj: pickler.array(obj)
    if torch is not None and kind is getattr(torch, "Generator", None):
        return lambda pickler, obj: constructors.reduce_generator(obj)
    if issubclass(kind, type):
        return lambda pickler, obj: pickler.a_class(obj)
    if issubclass(kind, types.ModuleType):
        return lambda pickler, obj: pickler.module(obj)
    if any(issubclass(kind, each) for each in _pickled_without_state()):
        return lambda pickler, obj: pickler.by_state(obj)
    if keras_archives.is_symbolic(kind):
        return lambda pickler, obj: pickler.symbolic(obj)
    if keras_archives.is_archived(kind):
        return lambda pickler, obj: keras_archives.without_time(pickler.instance(obj))
    if is_world_bound(kind):
        return lambda pickler, obj: pickler.world_bound(obj)
    if is_training_arguments(kind):
        return lambda pickler, obj: pickler.reference(obj) or transformers_internals.reduce_arguments(obj)
    widget = getattr(sys.modules.get("ipywidgets"), "Widget", None)
    if widget is not None and issubclass(kind, widget):
        # Refused as a whole, because a copy without a comm would fail when it is closed.
        return lambda pickler, obj: pickler.refused(obj, None)
    if matplotlib_internals.is_transform(kind):
        return lambda pickler, obj: pickler.reference(obj) or matplotlib_internals.reduce_transform(obj)
    if matplotlib_internals.is_registry(kind):
        return lambda pickler, obj: pickler.reference(obj) or matplotlib_internals.reduce_registry(obj)
    if pandas_internals.is_table(kind):
        return lambda pickler, obj: pickler.table(obj)
    shells = sys.modules.get("IPython.core.interactiveshell")
    if shells is not None and issubclass(kind, shells.InteractiveShell):
        from IPython import get_ipython

        return lambda pickler, obj: (get_ipython, ())  # every process has one
    return lambda pickler, obj: pickler.instance(obj)


def _ended() -> weakref.ref[Any]:
    """Return a weak reference to an object that no longer exists."""
    return weakref.ref(type("Ended", (), {})())


_RULES: dict[type, Callable[[Any, Any], Any]] = {
    types.FunctionType: lambda pickler, obj: pickler.function(obj),
    types.CellType: lambda pickler, obj: definitions.reduce_cell(obj),
    types.CodeType: lambda pickler, obj: definitions.reduce_code(obj),
    functools._lru_cache_wrapper: lambda pickler, obj: pickler.cache(obj),
    functools.cached_property: lambda pickler, obj: (
        functools.cached_property,
        (obj.func,),
        {"attrname": obj.attrname, "__doc__": obj.__doc__},
    ),
    **dict.fromkeys(
        definitions.NAMED_TYPES, lambda pickler, obj: definitions.reduce_named_type(obj, pickler.side.classes)
    ),
    **dict.fromkeys(definitions.TYPE_ALIASES, lambda pickler, obj: definitions.reduce_type_alias(obj)),
    weakref.ref: lambda pickler, obj: (weakref.ref, (found,)) if (found := obj()) is not None else (_ended, ()),
    memoryview: lambda pickler, obj: pickler.window(obj),
    MemoryBlock: lambda pickler, obj: pickler.memory(obj),
    TensorBatch: lambda pickler, obj: pickler.batch(obj),
    ByOpener: lambda pickler, obj: obj.name,
    Placeholder: lambda pickler, obj: obj.__reduce__(),
}
