"""The coordinator's form of closures: a function, its arguments, and the resources that they refer to.

A *resource* belongs to the coordinator and has a counterpart on each worker: a model, an optimizer, a metric, a
per-worker value, and a function that is scheduled repeatedly. A closure refers to resources by number. A worker
receives the definition of each resource once. Settings that may change later (training mode, learning rate) are sent
with each closure.

Example: `schedule(step, args=(iterator,))` with a model in `step` sends

    first closure   definitions of 1 (model), 2 (iterator); step by value; (2,); settings {1: modes}
    second closure  definition of 3 (step, which has repeated);     3; (2,); settings {1: modes}
    third closure                                                   3; (2,); settings {1: modes}
"""

from __future__ import annotations

import functools
import itertools
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from distnb.compat import torch_internals
from distnb.errors import CannotTravelError
from distnb.objects.modes.environment import RANDOM, Environment, capture_environment, is_current
from distnb.runtime.this_process import this_process
from distnb.servers.coordinator.closure_plan import ClosurePlan
from distnb.servers.coordinator.composition import Composition, CompositionRecord
from distnb.servers.coordinator.libraries import libraries, library_of, parts_of
from distnb.servers.coordinator.per_worker import PerWorkerValues
from distnb.servers.coordinator.pickling import PickledParts, Reached, dump, outside_scope
from distnb.servers.coordinator.references import (
    open_copy,
    open_input,
    open_module,
    open_representative,
    open_resource,
    parameters_of_each,
)
from distnb.servers.coordinator.remote_values import RemoteValue
from distnb.servers.variables import remote_optimizer
from distnb.servers.variables.access import ServerAccess
from distnb.servers.variables.server_variable import ServerVariable

__all__ = ["ClosurePacker", "PackedClosure"]

_numbers = itertools.count(1)  # unique in the process, because a worker may serve several coordinators
_FUNCTIONS = 256  # functions that are remembered, to be recognised when they are scheduled again
_NO_MODES = Environment()


class PackedClosure(NamedTuple):
    """A queued closure.

    Attributes:
        data, buffers: The function, or its number; the arguments; and the settings of resources.
        needs: The definitions, by number, of the resources that a worker must know. They stay here while the closure is
            queued, even if the packer has dropped them.
        inputs: Results of other closures among the arguments.
        holds: The objects of these resources, and their tensors, which must live as long as the closure.
        modes: This process's modes, of torch and others. Equal modes of successive closures are the same object.
    """

    data: bytes
    buffers: tuple[Any, ...]
    needs: Mapping[int, PickledParts]
    inputs: tuple[RemoteValue, ...]
    holds: tuple[Any, ...]
    modes: Environment = _NO_MODES

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        nbytes = len(self.data)
        return nbytes + sum([memoryview(each).nbytes for each in self.buffers]) if self.buffers else nbytes


class _Known(NamedTuple):
    packed: PickledParts
    needs: Mapping[int, Any]
    settings: Mapping[int, Any]


class ClosurePacker:
    """Packer of closures by value that knows the resources they refer to.

    Args:
        roots: A function that returns the models that scopes of strategies with parameter servers made.
        access: The variables on the servers.
        register: A function that puts the tensors of a model on the servers which it got since its scope.

    Attributes:
        access: The variables on the servers.
        forgotten: The number of resources that no longer exist. Workers may drop them, too.
        sources: The texts of cells that define packed functions, by the file name in their code objects.
        imports: The modules that packed functions import.
    """

    def __init__(
        self,
        roots: Callable[[], Sequence[torch.nn.Module]],
        access: ServerAccess,
        register: Callable[[torch.nn.Module], None],
    ) -> None:
        self.forgotten = 0
        self.sources: dict[str, str] = {}
        self.imports: set[str] = set()
        self._roots = roots
        self.access = access
        self._register = register
        self._known: dict[int, _Known] = {}
        self._functions: dict[bytes, int] = {}  # by digest; 0: seen once
        self._plans: dict[int, ClosurePlan] = {}  # by the identity of the function's code, which the plan keeps
        self._objects: dict[int, tuple[weakref.ref[Any], int]] = {}  # by identity: the object, and its number
        self._metrics: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._compositions: dict[int, CompositionRecord] = {}  # of models and optimizers, as they were described
        self._compared: set[int] = set()  # the resources that were compared with their records in this `pack`
        self._at_rest = True
        self._captured: Environment | None = None
        self._modes = _NO_MODES

    def pack(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        at_rest: bool = True,
    ) -> PackedClosure:
        """Pack a closure in its current state.

        Args:
            at_rest: True if no closure is running. Only then are changes through `.data`, which torch does not count,
                and changes of other attributes of a model detected, because comparing them all takes time.

        Raises:
            CannotTravelError: Something in it cannot be sent to a worker.
        """
        with self._lock:
            self._at_rest = at_rest
            self._compared.clear()
            self.access.copies.send_changes(thorough=at_rest)
            shown, found = self._function(function)
            if args or kwargs:
                arguments, pickler = dump((args, kwargs), "An argument of a closure", self)
                more = pickler.reached
                needs, settings = {**found.needs, **more.needs}, {**found.settings, **more.settings}
                inputs = {**found.inputs, **more.inputs}
            else:
                arguments, needs, settings, inputs = _NO_ARGUMENTS, found.needs, found.settings, found.inputs
            every = self._with_needs(needs, settings)
            own = shown.buffers if isinstance(shown, PickledParts) else ()
            named = shown.data if isinstance(shown, PickledParts) else shown
            data = pickle.dumps((named, arguments.data, settings), protocol=5)
            definitions = {number: known.packed for number in every if (known := self._known.get(number)) is not None}
            if this_process.before_program is not None:
                this_process.before_program(self.imports)
        buffers = (*own, *arguments.buffers)
        return PackedClosure(
            data=data,
            buffers=buffers,
            needs=definitions,
            inputs=tuple(inputs.values()),
            holds=tuple(every.values()),
            modes=self._modes_now(),
        )

    def _modes_now(self) -> Environment:
        """Return the current modes without random states: workers have their own."""
        if self._captured is not None and is_current(self._captured, random=False):
            return self._modes
        found = capture_environment(self._captured, "call")
        if found is not self._captured:
            self._captured = found
            modes = Environment({name: value for name, value in found.modes.items() if name not in RANDOM})
            self._modes = self._modes if modes == self._modes else modes
        return self._modes

    def knows(self, number: int) -> bool:
        """Return whether a resource still exists."""
        return number in self._known

    def merge(self, contributions: Mapping[int, Any]) -> None:
        """Add a closure's counts to the metrics."""
        for number, contribution in contributions.items():
            metric = self._metrics.get(number)
            library = library_of(metric)
            if library is not None:
                library.merge(metric, contribution)

    def forget(self, obj: Any) -> None:
        """Drop the definition of an object that has changed, so that workers receive it again. No running closure uses
        it.
        """
        with self._lock:
            found = self._objects.get(id(obj))
            if found is not None:
                self._forget(id(obj), found[1])

    def _function(self, function: Callable[..., Any]) -> tuple[int | PickledParts, Reached]:
        """Pack a function. A function that was seen before becomes a resource; return its number."""
        code = getattr(function, "__code__", None)
        plan = self._plans.get(id(code))
        if plan is not None and plan.number in self._known and type(function) is types.FunctionType:
            reached = plan.reached(function, self.reference)
            if reached is not None and plan.number in self._known:
                reached.needs = {plan.number: None, **reached.needs}
                return plan.number, reached
        packed, pickler = dump(function, "The function", self)
        found = pickler.reached
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
            self._known[number] = _Known(packed, dict.fromkeys(found.needs), {})
        if type(function) is types.FunctionType and ClosurePlan.is_for(function, pickler):
            self._plans.pop(id(code), None)
            self._plans[id(code)] = ClosurePlan(number, function, pickler)
            if len(self._plans) > _FUNCTIONS:
                del self._plans[next(iter(self._plans))]
        found.needs = {number: None, **found.needs}
        return number, found

    def _with_needs(self, numbers: Mapping[int, Any], settings: dict[int, Any]) -> dict[int, Any]:
        """Return resources with everything that they need. Add the settings of those to `settings`."""
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

    # References -------------------------------------------------------------------------------------------------------

    def reference(self, obj: Any, reached: Reached) -> tuple[Any, ...] | None:
        """Return the reduction of a resource or of a variable on the servers, or None for other objects."""
        if isinstance(obj, torch.Tensor):
            stored = self.access.represented.stored_of(obj)
            if stored is None:
                return None
            if isinstance(obj, ServerVariable):
                more = (obj._settings, obj.distribute_strategy, type(obj) is not ServerVariable, obj.sparse_gradients)
                return open_representative, (stored, *more)
            if torch_internals.has_gradient_hook(obj):
                raise _refusal_of_hooks(stored.name or "A tensor")
            return open_copy, (stored, isinstance(obj, torch.nn.Parameter), obj.requires_grad)
        if isinstance(obj, torch.nn.Module):
            return self._module(obj, reached)
        if isinstance(obj, RemoteValue):
            reached.inputs[obj.number] = obj
            return open_input, (obj.number,)
        if isinstance(obj, PerWorkerValues):
            return self._resource(obj, reached, lambda: obj.maker)
        if remote_optimizer.is_remote(obj):
            options = [{key: value for key, value in group.items() if key != "params"} for group in obj.param_groups]
            describe = functools.partial(remote_optimizer.described, obj)
            return self._resource(obj, reached, describe, options, Composition((obj,)))
        if isinstance(obj, torch.optim.Optimizer):
            raise CannotTravelError(outside_scope(f"an optimizer ({type(obj).__name__})", "step"))
        if library_of(obj) is not None:
            return self._metric(obj, reached)
        described = next((found for library in libraries() if (found := library.described(obj)) is not None), None)
        return None if described is None else self._resource(obj, reached, *described)

    def _metric(self, metric: Any, reached: Reached) -> tuple[Any, ...]:
        library = library_of(metric)
        assert library is not None
        library.check(metric)
        found = self._resource(metric, reached, functools.partial(_identity, metric))
        self._metrics[found[1][0]] = metric
        return found

    def _module(self, module: torch.nn.Module, reached: Reached) -> tuple[Any, ...] | None:
        if library_of(module) is not None:
            return self._metric(module, reached)
        for root in reversed(self._roots()):
            place = next((place for place, part in enumerate(parts_of(root)) if part is module), None)
            if place is not None:
                modules = list(root.modules())
                modes = [each.training for each in modules]
                parameters = list(parameters_of_each(modules))
                frozen = [number for number, each in enumerate(parameters) if not each.requires_grad]
                if any(map(torch_internals.has_gradient_hook, parameters)):
                    raise _refusal_of_hooks(
                        next(name for name, each in root.named_parameters() if torch_internals.has_gradient_hook(each))
                    )
                buffers = (each for module in modules for each in module._buffers.values())
                composition = Composition(list(dict.fromkeys(parts_of(root))), (*parameters, *buffers))
                describe = functools.partial(self._complete, root)
                opened = self._resource(root, reached, describe, (modes, frozen), composition)
                return (open_module, (*opened[1], place)) if place else opened
        if any(each.requires_grad for each in module.parameters()):
            raise CannotTravelError(outside_scope(f"a {type(module).__name__}", "train"))
        return None

    def _complete(self, root: torch.nn.Module) -> torch.nn.Module:
        """Return a model that is to be described, with all of its tensors on the servers."""
        self._register(root)
        return root

    def _resource(
        self,
        obj: Any,
        reached: Reached,
        describe: Callable[[], Any],
        settings: Any = None,
        composition: Composition | None = None,
    ) -> tuple[Any, tuple[int]]:
        """Return a reference to a resource. Its first reference also describes it.

        Args:
            composition: What it consists of. If that has changed, it becomes another resource.
        """
        found = self._objects.get(id(obj))
        number = found[1] if found is not None and found[0]() is obj else 0
        if number and composition is not None and self._has_changed(obj, number, describe, composition):
            functions = set(self._functions.values())
            others = (known for each, known in self._known.items() if each not in functions)
            if not any(number in known.needs for known in others):  # such as a per-worker value
                self._drop(number)
            number = 0
        if not number:
            number = self._describe(obj, describe)
            if composition is not None:
                self._compositions[number] = composition.record()
        # A layer may be replaced while closures wait that use its tensors.
        reached.needs[number] = obj if composition is None else (obj, composition.tensors)
        if settings is not None:
            reached.settings[number] = settings
        return open_resource, (number,)

    def _describe(self, obj: Any, describe: Callable[[], Any]) -> int:
        """Describe a new resource, and return its number."""
        number, identity = next(_numbers), id(obj)
        self._objects[identity] = (weakref.ref(obj, lambda _: self._forget(identity, number)), number)
        self._known[number] = _Known(PickledParts(b""), {}, {})  # the description may refer to the resource itself
        self._compared.add(number)
        packed, pickler = dump(describe(), f"A {type(obj).__name__}", self, root=obj)
        within = pickler.reached
        if within.inputs:
            raise CannotTravelError(
                f"A {type(obj).__name__} refers to a RemoteValue. Use the value: coordinator.fetch(...)."
            )
        within.needs.pop(number, None)
        # Hold no reference to the resources that it needs: an optimizer needs its parameters, but not their model.
        self._known[number] = _Known(packed, dict.fromkeys(within.needs), within.settings)
        return number

    def _has_changed(self, obj: Any, number: int, describe: Callable[[], Any], composition: Composition) -> bool:
        """Return whether the description of a resource is not that of its present state."""
        if number in self._compared:
            return False
        self._compared.add(number)
        record = self._compositions[number]
        if record.matches(composition, thorough=self._at_rest):
            return False
        packed, _ = dump(describe(), f"A {type(obj).__name__}", self, root=obj)
        self._compositions[number] = composition.record()
        return packed != self._known[number].packed

    def _forget(self, identity: int, number: int) -> None:
        found = self._objects.get(identity)
        if found is not None and found[1] == number:
            del self._objects[identity]
        self._drop(number)

    def _drop(self, number: int) -> None:
        """Drop a resource that no longer exists, and the functions that need it: nobody can schedule them again."""
        self._compositions.pop(number, None)
        if self._known.pop(number, None) is None:
            return
        self.forgotten += 1
        for digest, function in tuple(self._functions.items()):
            known = self._known.get(function)
            if known is not None and number in known.needs:
                self._functions.pop(digest, None)
                self._drop(function)


def _identity(obj: Any) -> Any:
    return obj


def _refusal_of_hooks(name: str) -> CannotTravelError:
    return CannotTravelError(
        f"{name} has a hook on its gradient (register_hook), which workers' copies would lack. Register the hook in "
        "the scheduled function, before its backward pass, and remove it at the end; or change the gradient there."
    )


_NO_ARGUMENTS = PickledParts(pickle.dumps(((), {}), protocol=5))
