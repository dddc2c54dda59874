"""Closures on their way: a function and its arguments packed on the coordinator, opened and called on a worker.

What belongs to the coordinator and has an object of its own on each worker is a *resource*: a model, an optimizer, a
metric, a per-worker value; also a function that is scheduled again and again. A closure refers to resources by number,
and a worker is sent what it lacks of them, once. What may change of them later (whether a model trains, a learning
rate) goes with each closure.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import cloudpickle
import torch
import xxhash

from distnb.coordinator.libraries import libraries, library_of, parts_of
from distnb.coordinator.per_worker import PerWorkerValues
from distnb.coordinator.remote_values import RemoteValue
from distnb.errors import CannotTravelError, EndOfDataset
from distnb.objects.code import source_of
from distnb.objects.modes import RANDOM, Environment, capture_environment
from distnb.objects.packing import out_of_band
from distnb.runtime.servers import remote_optimizer
from distnb.runtime.servers.access import ClosureRun, ServerAccess
from distnb.runtime.servers.placement import Stored
from distnb.runtime.servers.server_variable import ServerVariable, stand_in
from distnb.values.structure import map_structure
from distnb.wire.messages import RunClosure

__all__ = ["ClosureResult", "Packed", "PackedClosure", "Packer", "Runner", "current_worker", "open_value"]

_numbers = itertools.count(1)  # a worker may serve several coordinators
_FUNCTIONS = 256  # that are remembered, to be known when they are scheduled again
_NO_MODES = Environment()
_PLAIN = frozenset({type(None), bool, int, float, str})


class Packed(NamedTuple):
    """A pickle, and the buffers beside it."""

    data: bytes
    buffers: tuple[Any, ...] = ()


class PackedClosure(NamedTuple):
    """A closure as it is queued.

    Attributes:
        data, buffers: The function, or its number; the arguments; and what is set of resources.
        needs: The resources that a worker must know.
        inputs: Results of other closures that are among the arguments.
        holds: What these resources are of: they are there as long as the closure is.
        modes: Torch's and others of this process; the same object as that of the closure before if they are equal.
    """

    data: bytes
    buffers: tuple[Any, ...]
    needs: tuple[int, ...]
    inputs: tuple[RemoteValue, ...]
    holds: tuple[Any, ...]
    modes: Environment = _NO_MODES

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.data) + sum(memoryview(each).nbytes for each in self.buffers)


class ClosureResult(NamedTuple):
    """How a closure ended well on a worker.

    Attributes:
        value: What the function returned, to be opened by `open_value`.
        contributions: What it added to the coordinator's metrics, by resource.
        staleness: Of each optimizer step, how many updates its copies had missed.
    """

    value: Any
    contributions: Mapping[int, Any] | None = None
    staleness: tuple[int, ...] = ()


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
    """Objects by value, and of resources their numbers.

    Attributes:
        needs: The resources that were met, by number.
        settings: What may change of them, by number.
        inputs: Results of other closures.
    """

    def __init__(self, file: io.BytesIO, buffers: list[Any], packer: Packer | None, root: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=out_of_band(buffers))
        self.needs: dict[int, Any] = {}
        self.settings: dict[int, Any] = {}
        self.inputs: dict[int, RemoteValue] = {}
        self._packer = packer
        # A resource that is described itself, with all parts of a model.
        self._own = {id(each) for each in parts_of(root)}

    def reducer_override(self, obj: Any) -> Any:
        if self._packer is not None and type(obj) is types.FunctionType:
            self._packer.sources.update([found] if (found := source_of(obj.__code__)) else ())
        if self._packer is not None and id(obj) not in self._own:
            found = self._packer.reference(obj, self)
            if found is not None:
                return found
        if type(obj) is torch.nn.Parameter:
            return torch.nn.Parameter, (obj.detach(), obj.requires_grad)
        if type(obj) is torch.Tensor:
            return _tensor(obj)
        for library in libraries:
            reduced = library.reduced(obj)
            if reduced is not None:
                return reduced
        return super().reducer_override(obj)


def _dump(value: Any, what: str, packer: Packer | None = None, root: Any = None) -> tuple[Packed, _Pickler]:
    file, buffers = io.BytesIO(), list[Any]()
    pickler = _Pickler(file, buffers, packer, root)
    try:
        pickler.dump(value)
    except CannotTravelError as error:
        raise error.with_traceback(None) from None  # from here, and not from within the pickler
    except Exception as error:
        raise CannotTravelError(
            f"{what} cannot be sent: {type(error).__name__}: {error}. What workers need of that kind they can make "
            "themselves: coordinator.create_per_worker_value(fn)."
        ) from error
    # A buffer is the caller's memory, which may change while the closure waits.
    return Packed(file.getvalue(), tuple(bytearray(each) for each in buffers)), pickler


def _open(packed: Packed) -> Any:
    return pickle.loads(packed.data, buffers=packed.buffers)


def open_value(value: Any) -> Any:
    """What `ClosureResult.value` stands for."""
    return _open(value) if type(value) is Packed else value


# -- the coordinator ---------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    packed: Packed
    needs: Mapping[int, Any]
    settings: Mapping[int, Any]


class Packer:
    """Packs closures by value, and knows the resources that they refer to.

    Args:
        roots: Gives the models that scopes of strategies with parameter servers made.
        access: The variables on the servers.

    Attributes:
        forgotten: How many resources are gone: workers that know them may forget them, too.
        sources: The texts of cells that packed functions are from, by what their code objects carry.
    """

    def __init__(self, roots: Callable[[], Sequence[torch.nn.Module]], access: ServerAccess) -> None:
        self.forgotten = 0
        self.sources: dict[str, str] = {}
        self._roots = roots
        self._access = access
        self._known: dict[int, _Known] = {}
        self._functions: dict[bytes, int] = {}  # by digest; 0: met once
        self._objects: dict[int, tuple[weakref.ref[Any], int]] = {}  # by identity: it, and its number
        self._metrics: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._captured: Environment | None = None
        self._modes = _NO_MODES

    def pack(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> PackedClosure:
        """Take a closure as it is now.

        Raises:
            CannotTravelError: Something in it cannot be sent to a worker.
        """
        with self._lock:
            self._access.send_changes()
            shown, found = self._function(function)
            if args or kwargs:
                arguments, more = _dump((args, kwargs), "An argument of a closure", self)
                needs, settings = {**found.needs, **more.needs}, {**found.settings, **more.settings}
                inputs = {**found.inputs, **more.inputs}
            else:
                arguments, needs, settings, inputs = _NO_ARGUMENTS, found.needs, found.settings, found.inputs
            every = self._with_needs(needs, settings)
            own = shown.buffers if isinstance(shown, Packed) else ()
            named = shown.data if isinstance(shown, Packed) else shown
            data = pickle.dumps((named, arguments.data, settings), protocol=5)
        buffers = (*own, *arguments.buffers)
        return PackedClosure(
            data, buffers, tuple(every), tuple(inputs.values()), tuple(every.values()), self._modes_now()
        )

    def _modes_now(self) -> Environment:
        """Modes, without random states: workers have their own."""
        found = capture_environment(self._captured, "call")
        if found is not self._captured:
            self._captured = found
            modes = Environment({name: value for name, value in found.modes.items() if name not in RANDOM})
            self._modes = self._modes if modes == self._modes else modes
        return self._modes

    def definition(self, number: int) -> Packed:
        """What a worker is sent that lacks a resource."""
        return self._known[number].packed

    def knows(self, number: int) -> bool:
        """Whether a resource is still there."""
        return number in self._known

    def merge(self, contributions: Mapping[int, Any]) -> None:
        """Add what a closure added to metrics."""
        for number, contribution in contributions.items():
            metric = self._metrics.get(number)
            library = library_of(metric)
            if library is not None:
                library.merge(metric, contribution)

    def forget(self, obj: Any) -> None:
        """An object has changed, and no closure that uses it is under way: workers are sent it anew."""
        with self._lock:
            found = self._objects.get(id(obj))
            if found is not None:
                self._forget(id(obj), found[1])

    def _function(self, function: Callable[..., Any]) -> tuple[int | Packed, Any]:
        """A function; its number, if it has been met before: then it is a resource, which workers are sent once."""
        packed, found = _dump(function, "The function", self)
        digest = xxhash.xxh3_128(packed.data)
        for each in packed.buffers:
            digest.update(each)
        content = digest.digest()
        number = self._functions.pop(content, None)
        self._functions[content] = 0 if number is None else number or next(_numbers)
        while len(self._functions) > _FUNCTIONS:
            self._drop(self._functions.pop(next(iter(self._functions))))
        if number is None or found.inputs:
            return packed, found
        number = self._functions[content]
        if number not in self._known:
            self._known[number] = _Known(packed, found.needs, {})
        found.needs = {number: None, **found.needs}
        return number, found

    def _with_needs(self, numbers: Mapping[int, Any], settings: dict[int, Any]) -> dict[int, Any]:
        """These resources and all that they need; `settings` gets what is set of these."""
        every = dict(numbers)
        pending = list(numbers)
        while pending:
            known = self._known.get(pending.pop())
            if known is None:
                continue
            for number, obj in known.needs.items():
                if number not in every:
                    every[number] = obj
                    pending.append(number)
            for number, its in known.settings.items():
                settings.setdefault(number, its)
        return every

    # What is no plain value -----------------------------------------------------------------------------------------

    def reference(self, obj: Any, pickler: _Pickler) -> tuple[Any, ...] | None:
        """How an object is pickled that is a resource, or a variable on the servers; None for others."""
        if isinstance(obj, torch.Tensor):
            stored = self._access.stored_of(obj)
            if stored is None:
                return None
            if isinstance(obj, ServerVariable):
                more = (obj._settings, obj.distribute_strategy, type(obj) is not ServerVariable, obj.sparse_gradients)
                return _open_stand_in, (stored, *more)
            return _open_copy, (stored, isinstance(obj, torch.nn.Parameter), obj.requires_grad)
        if isinstance(obj, torch.nn.Module):
            return self._module(obj, pickler)
        if isinstance(obj, RemoteValue):
            pickler.inputs[obj.number] = obj
            return _open_input, (obj.number,)
        if isinstance(obj, PerWorkerValues):
            return self._resource(obj, pickler, lambda: obj.maker)
        if remote_optimizer.is_remote(obj):
            options = [{key: value for key, value in group.items() if key != "params"} for group in obj.param_groups]
            return self._resource(obj, pickler, lambda: _OpenOptimizer(*remote_optimizer.described(obj)), options)
        if library_of(obj) is not None:
            return self._metric(obj, pickler)
        described = next((found for library in libraries if (found := library.described(obj)) is not None), None)
        return None if described is None else self._resource(obj, pickler, *described)

    def _metric(self, metric: Any, pickler: _Pickler) -> tuple[Any, ...]:
        found = self._resource(metric, pickler, functools.partial(_itself, metric))
        self._metrics[found[1][0]] = metric
        return found

    def _module(self, module: torch.nn.Module, pickler: _Pickler) -> tuple[Any, ...] | None:
        if library_of(module) is not None:
            return self._metric(module, pickler)
        for root in reversed(self._roots()):
            place = next((place for place, part in enumerate(parts_of(root)) if part is module), None)
            if place is not None:
                modules = list(root.modules())
                modes = [each.training for each in modules]
                frozen = [number for number, each in enumerate(_parameters(modules)) if not each.requires_grad]
                opened = self._resource(root, pickler, functools.partial(_itself, root), (modes, frozen))
                return (_open_module, (*opened[1], place)) if place else opened
        if any(each.requires_grad for each in module.parameters()):
            raise CannotTravelError(
                f"A {type(module).__name__} that was made outside strategy.scope() is used in a function that is "
                "scheduled: each worker would train a copy of its own. Make it within `with strategy.scope():`."
            )
        return None

    def _resource(
        self, obj: Any, pickler: _Pickler, describe: Callable[[], Any], settings: Any = None
    ) -> tuple[Any, tuple[int]]:
        """Refer to a resource, which is described when it is first met."""
        found = self._objects.get(id(obj))
        if found is not None and found[0]() is obj:
            number = found[1]
        else:
            number, identity = next(_numbers), id(obj)
            self._objects[identity] = (weakref.ref(obj, lambda _: self._forget(identity, number)), number)
            self._known[number] = _Known(Packed(b""), {}, {})  # it may refer to itself
            packed, within = _dump(describe(), f"A {type(obj).__name__}", self, root=obj)
            if within.inputs:
                raise CannotTravelError(
                    f"A {type(obj).__name__} refers to a RemoteValue. Use the value: coordinator.fetch(...)."
                )
            within.needs.pop(number, None)
            # Nothing is held of what it refers to: an optimizer holds its parameters, and not their model.
            self._known[number] = _Known(packed, dict.fromkeys(within.needs), within.settings)
        pickler.needs[number] = obj
        if settings is not None:
            pickler.settings[number] = settings
        return _open_resource, (number,)

    def _forget(self, identity: int, number: int) -> None:
        found = self._objects.get(identity)
        if found is not None and found[1] == number:
            del self._objects[identity]
        self._drop(number)

    def _drop(self, number: int) -> None:
        if self._known.pop(number, None) is not None:
            self.forgotten += 1


def _itself(obj: Any) -> Any:
    return obj


_NO_ARGUMENTS = Packed(pickle.dumps(((), {}), protocol=5))


# -- a worker ----------------------------------------------------------------------------------------------------------


class _OpenOptimizer(NamedTuple):
    number: int
    template: Any
    groups: Any
    params: Any


class _Reach(NamedTuple):
    """What is opened with something: resources, and variables on the servers."""

    resources: set[int]
    variables: set[int]


class Runner:
    """Runs closures on a worker.

    Args:
        access: The variables on the servers.
        worker: Which worker this is.
    """

    def __init__(self, access: ServerAccess, worker: int) -> None:
        self.access = access
        self.worker = worker
        self.reach = _Reach(set(), set())
        self._new_models: list[torch.nn.Module] = []
        on_cpu = access.device.type == "cpu"  # torch's mode for new tensors would only cost time there
        self._placed: AbstractContextManager[Any] = contextlib.nullcontext() if on_cpu else access.device
        self._packed: dict[int, Packed] = {}
        self._resources: dict[int, Any] = {}
        self._reaches: dict[int, _Reach] = {}
        self._inputs: dict[int, Any] = {}

    def run(self, message: RunClosure, fresh: Collection[int] = ()) -> ClosureResult:
        """Run a closure; raises what it does. Copies of variables that are `fresh` are not read anew."""
        global _runner
        _runner = self
        for number in message.forget:
            for each in (self._packed, self._resources, self._reaches):
                each.pop(number, None)
        self._packed.update(message.definitions)
        self._inputs = dict(message.inputs)
        self.reach = _Reach(set(), set())
        shown, arguments, settings = pickle.loads(message.data)
        buffers = iter(message.buffers)  # each pickle takes as many as it has
        function = self.resource(shown) if isinstance(shown, int) else pickle.loads(shown, buffers=buffers)
        args, kwargs = pickle.loads(arguments, buffers=buffers)
        for number, its in settings.items():
            _set(self.resource(number), its)
        self._keep_in_sync()
        reached = {each: self._resources[each] for each in self.reach.resources}
        metrics = {each: (kind, obj) for each, obj in reached.items() if (kind := library_of(obj)) is not None}
        for kind, metric in metrics.values():
            kind.reset(metric)
        with self.access.running(ClosureRun(message.closure, message.oldest), self.reach.variables, fresh) as running:
            try:
                with self._placed:
                    value = function(*args, **kwargs)
            except StopIteration as end:
                raise EndOfDataset(
                    "A closure took the next element of an iterator that has no more, and StopIteration left it. "
                    "Datasets of workers are best endless: let the dataset function repeat its data (`while True: "
                    "yield from …`), or catch StopIteration."
                ) from end
            if self.access.replicas is not None:
                value = self.access.replicas.whole(value)
        counted = {each: map_structure(_on_host, kind.contribution(obj)) for each, (kind, obj) in metrics.items()}
        contributions = {each: found for each, found in counted.items() if found is not None}
        packed = value if type(value) in _PLAIN else _dump(value, "The result of a closure")[0]
        return ClosureResult(packed, contributions or None, tuple(running.staleness))

    def _keep_in_sync(self) -> None:
        """What this closure is the first to use; a worker's replicas keep it in sync, if it has several."""
        models, made = self._new_models, list(self.access.made)
        self._new_models = []
        self.access.made.clear()
        if self.access.replicas is not None:
            self.access.replicas.keep_in_sync(models, made)

    def resource(self, number: int) -> Any:
        """This worker's own object, made at its first use."""
        if number not in self._resources:
            before, self.reach = self.reach, _Reach(set(), set())
            try:
                found = _open(self._packed[number])
                make = getattr(found, "make_for_worker", None)
                if make is not None:
                    found = make(self.worker)
                elif isinstance(found, _OpenOptimizer):
                    found = remote_optimizer.opened(*found)
                elif isinstance(found, torch.nn.Module) and library_of(found) is not None:
                    found.to(self.access.device)  # a metric: of models each parameter is a copy that is there already
                    if self.access.replicas is not None:
                        self.access.replicas.bind(found)
                elif isinstance(found, torch.nn.Module):
                    self._new_models.append(found)
                self._reaches[number] = self.reach
                self._resources[number] = found
                del self._packed[number]
            finally:
                self.reach = before
        self.reach.resources.add(number)
        self.reach.resources.update(self._reaches[number].resources)
        self.reach.variables.update(self._reaches[number].variables)
        return self._resources[number]

    def input(self, number: int) -> Any:
        """Another closure's result."""
        return open_value(self._inputs[number])


_runner: Runner


def current_worker() -> int:
    """Which worker this process is, in which a closure is opened or runs."""
    return _runner.worker


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _parameters(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """Those of each of some modules; `Module.parameters` looks more closely, and takes longer."""
    return (each for module in modules for each in module._parameters.values() if each is not None)


def _set(resource: Any, settings: Any) -> None:
    """Let a model and its parts train or not, as the coordinator's do; give an optimizer's groups their options."""
    if any(library.set(resource, settings) for library in libraries):
        return
    if isinstance(resource, torch.nn.Module):
        (modes, frozen), modules = settings, list(resource.modules())
        for module, training in zip(modules, modes, strict=True):
            if module.training is not training:  # to set an attribute of a module costs some microseconds
                module.training = training
        for place, parameter in enumerate(_parameters(modules)):
            if parameter.requires_grad is (place in frozen):
                parameter.requires_grad_(not parameter.requires_grad)
    else:
        for group, options in zip(resource.param_groups, settings, strict=True):
            group.update(options)


def _open_resource(number: int) -> Any:
    return _runner.resource(number)


def _open_input(number: int) -> Any:
    return _runner.input(number)


def _open_module(number: int, place: int) -> Any:
    return next(itertools.islice(parts_of(_runner.resource(number)), place, None))


def _open_copy(stored: Stored, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    """This worker's copy of a parameter or buffer."""
    _runner.reach.variables.add(stored.number)
    return _runner.access.opened_copy(stored, is_parameter=is_parameter).requires_grad_(requires_grad)


def _open_stand_in(stored: Stored, settings: Any, strategy: Any, rows_apart: bool, sparse: bool) -> ServerVariable:
    access = _runner.access
    _runner.reach.variables.add(stored.number)  # it is read with others if it has a copy here
    variable = access.stand_ins.get(stored)
    if variable is None:
        variable = access.stand_ins[stored] = stand_in(stored, settings, strategy, rows_apart=rows_apart)
    variable.sparse_gradients = sparse
    return variable
