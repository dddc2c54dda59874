"""Closures on their way: a function and its arguments packed on the coordinator, opened and called on a worker.

What belongs to the coordinator and has an object of its own on each worker is a *resource*: a model, an optimizer, a
metric, a per-worker value, the result of another closure; also each function, which thousands of closures share. A
closure refers to resources by number. A worker is sent what it lacks of them, once.
"""

from __future__ import annotations

import io
import itertools
import pickle
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import torch
import xxhash

from distnb.errors import CannotTravelError
from distnb.objects.packing import out_of_band
from distnb.runtime.servers import remote_optimizer
from distnb.runtime.servers.access import ClosureRun, ServerAccess
from distnb.runtime.servers.placement import Stored
from distnb.runtime.servers.server_variable import ServerVariable, stand_in

__all__ = [
    "ClosureResult",
    "Later",
    "Library",
    "Packed",
    "PackedClosure",
    "Packer",
    "Resource",
    "Runner",
    "WorkerContext",
    "libraries",
    "open_packed",
    "open_resource",
    "running",
]

_numbers = itertools.count(1)
_FUNCTIONS = 256  # that are remembered, to be known when they are scheduled again


class Packed(NamedTuple):
    """A pickle, and the buffers beside it."""

    data: bytes
    buffers: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.data) + sum(memoryview(each).nbytes for each in self.buffers)


class PackedClosure(NamedTuple):
    """A closure as it is queued.

    Attributes:
        name: The function's, for people.
        packed: The function, or its number, and the arguments.
        needs: The resources that a worker must know, in an order in which they can be opened.
        waits_for: Those among them that are results of closures which have not ended.
        holds: What these resources are of: they are there as long as the closure is.
    """

    name: str
    packed: Packed
    needs: tuple[int, ...]
    waits_for: tuple[Later, ...] = ()
    holds: tuple[Any, ...] = ()


class ClosureResult(NamedTuple):
    """What a closure did on its worker.

    Attributes:
        packed: What it returned.
        contributions: What it added to the coordinator's metrics, by resource.
        staleness: Of each optimizer step: how many updates of others its copies had missed.
    """

    packed: Packed
    contributions: Mapping[int, Any] = {}
    staleness: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkerContext:
    """Where a resource is made: worker `index` of `count`."""

    index: int
    count: int


class Resource(ABC):
    """Something of the coordinator's of which each worker has its own."""

    @abstractmethod
    def maker(self) -> Callable[[WorkerContext], Any]:
        """What makes a worker's own; it is pickled, and called on each worker once."""


class Later:
    """A resource that is not there yet: what a closure will return."""


class Library(ABC):
    """Another library's objects in closures: how they are pickled, and what is a metric."""

    def parts(self, root: Any) -> Iterable[Any]:
        """The objects in a model that belong to its description, and are no modules of its own to torch."""
        return ()

    def reduced(self, obj: Any) -> Any:
        """How an object is pickled, as `__reduce__` gives it; None: as ever."""
        return None

    def reference(self, obj: Any, packer: Packer, needs: dict[int, Any]) -> Any:
        """How an object is pickled that is a resource; None: it is none."""
        return None

    @abstractmethod
    def is_metric(self, obj: Any) -> bool:
        """Whether workers count something by it that is added up here."""

    @abstractmethod
    def reset(self, metric: Any) -> None:
        """A closure begins, on a worker."""

    @abstractmethod
    def contribution(self, metric: Any) -> Any:
        """What the closure has added; None: nothing."""

    @abstractmethod
    def merge(self, metric: Any, contribution: Any) -> None:
        """Add it on the coordinator."""


class _Torchmetrics(Library):
    def is_metric(self, obj: Any) -> bool:
        return isinstance(obj, torch.nn.Module) and hasattr(obj, "merge_state") and hasattr(obj, "metric_state")

    def reset(self, metric: Any) -> None:
        metric.reset()

    def contribution(self, metric: Any) -> Any:
        return (metric._update_count, metric.metric_state) if metric._update_count else None

    def merge(self, metric: Any, contribution: tuple[int, dict[str, Any]]) -> None:
        count, state = contribution
        metric._update_count += count
        metric._computed = None
        if metric._update_count == count:  # nothing was in it: what came is all
            for name, value in state.items():
                setattr(metric, name, value)
        else:
            metric.merge_state(state)


libraries: list[Library] = [_Torchmetrics()]
"""Those that are known; one that is loaded later adds its own."""


def _library_of(metric: Any) -> Library | None:
    return next((each for each in libraries if each.is_metric(metric)), None)


# -- pickling ----------------------------------------------------------------------------------------------------------


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor is pickled: its bytes, without a graph."""
    if tensor.layout is not torch.strided:
        return _open_sparse, (
            tensor.detach().coalesce().indices(),
            tensor.detach().coalesce().values(),
            tuple(tensor.shape),
        )
    host = tensor.detach().cpu().contiguous()
    shown: Any = host.view(-1).view(torch.uint8).numpy()
    data = pickle.PickleBuffer(shown) if host.numel() else b""
    return _open_tensor, (data, host.dtype, tuple(host.shape), tensor.requires_grad and tensor.is_leaf)


def _open_tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    if not len(memoryview(data)):
        return torch.empty(shape, dtype=dtype).requires_grad_(requires_grad)
    own = data if isinstance(data, bytearray) else bytearray(data)  # to be written to
    return torch.frombuffer(own, dtype=dtype).reshape(shape).requires_grad_(requires_grad)


def _open_sparse(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Objects by value, and of resources their numbers, which `needs` keeps.

    `number_of` gives the number of an object that is a resource, else None.
    """

    def __init__(self, file: io.BytesIO, buffers: list[Any], packer: Packer | None, root: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=out_of_band(buffers))
        self.needs: dict[int, Any] = {}
        self._packer = packer
        # A resource that is described itself, with all parts of a model.
        self._own = {id(each) for each in _parts_of(root)}

    def reducer_override(self, obj: Any) -> Any:
        packer = self._packer
        if packer is not None and id(obj) not in self._own:
            found = packer.reference(obj, self.needs)
            if found is not None:
                return found
        if isinstance(obj, torch.Tensor) and type(obj) in (torch.Tensor, torch.nn.Parameter):
            if type(obj) is torch.nn.Parameter:
                return torch.nn.Parameter, (obj.detach(), obj.requires_grad)
            return _tensor(obj)
        for library in libraries:
            found = library.reduced(obj)
            if found is not None:
                return found
        return super().reducer_override(obj)


def _parts_of(root: Any) -> list[Any]:
    """An object, and, of a model, all modules in it, in one order in every process."""
    modules = root.modules() if isinstance(root, torch.nn.Module) else (root,)
    return [*modules, *(part for library in libraries for part in library.parts(root))]


def _dump(value: Any, packer: Packer | None = None, root: Any = None) -> tuple[Packed, dict[int, Any]]:
    file, buffers = io.BytesIO(), list[Any]()
    pickler = _Pickler(file, buffers, packer, root)
    pickler.dump(value)
    # A buffer is the caller's memory, which may change while the closure waits.
    return Packed(file.getvalue(), tuple(bytearray(each) for each in buffers)), pickler.needs


def open_packed(packed: Packed) -> Any:
    """What was packed."""
    return pickle.loads(packed.data, buffers=packed.buffers)


# -- the coordinator ---------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    packed: Packed
    needs: Mapping[int, Any] = {}


class Packer:
    """Packs closures, and knows the resources that they refer to.

    Args:
        roots: Gives the models that scopes of the strategy made.
        access: The variables on the servers.
    """

    def __init__(self, roots: Callable[[], Sequence[torch.nn.Module]], access: ServerAccess) -> None:
        self._roots = roots
        self._access = access
        self._known: dict[int, _Known] = {}
        self._functions: dict[bytes, int] = {}
        self._numbers: dict[int, tuple[Any, int]] = {}  # by identity: a weak reference, and the number
        self._metrics: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def pack(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> PackedClosure:
        """Take a closure as it is now.

        Raises:
            CannotTravelError: Something in it cannot be sent to a worker.
        """
        name = getattr(function, "__qualname__", type(function).__name__)
        with self._lock:
            shown, needs = self._function(function, name)
            packed, more = self._packed((shown, tuple(args), dict(kwargs)), name)
            every = self._with_needs({**needs, **more})
            waits = tuple(obj for number, obj in every.items() if number not in self._known and isinstance(obj, Later))
        return PackedClosure(name, packed, tuple(every), waits, tuple(every.values()))

    def pack_value(self, value: Any) -> Packed:
        """A value by itself, in which no resource is."""
        return _dump(value)[0]

    def definition(self, number: int) -> Packed:
        """What a worker is sent that lacks a resource."""
        return self._known[number].packed

    def knows(self, number: int) -> bool:
        """Whether a resource is still there: workers may forget others."""
        return number in self._known

    def supply(self, later: Later, packed: Packed) -> int | None:
        """A result is there. Returns its number, if closures were given it."""
        with self._lock:
            found = self._numbers.get(id(later))
            if found is None:
                return None
            self._known[found[1]] = _Known(packed)
            return found[1]

    def merge(self, contributions: Mapping[int, Any]) -> None:
        """Add what a closure added to metrics."""
        for number, contribution in contributions.items():
            metric = self._metrics.get(number)
            library = _library_of(metric)
            if library is not None:
                library.merge(metric, contribution)

    def metric(self, metric: Any, needs: dict[int, Any]) -> tuple[Any, ...]:
        """How a metric is pickled: each worker has its own, and what closures add to it is added up here."""
        number = self._number(metric, lambda: metric)
        self._metrics[number] = metric
        needs[number] = metric
        return open_resource, (number,)

    def made_by(self, obj: Any, maker: Callable[[], Callable[[WorkerContext], Any]], needs: dict[int, Any]) -> int:
        """The number of an object of which each worker makes its own, by a function that is sent to it once."""
        number = self._number(obj, lambda: _Made(maker()))
        needs[number] = obj
        return number

    def forget(self, obj: Any) -> None:
        """An object has changed, and no closure that uses it is under way: workers get it anew."""
        with self._lock:
            found = self._numbers.get(id(obj))
            if found is not None:
                self._forget(id(obj), found[1])

    def _packed(self, value: Any, name: str, root: Any = None) -> tuple[Packed, dict[int, Any]]:
        try:
            return _dump(value, self, root)
        except CannotTravelError:
            raise
        except Exception as error:
            raise CannotTravelError(
                f"{name} cannot be sent to a worker: {type(error).__name__}: {error}. Make what it needs of that kind "
                "on the workers: coordinator.create_per_worker_value(fn)."
            ) from error

    def _function(self, function: Callable[..., Any], name: str) -> tuple[int | Packed, dict[int, Any]]:
        """A function; its number, if it has been met before: then it is a resource, which workers are sent once."""
        packed, needs = self._packed(function, name)
        digest = xxhash.xxh3_128()
        for each in (packed.data, *packed.buffers):
            digest.update(each)
        content = digest.digest()
        number = self._functions.pop(content, None)
        self._functions[content] = 0 if number is None else number or next(_numbers)
        while len(self._functions) > _FUNCTIONS:
            self._known.pop(self._functions.pop(next(iter(self._functions))), None)
        if number is None:
            return packed, needs
        number = self._functions[content]
        self._known.setdefault(number, _Known(packed, needs))
        return number, {number: None}

    def _with_needs(self, numbers: Mapping[int, Any]) -> dict[int, Any]:
        """These resources, and all that they need, what is needed first."""
        found: dict[int, Any] = {}

        def add(number: int, obj: Any) -> None:
            if number not in found:
                known = self._known.get(number)
                for each, its in known.needs.items() if known is not None else ():
                    add(each, its)
                found[number] = obj

        for number, obj in numbers.items():
            add(number, obj)
        return found

    # What is no plain value -----------------------------------------------------------------------------------------

    def reference(self, obj: Any, needs: dict[int, Any]) -> tuple[Any, ...] | None:
        """How an object is pickled that is a resource, or a variable on the servers; None for others."""
        if isinstance(obj, torch.Tensor):
            stored = self._access.stored_of(obj)
            if stored is None:
                return None
            if isinstance(obj, ServerVariable):
                settings = (
                    obj._settings,
                    obj.distribute_strategy,
                    type(obj) is not ServerVariable,
                    obj.sparse_gradients,
                )
                return _open_stand_in, (stored, *settings)
            return _open_copy, (stored, isinstance(obj, torch.nn.Parameter), obj.requires_grad)
        if isinstance(obj, torch.nn.Module):
            return self._module(obj, needs)
        if remote_optimizer.is_remote(obj):
            number = self._number(obj, lambda: _OpenOptimizer(*remote_optimizer.described(obj)))
            options = [{key: value for key, value in group.items() if key != "params"} for group in obj.param_groups]
            needs[number] = obj
            return _open_optimizer, (number, options)
        if isinstance(obj, Resource):
            return open_resource, (self.made_by(obj, obj.maker, needs),)
        if isinstance(obj, Later):
            number = self._identify(obj)
            needs[number] = obj
            return open_resource, (number,)
        return next((found for library in libraries if (found := library.reference(obj, self, needs))), None)

    def _module(self, module: torch.nn.Module, needs: dict[int, Any]) -> tuple[Any, ...] | None:
        if _library_of(module) is not None:
            return self.metric(module, needs)
        roots = list(reversed(self._roots()))
        candidates = [each for each in roots if each is module] or roots
        root, place = next(
            ((each, place) for each in candidates for place, part in enumerate(_parts_of(each)) if part is module),
            (None, 0),
        )
        if root is None:
            if any(each.requires_grad for each in module.parameters()):
                raise CannotTravelError(
                    f"A {type(module).__name__} that was made outside strategy.scope() is used in a function that is "
                    "scheduled: each worker would train a copy of its own. Make it within `with strategy.scope():`."
                )
            return None
        number = self._number(root, lambda: root)
        needs[number] = root
        modes = tuple(each.training for each in root.modules())
        return _open_module, (number, place, modes[0] if len(set(modes)) == 1 else modes)

    def _identify(self, obj: Any) -> int:
        """The number of an object that is a resource."""
        found = self._numbers.get(id(obj))
        if found is not None and found[0]() is obj:
            return found[1]
        number, identity = next(_numbers), id(obj)
        self._numbers[identity] = (weakref.ref(obj, lambda _: self._forget(identity, number)), number)
        return number

    def _forget(self, identity: int, number: int) -> None:
        known = self._numbers.get(identity)
        if known is not None and known[1] == number:
            del self._numbers[identity]
        self._known.pop(number, None)

    def _number(self, obj: Any, describe: Callable[[], Any]) -> int:
        """The number of a resource, which is described when it is first met."""
        number = self._identify(obj)
        if number not in self._known:
            self._known[number] = _Known(Packed(b""))  # it may refer to itself
            packed, needs = self._packed(describe(), type(obj).__name__, root=obj)
            needs.pop(number, None)
            # Of what it refers to nothing is held but by itself: an optimizer holds its parameters, not their model.
            self._known[number] = _Known(packed, dict.fromkeys(needs))
        return number


# -- a worker ----------------------------------------------------------------------------------------------------------


class _Made(NamedTuple):
    """The definition of a resource that each worker makes."""

    maker: Callable[[WorkerContext], Any]


class _OpenOptimizer(NamedTuple):
    number: int
    template: Any
    groups: Any
    params: Any


class Runner:
    """Calls closures on a worker.

    Args:
        access: The variables on the servers.
        context: Which worker this is.
    """

    def __init__(self, access: ServerAccess, context: WorkerContext) -> None:
        self.access = access
        self.context = context
        self.variables: set[int] = set()  # that were opened since this was last emptied
        self._packed: dict[int, Packed] = {}
        self._objects: dict[int, Any] = {}
        self._variables_of: dict[int, frozenset[int]] = {}

    def run(
        self,
        closure: int,
        oldest: int,
        packed: Packed,
        needs: Sequence[int],
        definitions: Mapping[int, Packed],
        forget: Sequence[int] = (),
    ) -> ClosureResult:
        """Call a closure.

        Args:
            closure, oldest: Its number, and the smallest one that is unfinished.
            packed, needs: As `PackedClosure` has them.
            definitions: Those of the resources that this worker has not been sent yet.
            forget: Resources that are gone.
        """
        global _runner
        _runner = self
        for number in forget:
            self._packed.pop(number, None)
            self._objects.pop(number, None)
        self._packed.update(definitions)
        for number in needs:
            self.open(number)
        before, self.variables = self.variables, set()
        shown, args, kwargs = open_packed(packed)
        function = self._objects[shown] if isinstance(shown, int) else open_packed(shown)
        variables = self.variables.union(*(self._variables_of[each] for each in needs))
        self.variables = before
        metrics = {each: (kind, obj) for each in needs if (kind := _library_of(obj := self._objects[each])) is not None}
        for kind, metric in metrics.values():
            kind.reset(metric)
        with self.access.running(ClosureRun(closure, oldest), variables) as running:
            value = function(*args, **kwargs)
        contributions = {each: kind.contribution(metric) for each, (kind, metric) in metrics.items()}
        contributions = {each: found for each, found in contributions.items() if found is not None}
        return ClosureResult(_dump(value)[0], contributions, tuple(running.staleness))

    def open(self, number: int) -> Any:
        """This worker's object of a resource."""
        if number not in self._objects:
            before, self.variables = self.variables, set()
            found = open_packed(self._packed.pop(number))
            self._variables_of[number] = frozenset(self.variables)
            self.variables = before
            if isinstance(found, _Made):
                found = found.maker(self.context)
            elif isinstance(found, _OpenOptimizer):
                found = remote_optimizer.opened(*found)
            self._objects[number] = found
        self.variables |= self._variables_of[number]
        return self._objects[number]


_runner: Runner


def running() -> Runner:
    """What runs closures in this process, a worker."""
    return _runner


def open_resource(number: int) -> Any:
    """This worker's object of a resource, for what is unpickled."""
    return _runner.open(number)


def _open_module(number: int, place: int, modes: bool | tuple[bool, ...]) -> Any:
    root: torch.nn.Module = _runner.open(number)
    if isinstance(modes, bool):
        if root.training is not modes:
            root.train(modes)
    else:
        for each, training in zip(root.modules(), modes, strict=True):
            each.training = training
    return root if place == 0 else _parts_of(root)[place]


def _open_optimizer(number: int, options: list[dict[str, Any]]) -> Any:
    optimizer = _runner.open(number)
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    return optimizer


def _open_copy(stored: Stored, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    """This worker's copy of a parameter or buffer."""
    _runner.variables.add(stored.number)
    return _runner.access.opened_copy(stored, is_parameter=is_parameter).requires_grad_(requires_grad)


def _open_stand_in(stored: Stored, settings: Any, strategy: Any, rows_apart: bool, sparse: bool) -> ServerVariable:
    access = _runner.access
    _runner.variables.add(stored.number)  # only if it has a copy here
    variable = access.stand_ins.get(stored)
    if variable is None:
        variable = access.stand_ins[stored] = stand_in(stored, settings, strategy, rows_apart=rows_apart)
    variable.sparse_gradients = sparse
    return variable
