"""The execution of closures on a worker, with the worker's own objects in the place of references."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch

from distnb.errors import EndOfDataset, StaleHandleError
from distnb.servers.closure_messages import ClosureResult, RunClosure
from distnb.servers.coordinator import references
from distnb.servers.coordinator.libraries import Library, libraries, library_of
from distnb.servers.coordinator.pickling import PickledParts, dump, open_packed, open_value
from distnb.servers.coordinator.references import Reach, parameters_of_each
from distnb.servers.variables import remote_optimizer
from distnb.servers.variables.access import ServerAccess
from distnb.servers.variables.requests import ClosureRun
from distnb.values.structure import map_structure

__all__ = ["Runner"]

_FUNCTIONS = 1024  # the most functions that are remembered
_PLAIN = frozenset({type(None), bool, int, float, str})


class Runner:
    """The runner of a worker's closures.

    Args:
        access: The variables on the servers.
        worker: The worker's index.
    """

    def __init__(self, access: ServerAccess, worker: int) -> None:
        self.access = access
        self.worker = worker
        self.reach = Reach(set(), set())
        self._new_models: list[torch.nn.Module] = []
        on_cpu = access.device.type == "cpu"  # there torch's device mode for new tensors would only cost time
        self._placed: AbstractContextManager[Any] = contextlib.nullcontext() if on_cpu else access.device
        self._packed: dict[int, PickledParts] = {}
        self._resources: dict[int, Any] = {}
        self._reaches: dict[int, Reach] = {}
        self._metrics: dict[int, tuple[Library, Any]] = {}  # the resources that are metrics
        self._inputs: dict[int, Any] = {}
        self._run_before: set[Any] = set()  # the code objects of functions, with their variables

    def receive(self, message: RunClosure) -> None:
        """Store the definitions that are sent only once, and drop what is gone, even if the closure is not to run."""
        for number in message.forget:
            for each in (self._packed, self._resources, self._reaches, self._metrics):
                each.pop(number, None)
        self._packed.update(message.definitions)
        self.access.forget(message.freed)

    def run(self, message: RunClosure, fresh: Collection[int] = ()) -> ClosureResult:
        """Run a received closure, and raise whatever it raises. Copies of variables in `fresh` are not read again."""
        references.open_by(self)
        self._inputs = dict(message.inputs)
        self.reach = Reach(set(), set())
        shown, arguments, settings = pickle.loads(message.data)
        buffers = iter(message.buffers)  # each pickle consumes its own from the common iterator
        function = self.resource(shown) if isinstance(shown, int) else pickle.loads(shown, buffers=buffers)
        args, kwargs = pickle.loads(arguments, buffers=buffers)
        for number, its in settings.items():
            _set(self.resource(number), its)
        for library in libraries():
            library.load()
        self._keep_in_sync()
        metrics = {}
        if self._metrics:
            metrics = {each: self._metrics[each] for each in self.reach.resources if each in self._metrics}
            for kind, metric in metrics.values():
                kind.reset(metric)
        is_new = self._is_new(function, frozenset(self.reach.variables))
        closure = ClosureRun(number=message.closure, fence=message.fence, is_new=is_new)
        try:
            self.access.begin_closure(closure, self.reach.variables, fresh)
            try:
                with self._placed:
                    value = function(*args, **kwargs)
            except StopIteration as end:
                raise EndOfDataset(
                    "A closure raised StopIteration: it called next() on an iterator at its end. Make the workers' "
                    "datasets endless (let the dataset function repeat its data: `while True: yield from …`), or catch "
                    "StopIteration."
                ) from end
            for number, its in settings.items():
                _check(self.resource(number), its)
            if self.access.replicas is not None:
                value = self.access.replicas.whole(value)
            self.access.complete_closure()
        finally:
            self.access.end_closure(closure)
        contributions = {}
        for each, (kind, obj) in metrics.items():
            if (found := map_structure(_on_host, kind.contribution(obj))) is not None:
                contributions[each] = found
        packed = value if type(value) in _PLAIN else dump(value, "The result of a closure")[0]
        return ClosureResult(packed, contributions or None, tuple(closure.staleness))

    def _is_new(self, function: Any, variables: frozenset[int]) -> bool:
        """Return whether a function of this code runs here with these variables for the first time."""
        identity = getattr(function, "__code__", type(function)), variables
        if identity in self._run_before:
            return False
        if len(self._run_before) == _FUNCTIONS:
            self._run_before.clear()
        self._run_before.add(identity)
        return True

    def _keep_in_sync(self) -> None:
        """Keep the objects that this closure is the first to use in sync, if the worker has several replicas."""
        models, made = self._new_models, self.access.copies.made
        self._new_models, self.access.copies.made = [], []
        if self.access.replicas is not None:
            self.access.replicas.keep_in_sync(models, made)

    def resource(self, number: int) -> Any:
        """Return this worker's own object for a resource, created at its first use.

        Raises:
            StaleHandleError: The coordinator no longer has the resource, so it could not send its definition.
        """
        if number not in self._resources:
            if number not in self._packed:
                raise StaleHandleError(
                    "A scheduled function or per-worker value refers to an object that the coordinator no longer has. "
                    "Make the function or the value again."
                )
            before, self.reach = self.reach, Reach(set(), set())
            try:
                found = open_packed(self._packed[number])
                make = getattr(found, "make_for_worker", None)
                if make is not None:
                    found = make(self.worker)
                elif isinstance(found, remote_optimizer.OpenOptimizer):
                    found = remote_optimizer.opened(found)
                elif (library := library_of(found)) is not None:
                    library.opened(found, self.access.device)
                    if self.access.replicas is not None and isinstance(found, torch.nn.Module):
                        self.access.replicas.bind(found)
                elif isinstance(found, torch.nn.Module):
                    self._new_models.append(found)
                    self.access.copies.model_tensors.add(found)
                if (library := library_of(found)) is not None:
                    self._metrics[number] = library, found
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
        """Return another closure's result."""
        return open_value(self._inputs[number])


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _set(resource: Any, settings: Any) -> None:
    """Apply the coordinator's settings: a model's training modes and frozen parameters, or an optimizer's options."""
    if any(library.set(resource, settings) for library in libraries()):
        return
    if isinstance(resource, torch.nn.Module):
        (modes, frozen), modules = settings, list(resource.modules())
        for module, training in zip(modules, modes, strict=True):
            if module.training is not training:  # setting an attribute of a module costs some microseconds
                module.training = training
        for place, parameter in enumerate(parameters_of_each(modules)):
            if parameter.requires_grad is (place in frozen):
                parameter.requires_grad_(not parameter.requires_grad)
    else:
        for group, options in zip(resource.param_groups, settings, strict=True):
            copies = {name: each.clone() for name, each in options.items() if isinstance(each, torch.Tensor)}
            group.update(options | copies)


def _check(resource: Any, settings: Any) -> None:
    """Raise ProgramError if the function has changed an optimizer's options, which the next function would not see."""
    if remote_optimizer.is_remote(resource):
        remote_optimizer.check_options(resource, settings)
    for library in libraries():
        library.check_settings(resource, settings)
