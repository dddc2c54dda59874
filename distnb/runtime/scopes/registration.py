"""The variables of one strategy on a replica: what its scopes made is made equal, and kept in sync from then on."""

from __future__ import annotations

import importlib
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from distnb.collectives.gradients.optimizer_steps import note_versions
from distnb.collectives.gradients.parameter_groups import Identity, find_mirror
from distnb.errors import ContextError
from distnb.options import CommunicationOptions, VariableAggregation
from distnb.runtime import contexts
from distnb.runtime.reduction.equal_values import make_equal
from distnb.runtime.scopes import foreign_libraries, metric_binding, running_statistics
from distnb.runtime.scopes.first_call import equalise_at_first_call
from distnb.runtime.scopes.made_objects import MadeObjects, own_parameters
from distnb.variables.variable import SyncOnReadVariable, Variable, component_of, settings_of

if TYPE_CHECKING:
    from distnb.collectives.gradients.gradient_sync import GradientSync
    from distnb.collectives.group.interface import Group
    from distnb.runtime.central.shared_variables import SharedVariables

__all__ = [
    "ParameterKey",
    "Registration",
    "adopters_of",
    "is_scope_buffer",
    "parameters_of",
    "roots_of",
    "same_everywhere",
]

_LARGE_NBYTES = 4096
# What sees to the models of other libraries that a scope makes; it is not loaded before they are.
_ADOPTERS = {("keras", "Model"): "distnb.keras.models"}
_OF_KERAS = "_torch_params"
_FUNCTIONAL = re.compile(r"\b_functional\.")
_buffers = WeakIdKeyDictionary()


def is_scope_buffer(value: object) -> bool:
    """Return whether a tensor is a buffer of a model that a scope of some strategy made: each replica has its own."""
    return value in _buffers


class ParameterKey(NamedTuple):
    """The name of a parameter on all replicas: its group, the group's description in errors, and the place in it."""

    identity: Identity
    place: int
    label: str


def parameters_of(value: Any) -> list[Any]:
    """Return a parameter itself; those of a module or an optimizer, and those of another library's model."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        own = [parameter for _, parameter in own_parameters(value)]
        return [*own, *(each for adopter in adopters_of(value) for each in adopter.optimizer_tensors(value))]
    if isinstance(value, torch.optim.Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return []


def adopters_of(module: torch.nn.Module) -> list[Any]:
    """Return our modules that adopt a module as a model of another library."""
    models = ((getattr(sys.modules.get(library), name, None), where) for (library, name), where in _ADOPTERS.items())
    return [
        importlib.import_module(where) for model, where in models if model is not None and isinstance(module, model)
    ]


class _GroupKey:
    """Names the parameters of one model, and how errors call it, to GradientSync without keeping the model alive."""

    def __init__(self, label: str, model: torch.nn.Module | None = None) -> None:
        self.label = label
        self.has_statistics = False
        self.model = None if model is None else weakref.ref(model)


class Registration:
    """The variables of one strategy on this replica, and where they are the same memory on all, what sees to that."""

    def __init__(
        self, strategy: Any, sync: GradientSync, group: Callable[[], Group], shared: SharedVariables | None = None
    ) -> None:
        self.strategy = strategy
        self.shared = shared
        self._sync = sync
        self._group = group
        self._keys: weakref.WeakKeyDictionary[torch.nn.Module, _GroupKey] = weakref.WeakKeyDictionary()
        self._made_variables = 0
        self._adopted: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._made = MadeObjects(strategy, self._adopt, self._grow)
        self._unfinished = False

    @property
    def group(self) -> Group:
        """The replicas."""
        return self._group()

    def owns(self, made: torch.Tensor | torch.nn.Module) -> bool:
        """Return whether a scope of this strategy made a parameter, or a model of a library that makes them later."""
        if isinstance(made, torch.nn.Module):
            return made in self._adopted
        parameter = made
        if isinstance(parameter, SyncOnReadVariable):
            return parameter.distribute_strategy is self.strategy
        mirror = find_mirror(parameter)
        return mirror is not None and mirror.sync() is self._sync

    def buffers(self) -> dict[Any, tuple[str, list[torch.Tensor]]]:
        """Return the buffers of each model, by the key of its parameters on all replicas, with the model's name."""
        return {
            self._sync.identity_of(key) or (key.label, number): (
                key.label,
                [each for each in root.buffers() if not is_lazy(each) and each.layout is torch.strided],
            )
            for number, (root, key) in enumerate(list(self._keys.items()))
        }

    def average_statistics(self, keys: Iterable[Any]) -> None:
        """Average the running statistics of models: a backward pass has reached these parameters on every replica."""
        models = [key.model() for key in keys if key.has_statistics]
        running_statistics.average(self.group, [model for model in models if model is not None])

    def take_variable(self, variable: Variable) -> None:
        """Keep a new variable in sync: it was made in a scope or in a replica, and gets replica 0's value on all."""
        # Replica 0 counts: a replica that was replaced knows less.
        number = torch.tensor(self._made_variables + 1)
        if self.group.size > 1:
            told = settings_of(variable).summary
            make_equal(self.group, [("number", number), (told, component_of(variable))], self._told)
        variable.number = self._made_variables = int(number)
        self._register(variable, _GroupKey(f"Variable {variable.name}" if variable.name else "Variable"))

    # What scopes make -----------------------------------------------------------------------------------------------

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what this thread makes within, for `take_made`."""
        if "torchmetrics" in sys.modules:
            metric_binding.install()
        self._unfinished = False
        with self._made.noting():
            yield

    @property
    def pending(self) -> bool:
        """True if there is anything for `take_made`."""
        return self._made.pending

    def take_made(self) -> bool:
        """Register what scopes have made, and models got that were made in one, since the last call.

        All replicas call this at the same point of their programs. Return whether any variable was new: the same on
        all of them.
        """
        if not self._made.pending:
            return False
        if "torchmetrics" in sys.modules and not metric_binding.is_installed():
            metric_binding.bind_all()
        self._unfinished = True
        alive = self._made.take(self._is_new)
        roots = roots_of([each for each in alive if isinstance(each, torch.nn.Module)])
        # Keras's models hold the parameters of layers that are no modules of theirs to torch.
        roots.sort(key=lambda root: -sum(1 for _ in own_parameters(root)) if hasattr(root, _OF_KERAS) else 0)
        within = {id(parameter) for root in roots for _, parameter in own_parameters(root)}
        loose = [each for each in alive if isinstance(each, torch.nn.Parameter) and id(each) not in within]
        is_any_new = self._take(roots, loose)
        self._unfinished = False
        return is_any_new

    def give_up_made(self) -> bool:
        """Forget what scopes have made and `take_made` did not register. Return whether there was anything."""
        unfinished = self._unfinished or self._made.pending
        self._made.forget()
        self._unfinished = False
        return unfinished

    def _is_new(self, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, torch.nn.Parameter):
            return tensor not in _buffers
        return find_mirror(tensor) is None and not tensor.is_meta and not isinstance(tensor, SyncOnReadVariable)

    def _grow(self, module: torch.nn.Module, name: str, value: Any, in_replica: bool) -> None:
        """Register what a model gets that a scope made: in `run` at once, since it is used in this forward pass."""
        if isinstance(value, torch.nn.Module):
            self._made.own(value.modules())
            found: Iterable[tuple[str, torch.nn.Parameter]] = own_parameters(value)
        else:
            found = [("", value)]
        if not any(self._is_new(parameter) for _, parameter in found):
            return
        if not in_replica:
            self._made.note(module)
            return
        key = self._key_of(module)
        if isinstance(value, torch.nn.Module):
            self._make_equal(*self._enter_module(value, key, f"{name}."), what=f"{key.label}.build")
        elif self._register(value, key):
            self._make_equal([(key.label, value)], [], what=f"{key.label}.build")

    def _adopt(self, module: torch.nn.Module) -> None:
        for adopter in adopters_of(module):
            adopter.adopt(self.strategy, module)
            self._adopted.add(module)

    def take(self, model: torch.nn.Module, beside: Iterable[torch.nn.Parameter]) -> None:
        """Register the parameters that a model of a scope has got since. All replicas do so."""
        self.take_made()
        self._take([model], beside)

    def take_equal(self, roots: Iterable[torch.nn.Module], loose: Iterable[torch.nn.Parameter]) -> None:
        """Register what modules hold, and parameters of no module, whose values others see to. All replicas do so."""
        self._enter(roots, loose)
        note_versions(self._sync.groups)

    def place_of(self, made: torch.Tensor) -> ParameterKey | None:
        """Return the key of a parameter that is kept in sync, for a replica that gets a copy."""
        mirror = find_mirror(made)
        if mirror is None or mirror.sync() is not self._sync:
            return None
        group, key = mirror.group, mirror.group.key()
        return ParameterKey(group.identity, mirror.place, key.label if key is not None else "parameters")

    def take_restored(self, values: Sequence[tuple[Any, Sequence[ParameterKey | None]]]) -> None:
        """Register modules, optimizers and parameters that were copied from another replica, as they are there.

        Args:
            values: Each with what `place_of` said there of its `parameters_of`.
        """
        roots = roots_of([value for value, _ in values if isinstance(value, torch.nn.Module)])
        for root in roots:
            self._made.own([*root.modules(), *(part for adopter in adopters_of(root) for part in adopter.parts(root))])
        names = {id(parameter): f".{name}" for root in roots for name, parameter in _named(root)}
        keys: dict[Identity, _GroupKey] = {}
        # Keras's pickles copy a layer with each model that holds it. The last copy of a parameter is kept in sync: that
        # of the larger model.
        for value, places in sorted(values, key=lambda each: len(each[1])):
            for parameter, place in zip(parameters_of(value), places, strict=True):
                if isinstance(parameter, Variable):
                    self._made_variables = max(self._made_variables, parameter.number)
                    if isinstance(parameter, SyncOnReadVariable) and parameter.aggregation is VariableAggregation.SUM:
                        component_of(parameter).zero_()  # a copy of another replica's component would be added twice
                if place is not None:
                    key = keys.setdefault(place.identity, _GroupKey(place.label))
                    self._register(parameter, key, names.get(id(parameter), ""), place)
            if isinstance(value, torch.nn.Module):
                self._adopt(value)
            else:
                foreign_libraries.restore_shared(value, self.strategy)
        for root in roots:
            mirrors = [mirror for _, each in own_parameters(root) if (mirror := find_mirror(each)) is not None]
            key = (mirrors and mirrors[0].group.key()) or _GroupKey(type(root).__name__)
            key.model, key.has_statistics = weakref.ref(root), running_statistics.has_statistics(root)
            self._keys[root] = key
            _buffers.update((each, True) for each in root.buffers())

    def _take(self, roots: Iterable[torch.nn.Module], loose: Iterable[torch.nn.Parameter]) -> bool:
        """Register what modules hold, that of each to be reduced together, and parameters of no module.

        All replicas do so in the same order, and take over the values of replica 0. Return whether anything was new.
        """
        return self._make_equal(*self._enter(roots, loose))

    def _make_equal(
        self,
        new: Sequence[tuple[str, torch.Tensor]],
        unvalued: Sequence[torch.nn.Module],
        what: str = "strategy.scope",
    ) -> bool:
        if self.group.size == 1:
            return bool(new)
        for part in unvalued:
            equalise_at_first_call(part, self._equalise)
        ready = [(name, tensor) for name, tensor in new if not is_lazy(tensor)]
        if ready:
            self.group.note(what, ())
        self._equalise(ready)
        return bool(new)

    def _equalise(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        make_equal(self.group, named, self._told)
        note_versions(self._sync.groups)

    def _enter(
        self, roots: Iterable[torch.nn.Module], loose: Iterable[torch.nn.Parameter]
    ) -> tuple[list[tuple[str, torch.Tensor]], list[torch.nn.Module]]:
        """Register parameters and buffers.

        Return those that are new, by name, and the modules in which some have no values yet.
        """
        new: list[tuple[str, torch.Tensor]] = []
        unvalued: list[torch.nn.Module] = []
        for root in roots:
            self._made.own(root.modules())
            if any(True for _ in own_parameters(root)) or any(True for _ in root.buffers()):
                its, parts = self._enter_module(root, self._key_of(root))
                new += its
                unvalued += [part for part in parts if any(map(is_lazy, _parameters_in(part)))]
        key = _GroupKey("parameters")
        new += [("Parameter", parameter) for parameter in loose if self._register(parameter, key)]
        return new, unvalued

    def _enter_module(
        self, module: torch.nn.Module, key: _GroupKey, prefix: str = ""
    ) -> tuple[list[tuple[str, torch.Tensor]], list[torch.nn.Module]]:
        """Register what a module holds, to be reduced with the other parameters of a key.

        Args:
            module: The module.
            key: Names the parameters.
            prefix: Of the names of parameters and buffers: the path from the model that the key names to the module.

        Returns:
            What is new, by name, and the modules in it that have new parameters.
        """
        key.has_statistics |= running_statistics.has_statistics(module)
        new: list[tuple[str, torch.Tensor]] = []
        for name, each in _named(module, prefix):
            if self._register(each, key, f".{name}"):
                new.append((f"{key.label}.{name}", each))
        fresh = {id(each) for _, each in new}
        buffers = [
            (f"{key.label}.{prefix}{name}", each) for name, each in module.named_buffers() if each not in _buffers
        ]
        _buffers.update((each, True) for _, each in buffers)
        parts = [part for part in module.modules() if not fresh.isdisjoint(map(id, _parameters_in(part)))]
        return new + buffers, parts

    def _key_of(self, root: torch.nn.Module) -> _GroupKey:
        return self._keys.setdefault(root, _GroupKey(type(root).__name__, root))

    @property
    def _told(self) -> str:
        """The strategy's options that must be the same on every replica: all but the replicas' own tasks."""
        options = self.strategy.spec.options
        plain = [(name, value) for name, value in options if isinstance(value, (str, bool, CommunicationOptions))]
        return f"{self.strategy.spec.kind}({', '.join(f'{name}={value!r}' for name, value in plain)})"

    def _register(
        self, parameter: torch.nn.Parameter, key: _GroupKey, name: str = "", at: ParameterKey | None = None
    ) -> bool:
        """Return whether a parameter is new, and keep it in sync from now on."""
        if parameter.is_meta:
            return False  # another takes its place when there is data
        if isinstance(parameter, Variable):
            if parameter.distribute_strategy is not self.strategy:
                raise contexts.mixing(self.strategy, parameter.distribute_strategy)
            if isinstance(parameter, SyncOnReadVariable):
                return False  # its components differ
        mirror = find_mirror(parameter)
        if mirror is not None:
            if mirror.sync() is self._sync:
                return False
            raise ContextError(
                "Mixing different Strategy objects: a parameter that another strategy made was registered in the "
                f"scope of {self.strategy!r}. Make the model in the scope of the strategy that trains it."
            )
        self._sync.register(parameter, key, None if at is None else (at.identity, at.place))
        # What is small, and never trained, is not worth sharing.
        worth_it = parameter.requires_grad or is_lazy(parameter) or parameter.nbytes >= _LARGE_NBYTES
        if self.shared is not None and worth_it:
            self.shared.expect(key.label + name, parameter)
        return True


def same_everywhere(given: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return a model's parameters or buffers, in an order and by names that are the same on all replicas.

    Keras's names are paths, `sequential_1/dense_2/bias`, with counts of the layers that a process has made; a copy's
    lack their beginning. What is left is the same on a replica that was replaced, or made models alone. torch keeps
    them sorted by name, where `dense_10` is before `dense_9`.
    """
    split = [(*name.partition(f"{_OF_KERAS}."), value) for name, value in given]
    if not any(of_keras for _, of_keras, _, _ in split):
        return [(before, value) for before, _, _, value in split]
    # A Sequential's parameters are its functional model's, too, once somebody has asked that for them.
    one_each = {
        (_FUNCTIONAL.sub("", before), path, id(value)): (of_keras, value) for before, of_keras, path, value in split
    }
    ordered = sorted(one_each.items(), key=lambda each: _counts_in(each[0][1]))
    return [
        (
            f"{before}{re.sub(r'_[0-9]+(?=/)', '', '/'.join(path.split('/')[-2:]))} {number}" if of_keras else before,
            value,
        )
        for number, ((before, path, _), (of_keras, value)) in enumerate(ordered)
    ]


def _counts_in(path: str) -> list[tuple[str, int]]:
    """Return a key that sorts paths by the numbers in them."""
    return [(text, int(number or -1)) for text, number in re.findall(r"([^0-9]*)([0-9]*)", path)]


def _named(module: torch.nn.Module, prefix: str = "") -> list[tuple[str, torch.nn.Parameter]]:
    return same_everywhere((prefix + name, parameter) for name, parameter in own_parameters(module))


def _parameters_in(part: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that a module itself has."""
    return [parameter for _, parameter in torch.nn.Module.named_parameters(part, recurse=False)]


def roots_of(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules that are in none of the others."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]
