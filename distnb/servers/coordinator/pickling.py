"""Pickles of closures: objects by value, tensors by their bytes, and resources by their numbers."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distnb.compat import torch_internals
from distnb.errors import CannotTravelError, DistnbError, ProgramError
from distnb.objects.code.definitions import UNPICKLING, CodePickler, names_of_code, source_of
from distnb.objects.memory.tensor_bytes import reduce_tensor
from distnb.objects.packing import out_of_band
from distnb.objects.placeholder import Placeholder
from distnb.objects.plain import is_plain
from distnb.options import StrategySpec
from distnb.servers.coordinator.libraries import libraries, library_of, parts_of

if TYPE_CHECKING:
    from distnb.servers.coordinator.packer import ClosurePacker
    from distnb.servers.coordinator.remote_values import RemoteValue

__all__ = ["ClosurePickler", "PickledParts", "Reached", "dump", "open_packed", "open_value", "outside_scope"]


class PickledParts(NamedTuple):
    """A pickle with its out-of-band buffers."""

    data: bytes
    buffers: tuple[Any, ...] = ()


class Reached:
    """The resources and results that an object refers to.

    Attributes:
        needs: The resources, by number.
        settings: Their settings that may change, by number.
        inputs: Results of other closures.
    """

    def __init__(self) -> None:
        self.needs: dict[int, Any] = {}
        self.settings: dict[int, Any] = {}
        self.inputs: dict[int, RemoteValue] = {}


class ClosurePickler(CodePickler):
    """Pickler of objects by value, and of resources by number.

    Attributes:
        reached: The resources and results in the object.
        references: The objects that were replaced by references, with these.
        functions: The functions that were pickled by value.
        is_constant: Whether everything else in the pickle is immutable, apart from containers in these functions.
    """

    def __init__(self, file: io.BytesIO, buffers: list[Any], packer: ClosurePacker | None, root: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=out_of_band(buffers))
        self.reached = Reached()
        self.references: list[tuple[Any, tuple[Any, ...]]] = []
        self.functions: list[types.FunctionType] = []
        self.is_constant = True
        self._in_references: set[int] = set()
        self._packer = packer
        self._own = frozenset() if root is None else {id(each) for each in _described_with(root)}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _IN_FUNCTIONS:
            return NotImplemented
        if self._packer is not None and id(obj) not in self._own:
            found = self._packer.reference(obj, self.reached)
            if found is not None:
                self.references.append((obj, found))
                self._in_references.update(map(id, found[1]))
                return found
        reduced = self._by_value(obj)
        if kind is types.FunctionType and reduced is not NotImplemented:
            self.functions.append(obj)
        elif kind is types.ModuleType:
            self.is_constant &= sys.modules.get(obj.__name__) is obj  # otherwise it is sent by value
        elif id(obj) not in self._in_references and kind is not StrategySpec and not is_plain(obj):
            self.is_constant = False
        return reduced

    def _by_value(self, obj: Any) -> Any:
        if self._packer is not None and type(obj) is types.FunctionType:
            self._packer.sources.update([found] if (found := source_of(obj.__code__)) else ())
            if obj.__module__ == "__main__":
                self._packer.imports |= names_of_code(obj.__code__).imports
        if (reduced := torch_internals.reduce_parametrized(obj)) is not None:
            return reduced
        if isinstance(obj, torch.amp.GradScaler) and obj.is_enabled():
            return Placeholder, (_NO_SCALER,)
        if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
            return _new_schedule, (type(obj),), dict(vars(obj)), None, None, _set_schedule
        if type(obj) is types.MethodType and library_of(obj.__self__) is not None:
            return getattr, (obj.__self__, obj.__name__)  # of the worker's metric, which may have replaced the method
        if type(obj) is torch.nn.Parameter:
            if self._packer is not None and obj.requires_grad:
                raise CannotTravelError(outside_scope("a trainable parameter", "train"))
            return torch.nn.Parameter, (obj.detach(), obj.requires_grad)
        if type(obj) is torch.Tensor:
            return reduce_tensor(obj, trainable=True)
        for library in libraries():
            reduced = library.reduced(obj)
            if reduced is not None:
                return reduced
        reduced = super().reducer_override(obj)
        is_by_value = type(reduced) is tuple and len(reduced) == 6
        if self._packer is not None and is_by_value and getattr(obj, "__module__", None) == "__main__":
            if isinstance(obj, type):
                return (*reduced[:5], _ClassOfMain(reduced[5]))
            if type(obj) is types.FunctionType and not UNPICKLING.isdisjoint(names_of_code(obj.__code__).attributes):
                self.is_constant = False  # later it may be sent with other classes
                state, slots = reduced[2]
                slots = {**slots, "__globals__": {**_classes(obj.__globals__), **slots["__globals__"]}}
                return (*reduced[:2], (state, slots), *reduced[3:])
        return reduced


_IN_FUNCTIONS = frozenset({types.CodeType, types.CellType})
"""The types of objects within functions that only the pickler of functions handles."""


class _ClassOfMain(NamedTuple):
    """A function that gives a class its attributes, and binds it in `__main__`, where pickles of instances find it."""

    fill: Any

    def __call__(self, cls: type, state: Any) -> Any:
        if "." not in cls.__qualname__:
            setattr(sys.modules["__main__"], cls.__name__, cls)
        return self.fill(cls, state)


def _classes(namespace: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes that a namespace defines: a function that unpickles may meet instances of any."""
    return {name: each for name, each in namespace.items() if isinstance(each, type) and each.__module__ == "__main__"}


def outside_scope(what: str, would: str) -> str:
    """Return the text of the error for an object that was made outside the scope, in a scheduled function."""
    return (
        f"A scheduled function uses {what} that was made outside strategy.scope(): each worker would {would} its own "
        "copy. Make it within `with strategy.scope():`."
    )


_NO_SCALER = (
    "A GradScaler was used in a scheduled function. The factor that it adapts would change in a worker's copy only. "
    "Use torch.autocast with bfloat16, which needs none."
)


def _new_schedule(cls: Any) -> Any:
    return cls.__new__(cls)


def _set_schedule(schedule: Any, state: dict[str, Any]) -> None:
    vars(schedule).update(state, step=_refuse_step)


def _refuse_step(*args: Any, **kwargs: Any) -> None:
    raise ProgramError(
        "A learning rate schedule took a step in a scheduled function, in a worker's copy that the next function would "
        "not see. Call its `step` on the coordinator, which sends the learning rate with each function."
    )


def _described_with(root: Any) -> Iterator[Any]:
    """Yield a resource that is being described, and the parts of a model. Metrics in it are separate resources."""
    apart: set[int] = set()
    is_metric = library_of(root) is not None
    for part in parts_of(root):
        if id(part) in apart:
            continue
        if not is_metric and library_of(part) is not None:
            apart.update(map(id, parts_of(part)))
        else:
            yield part


def dump(
    value: Any, what: str, packer: ClosurePacker | None = None, root: Any = None
) -> tuple[PickledParts, ClosurePickler]:
    """Pickle a value. Return the pickle, and the pickler, which knows the resources and inputs in it.

    Args:
        what: The name of the value in errors.
        packer: The packer that knows the resources; None: there are none.
        root: The resource that is being described.

    Raises:
        CannotTravelError: Something in it cannot be pickled.
    """
    file, buffers = io.BytesIO(), list[Any]()
    pickler = ClosurePickler(file, buffers, packer, root)
    try:
        pickler.dump(value)
    except DistnbError as error:
        raise error.with_traceback(None) from None  # the pickler's own frames do not help
    except Exception as error:
        raise CannotTravelError(
            f"{what} cannot be sent: {type(error).__name__}: {error}. Let workers make such objects themselves: "
            "coordinator.create_per_worker_value(fn)."
        ) from error
    # Copied, because a buffer is the caller's memory, which may change while the closure waits.
    return PickledParts(file.getvalue(), tuple(bytearray(each) for each in buffers)), pickler


def open_packed(packed: PickledParts) -> Any:
    """Return the value that `dump` pickled."""
    return pickle.loads(packed.data, buffers=packed.buffers)


def open_value(value: Any) -> Any:
    """Return the value that `ClosureResult.value` represents."""
    return open_packed(value) if type(value) is PickledParts else value
