"""The functions that the pickles in a pack call to rebuild objects where the pack is opened."""

from __future__ import annotations

import contextlib
import importlib
import typing
from typing import Any

from distnb.objects.memory.blocks import MemoryBlock
from distnb.objects.placeholder import CURE_FOR_MODULES, Placeholder
from distnb.objects.rng_state import generator_state, set_generator_state

__all__ = ["ByOpener"]

_HEAP_TYPE = 1 << 9


class ByOpener:
    """A reference in a pack to a method of the opener. The opener replaces it by the method of that name."""

    def __init__(self, name: str, method: Any = None) -> None:
        self.name = name
        self.method = method

    def __call__(self, *args: Any) -> Any:
        """Call the opener's method."""
        return self.method(*args)


open_reference = ByOpener("open_reference")
open_batch = ByOpener("open_batch")
open_memory = ByOpener("open_memory")
memory_of = ByOpener("memory_of")
update_memory = ByOpener("update_memory")
open_from_host = ByOpener("open_from_host")
open_storage_from_host = ByOpener("open_storage_from_host")
make_function = ByOpener("make_function")
make_class = ByOpener("make_class")
fill_class = ByOpener("fill_class")
make_named_type = ByOpener("make_named_type")


def make_type_alias(name: str, value: Any, type_params: tuple[Any, ...]) -> Any:
    """Return what the statement `type` makes."""
    return typing.TypeAliasType(name, value, type_params=type_params)  # type: ignore[attr-defined]


def open_array(memory: MemoryBlock, dtype: Any, shape: Any, strides: Any, offset: int, writeable: bool) -> Any:
    """Return an array on a block of memory."""
    import numpy

    if not memory.nbytes:
        array = numpy.ndarray(shape, dtype)
    else:
        array = numpy.ndarray(shape, dtype, memory.array(), offset, strides)
    array.flags.writeable = writeable
    return array


def open_tensor(memory: MemoryBlock, dtype: Any, shape: Any, stride: Any, offset: int, kind: type) -> Any:
    """Return a tensor on a block of memory. Its gradient and attributes follow as state."""
    import torch

    whole = memory.tensor()
    storage, begin = whole.untyped_storage(), whole.storage_offset() // dtype.itemsize + offset
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, begin, shape, stride)
    if not memory.nbytes:
        storage.resize_(0)  # the storage is empty, whatever the tensor's shape
    return tensor if kind is torch.Tensor else kind(tensor, requires_grad=False)


def open_storage(memory: MemoryBlock, dtype: Any) -> Any:
    """Return the storage of tensors on a block of memory; with a dtype, a typed one like `tensor.storage()`."""
    from distnb.compat.torch_internals import typed_storage

    storage = memory.tensor().untyped_storage()
    return storage if dtype is None else typed_storage(storage, dtype)


def fill_tensor(tensor: Any, state: tuple[bool, Any, dict[str, Any]]) -> None:
    """Give a tensor its gradient and its attributes."""
    requires_grad, gradient, attributes = state
    if requires_grad:
        tensor.requires_grad_()
    tensor.grad = gradient
    if attributes:
        vars(tensor).update(attributes)


def reduce_generator(generator: Any) -> Any:
    """Reduce a torch generator with its state as bytes. A tensor would be mistaken for one of the user's."""
    import torch

    return torch.Generator, (generator.device,), generator_state(generator), None, None, set_generator_state


def open_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an exception initialised by Python's own `__init__`, since that of its class may take other arguments."""
    error = kind.__new__(kind, *args)
    base: Any = next(each for each in kind.__mro__ if not each.__flags__ & _HEAP_TYPE)
    with contextlib.suppress(TypeError):
        base.__init__(error, *args)
    error.args = args
    return error


def fill_exception(error: BaseException, state: tuple[dict[str, Any], BaseException | None]) -> None:
    """Give an exception its attributes and its cause. A cause that could not be sent is left out."""
    attributes, cause = state
    error.__dict__.update(attributes)
    if isinstance(cause, BaseException):
        error.__cause__ = cause


def open_module(name: str) -> Any:
    """Return a module by its name, or a placeholder if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return Placeholder(
            f"The module {name} cannot be imported on this replica ({error}). The cure: {CURE_FOR_MODULES}."
        )
