"""Parameters without memory: a module's construction is recorded, and each parameter gets its values alone, later.

    with deferring(device):
        layer = torch.nn.Linear(64, 10_000)   # weight: empty, uniform_(-0.125, 0.125)   recorded, no memory
    weight = materialise(layer.weight)        # an ordinary tensor with the values of an ordinary construction

Each large tensor that a module makes in its construction is a `DeferredTensor`. Operations on it are recorded with
their arguments. A random operation is also performed once, on memory that is freed at once: so the generator advances
as in an ordinary construction, and everything made later gets the same numbers. The generator's state before it is
recorded, so tensors can be materialised in any order, with the same bits.

A *storage* is what tensors and their views share. Each has a list of the operations that have made, viewed or changed
it. To materialise a tensor, these are performed in order, after those of the storages that they read:

    weight.normal_()                          storage 1: empty, normal_
    weight[0].fill_(0)                                   select, fill_
    copy = weight.clone(); copy.mul_(2)       storage 2: clone (reads storage 1), mul_
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from distnb.compat import torch_internals
from distnb.compat.torch_internals import DispatchMode

__all__ = ["allocate_rest", "allocating", "deferring", "is_deferred", "materialise"]

MIN_NBYTES = 16_384
_aten = torch.ops.aten

_FACTORIES: dict[Any, Callable[[Any], Any]] = {
    _aten.empty.memory_format: lambda made: made,
    _aten.zeros.default: lambda made: made.zero_(),
    _aten.ones.default: lambda made: made.fill_(1),
    _aten.rand.default: lambda made: made.uniform_(),
    _aten.randn.default: lambda made: made.normal_(),
}
"""The functions that make deferred tensors of the size in their first argument, and what fills the empty tensor."""

_RANDOM = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.geometric_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
}
"""Functions that fill a tensor with random numbers, regardless of its content."""

_OVERWRITES = _RANDOM | {_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default}
"""Functions that replace the whole content of a tensor."""


@dataclass(frozen=True)
class _Ref:
    """A deferred tensor among the arguments of a recorded operation."""

    key: int
    storage: _Storage


@dataclass
class _Operation:
    """A recorded operation.

    Attributes:
        number: Its place in the order of all operations.
        function: The function of torch.
        arguments: The positional and the keyword arguments, with a `_Ref` for each deferred tensor.
        made: The keys of the results, flat; None for a result that is an argument.
        overwrites: Whether it replaces the whole content of its storage.
        state: The state of the random generator before it, or None.
    """

    number: int
    function: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    made: list[int | None]
    overwrites: bool = False
    changes: bool = False
    state: torch.Tensor | None = None

    def inputs(self) -> Iterator[_Ref]:
        """Yield the deferred tensors among the arguments."""
        yield from (each for each in torch_internals.leaves(self.arguments) if isinstance(each, _Ref))


@dataclass(eq=False)
class _Storage:
    """The memory that a deferred tensor and its views will share.

    Attributes:
        operations: The operations that have made, viewed or changed it, in order.
        values: The real tensors by key, if it had to be allocated; then it is no longer deferred.
    """

    operations: list[_Operation] = field(default_factory=list)
    values: dict[int, torch.Tensor] | None = None

    def needed(self, before: float) -> list[_Operation]:
        """Return the operations before a number, without changes that a later one overwrites."""
        found = [each for each in self.operations if each.number < before]
        last = max((place for place, each in enumerate(found) if each.overwrites), default=0)
        return [each for place, each in enumerate(found) if place >= last or not each.changes]


_numbers = itertools.count()
_keys = itertools.count()
_modes: list[_Deferring] = []


class DeferredTensor(torch.Tensor):
    """A tensor with a shape, a dtype and a device, and with a recording in place of memory.

    Attributes:
        meta: A tensor without memory of the same shape and strides.
        key: Its number in the recording.
        recording: Its storage.
    """

    meta: torch.Tensor
    key: int
    recording: _Storage

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device, recording: _Storage) -> DeferredTensor:
        made: DeferredTensor = torch_internals.make_wrapper(cls, meta, device)
        made.meta, made.key, made.recording = meta, next(_keys), recording
        return made

    __torch_function__ = torch_internals.no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _perform(function, args, kwargs or {})

    @property
    def data(self) -> Any:
        """The tensor without a graph. `module.to(dtype)` assigns it."""
        return torch_internals.plain_data.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, DeferredTensor):
            raise RuntimeError(
                "A parameter without memory cannot take over an ordinary tensor's memory while its module is made in "
                "the scope of a ShardedStrategy. Copy the values: `with torch.no_grad(): parameter.copy_(tensor)`."
            )
        torch_internals.plain_data.__set__(self, value)
        self.meta, self.key, self.recording = value.meta, value.key, value.recording

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        real = materialise(self)
        made = torch.nn.Parameter(real, self.requires_grad) if isinstance(self, torch.nn.Parameter) else real
        return made.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(materialise(self))

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return materialise(self).numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists of numbers."""
        return materialise(self).tolist()


def is_deferred(tensor: object) -> bool:
    """Return whether a tensor has a recording in place of memory."""
    return isinstance(tensor, DeferredTensor) and tensor.recording.values is None


def allocate_rest(module: torch.nn.Module) -> None:
    """Replace deferred tensors of a module that are not deferred parameters by ordinary ones: buffers, attributes."""
    for part in module.modules():
        held = [*part.named_buffers(recurse=False), *vars(part).items(), *part.named_parameters(recurse=False)]
        for name, value in held:
            if not isinstance(value, DeferredTensor) or (is_deferred(value) and isinstance(value, torch.nn.Parameter)):
                continue
            real = materialise(value)
            if isinstance(value, torch.nn.Parameter):
                real = torch.nn.Parameter(real, requires_grad=value.requires_grad)
            setattr(part, name, real)


@contextmanager
def deferring(device: torch.device, min_nbytes: int = MIN_NBYTES) -> Iterator[None]:
    """Return a context in which large floating-point tensors that modules make on a device are deferred.

    Args:
        device: The device on which the modules' tensors are made.
        min_nbytes: The bytes of the smallest deferred tensor.
    """
    mode = _Deferring(device, min_nbytes)
    _modes.append(mode)
    try:
        with mode:
            yield
    finally:
        _modes.remove(mode)


@contextmanager
def allocating() -> Iterator[None]:
    """Return a context in which new tensors have memory, also within `deferring`."""
    suspended = [mode for mode in _modes if mode.active]
    for mode in suspended:
        mode.active = False
    try:
        yield
    finally:
        for mode in suspended:
            mode.active = True


class _Deferring(DispatchMode):
    """torch's mode that replaces the making of tensors."""

    def __init__(self, device: torch.device, min_nbytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._min_nbytes = min_nbytes
        self.active = True
        self._scratch = torch.empty(0, device=device, dtype=torch.uint8)

    def scratch_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape and strides in memory that the next call uses again.

        Without that, the recordings that are made between two large allocations would keep the allocator from using
        the memory of the first one for the second, and a construction would take as much memory as its parameters.
        """
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (last + 1) * tensor.element_size()
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, device=self._device, dtype=torch.uint8)
        return self._scratch[:nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fill = _FACTORIES.get(function)
        if fill is not None and self.active and self._is_deferred(args[0], kwargs) and _in_module():
            meta = function(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None})
            return fill(_new(meta, self._device))
        return function(*args, **kwargs)

    def _is_deferred(self, size: Any, kwargs: dict[str, Any]) -> bool:
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if not dtype.is_floating_point or torch.Size(size).numel() * dtype.itemsize < self._min_nbytes:
            return False
        device = torch.device(kwargs.get("device") or "cpu")
        same = device.type == self._device.type and device.index in (None, self._device.index)
        return same and kwargs.get("layout") in (None, torch.strided) and not kwargs.get("pin_memory")


def _in_module() -> bool:
    """Return whether a method of a module has called this function, at any distance: the tensor is the module's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return True
        frame = frame.f_back
    return False


def _new(meta: torch.Tensor, device: torch.device) -> DeferredTensor:
    """Return a deferred tensor with a new storage and unspecified content."""
    recording = _Storage()
    made = DeferredTensor(meta, device, recording)
    arguments = ((tuple(meta.shape), meta.stride()), {"dtype": meta.dtype, "device": device})
    recording.operations.append(
        _Operation(number=next(_numbers), function=torch.empty_strided, arguments=arguments, made=[made.key])
    )
    return made


# -- recording ---------------------------------------------------------------------------------------------------------


def _perform(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an operation on deferred tensors, or perform it on real ones if it cannot be recorded."""
    given = [each for each in torch_internals.leaves((args, kwargs)) if isinstance(each, DeferredTensor)]
    if _is_recordable(function, given, args, kwargs):
        state = None
        if function in _RANDOM:
            state = _advance(function, args, kwargs)
            kwargs = {**kwargs, "generator": None}
        with allocating():
            made = _record(function, args, kwargs, given, state)
        if made is not None:
            return made[0]
    for each in given:
        _allocate(each.recording)
    reals = {id(_value(each)): each for each in given}
    results = function(*torch_internals.map_leaves(_real, args), **torch_internals.map_leaves(_real, kwargs))
    return torch_internals.map_leaves(lambda leaf: reals.get(id(leaf), leaf), results)


def _is_recordable(function: Any, given: list[DeferredTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not any(mode.active for mode in _modes) or any(each.recording.values is not None for each in given):
        return False
    if torch.Tag.nondeterministic_seeded in function.tags and function not in _RANDOM:
        return False
    if torch.Tag.inplace_view in function.tags or torch.Tag.data_dependent_output in function.tags:
        return False
    if any(not isinstance(each, DeferredTensor) for each in torch_internals.written(function, args, kwargs)):
        return False  # an ordinary tensor is changed at once
    device = kwargs.get("device")
    return device is None or torch.device(device).type == given[0].device.type


def _advance(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Perform a random operation on memory that nobody reads, and return the state of the generator before it."""
    target = args[0]
    generator = kwargs.get("generator") or torch_internals.default_generator(target.device)
    state: torch.Tensor = generator.get_state()
    with allocating():
        function(_modes[-1].scratch_like(target), *args[1:], **kwargs)
    return state


def _record(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: list[DeferredTensor],
    state: torch.Tensor | None,
) -> tuple[Any] | None:
    """Record an operation, and return its result in a tuple; None if its shape depends on values."""
    without_memory = {"device": torch.device("meta")} if kwargs.get("device") is not None else {}
    try:
        results = function(
            *torch_internals.map_leaves(_meta, args), **{**torch_internals.map_leaves(_meta, kwargs), **without_memory}
        )
    except Exception:  # noqa: BLE001  (performed on real tensors, it succeeds or raises the right error)
        return None
    if any(not isinstance(each, torch.Tensor) for each in torch_internals.leaves(results) if each is not None):
        return None
    by_meta = {id(each.meta): each for each in given}
    by_memory = {_identity(each.meta): each.recording for each in given}
    device = given[0].device
    made: list[int | None] = []
    touched: dict[int, _Storage] = {}

    def wrapped(meta: Any) -> Any:
        if meta is None:
            return None
        known = by_meta.get(id(meta))
        if known is not None:
            made.append(None)
            return known
        recording = by_memory.setdefault(_identity(meta), _Storage())
        tensor = DeferredTensor(meta, device, recording)
        made.append(tensor.key)
        touched[id(recording)] = recording
        return tensor

    wrapped_results = torch_internals.map_leaves(wrapped, results)
    changed = torch_internals.written(function, args, kwargs)
    touched |= {id(each.recording): each.recording for each in changed}
    arguments = (torch_internals.map_leaves(_kept, args), torch_internals.map_leaves(_kept, kwargs))
    operation = _Operation(
        number=next(_numbers),
        function=function,
        arguments=arguments,
        made=made,
        overwrites=function in _OVERWRITES and _covers_storage(given),
        changes=bool(changed),
        state=state,
    )
    for storage in touched.values():
        storage.operations.append(operation)
    return (wrapped_results,)


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, DeferredTensor):
        return leaf.meta
    if isinstance(leaf, torch.Tensor) and leaf.dim():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _kept(leaf: Any) -> Any:
    """Return an argument as it is recorded. An ordinary tensor is copied, since the program may change it."""
    if isinstance(leaf, DeferredTensor):
        return _Ref(leaf.key, leaf.recording)
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _identity(meta: torch.Tensor) -> int:
    return torch_internals.identity_of_storage(meta.untyped_storage())


def _covers_storage(given: list[DeferredTensor]) -> bool:
    """Return whether the first of an operation's deferred tensors is a whole storage, which no other one reads."""
    target, *others = given
    whole = target.meta.numel() * target.meta.element_size() == target.meta.untyped_storage().nbytes()
    return whole and all(each.recording is not target.recording for each in others)


# -- materialising -----------------------------------------------------------------------------------------------------


def materialise(tensor: torch.Tensor) -> torch.Tensor:
    """Return a deferred tensor's values as a new ordinary tensor. The recording stays, so that memory can be freed."""
    if not isinstance(tensor, DeferredTensor):
        return tensor.detach()
    if tensor.recording.values is not None:
        return tensor.recording.values[tensor.key]
    with torch.no_grad(), allocating():
        return _replay(tensor.recording)[tensor.key]


def _replay(storage: _Storage) -> dict[int, torch.Tensor]:
    """Perform the operations on a storage, and on those that it reads. Return the tensors by their keys."""
    wanted: dict[int, _Operation] = {}
    waiting: list[tuple[_Storage, float]] = [(storage, float("inf"))]
    seen: dict[int, float] = {}
    values: dict[int, torch.Tensor] = {}
    while waiting:
        each, before = waiting.pop()
        if each.values is not None:
            values.update(each.values)
            continue
        if seen.get(id(each), -1.0) >= before:
            continue
        seen[id(each)] = before
        for operation in each.needed(before):
            wanted[operation.number] = operation
            waiting += [(ref.storage, operation.number) for ref in operation.inputs() if ref.storage is not each]
    for number in sorted(wanted):
        operation = wanted[number]
        args, kwargs = torch_internals.map_leaves(
            lambda leaf: values[leaf.key] if isinstance(leaf, _Ref) else leaf, operation.arguments
        )
        if operation.state is not None:
            generator = torch.Generator(args[0].device)
            generator.set_state(operation.state)
            kwargs = {**kwargs, "generator": generator}
        results = torch_internals.leaves(operation.function(*args, **kwargs))
        found = [each for each in results if isinstance(each, torch.Tensor)]
        values.update((key, each) for key, each in zip(operation.made, found, strict=True) if key is not None)
    return values


def _allocate(storage: _Storage) -> None:
    """Give a storage memory for good: an operation needs its values, or no longer belongs to a construction."""
    if storage.values is None:
        with torch.no_grad(), allocating():
            storage.values = _replay(storage)
        storage.operations.clear()


def _value(tensor: DeferredTensor) -> torch.Tensor:
    assert tensor.recording.values is not None
    return tensor.recording.values[tensor.key]


def _real(leaf: Any) -> Any:
    return _value(leaf) if isinstance(leaf, DeferredTensor) else leaf
