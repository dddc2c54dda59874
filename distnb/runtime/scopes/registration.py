"""The registration of one strategy's variables on a replica.

Registered parameters and buffers get replica 0's values on all replicas. Parameters are kept in sync from then on.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from distnb import features
from distnb.collectives.gradients.optimizer_steps import note_versions, optimized
from distnb.collectives.gradients.parameter_groups import Identity, find_mirror
from distnb.compat import torch_internals
from distnb.errors import ContextError, OptionError
from distnb.options import CommunicationOptions
from distnb.runtime import contexts
from distnb.runtime.reduction.equal_values import make_equal
from distnb.runtime.scopes import first_call, foreign_libraries, metric_binding
from distnb.runtime.scopes.made_objects import MadeObjects, own_parameters
from distnb.runtime.scopes.running_statistics import RunningStatistics, has_statistics
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
    "registered_in",
    "roots_of",
    "same_everywhere",
]

_LARGE_NBYTES = 4096
_OF_KERAS = "_torch_params"
_buffers = WeakIdKeyDictionary()


def is_scope_buffer(value: object) -> bool:
    """Return whether a tensor is a buffer of a model made in any strategy's scope. Each replica has its own values."""
    return value in _buffers


class ParameterKey(NamedTuple):
    """The identity of a parameter or a model, the same on all replicas.

    Attributes:
        identity: The identity of the parameter's group, or of the model.
        place: The parameter's place in the group; 0 for a model.
        label: The description of the group in errors.
    """

    identity: Identity
    place: int
    label: str


def parameters_of(value: Any) -> list[Any]:
    """Return the parameters of a module, an optimizer or another library's model, or a list with a tensor itself."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        own = [parameter for _, parameter in _named(value)]
        return [*own, *(each for adopter in adopters_of(value) for each in adopter.optimizer_tensors(value))]
    if isinstance(value, torch.optim.Optimizer):
        return optimized(value)
    return []


def registered_in(value: Any) -> list[Any]:
    """Return what a registration may have registered of an object: a module itself, and its `parameters_of`."""
    return [value, *parameters_of(value)] if isinstance(value, torch.nn.Module) else parameters_of(value)


def adopters_of(module: torch.nn.Module) -> list[Any]:
    """Return the modules of features that adopt a torch module as a model of another library.

    They are at the extension point "adopters of models", under the name of the models' class, such as "keras.Model".
    """
    kinds = _kinds("adopters of models")
    return [features.find("adopters of models", name) for kind, name in kinds if isinstance(module, kind)]


def _kinds(point: str) -> Iterator[tuple[type, str]]:
    """Yield the classes of imported libraries for which features add to an extension point, with their names there."""
    for name in features.names(point):
        library, _, kind = name.partition(".")
        found = getattr(sys.modules.get(library), kind, None)  # while the library is being imported, it has none
        if found is not None:
            yield found, name


class _GroupKey:
    """The key of one model's parameters in GradientSync, with the model's name in errors."""

    def __init__(self, label: str) -> None:
        self.label = label


class Registration:
    """The registration of one strategy's variables on this replica.

    Args:
        strategy: The strategy.
        sync: The synchronisation of the gradients of registered parameters.
        group: Returns the current process group.
        shared: Puts the parameters into memory that all replicas share, if the strategy uses such memory.
        place: Returns the data of a new parameter, given the data that the program has for it.
        before_call: Called before a module is called in a scope that has made objects.

    Attributes:
        statistics: The running statistics of the models.
    """

    def __init__(
        self,
        strategy: Any,
        sync: GradientSync,
        group: Callable[[], Group],
        shared: SharedVariables | None = None,
        place: Callable[[Any], Any] = lambda data: data,
        before_call: Callable[[], None] = lambda: None,
    ) -> None:
        self.strategy = strategy
        self.shared = shared
        self.statistics = sync.statistics = RunningStatistics(group)
        self._sync = sync
        self._group = group
        self._keys: weakref.WeakKeyDictionary[torch.nn.Module, _GroupKey] = weakref.WeakKeyDictionary()
        self._made_variables = 0
        self._adopted: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._made = MadeObjects(strategy, self._adopt, self._grow, place, before_call)
        self._unfinished = False

    @property
    def group(self) -> Group:
        """The current process group of the replicas."""
        return self._group()

    def owns(self, made: torch.Tensor | torch.nn.Module) -> bool:
        """Return whether a parameter or a model belongs to this strategy.

        This includes models of libraries, such as Keras, that make parameters later.
        """
        if isinstance(made, torch.nn.Module):
            return made in self._adopted or made in self._keys
        parameter = made
        if isinstance(parameter, SyncOnReadVariable):
            return parameter.distribute_strategy is self.strategy
        mirror = find_mirror(parameter)
        return mirror is not None and mirror.sync() is self._sync

    def buffers(self) -> dict[Any, tuple[str, list[torch.Tensor]]]:
        """Return the buffers of each model, by the key of its parameters on all replicas, with the model's name."""
        return {
            self._sync.identify(key): (
                key.label,
                [each for each in root.buffers() if not is_lazy(each) and each.layout is torch.strided],
            )
            for root, key in list(self._keys.items())
        }

    def register_variable(self, variable: Variable) -> None:
        """Register a new variable, made in a scope or in a replica context. All replicas get replica 0's value."""
        # Replica 0's number is used: a replica that was replaced has counted fewer variables.
        number = torch.tensor(self._made_variables + 1)
        if self.group.size > 1:
            summary = settings_of(variable).summary
            make_equal(self.group, [("number", number), (summary, component_of(variable))], self._description)
        variable.number = self._made_variables = int(number)
        self._register(variable, _GroupKey(f"Variable {variable.name}" if variable.name else "Variable"))

    # Objects made in scopes -----------------------------------------------------------------------------------------

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Return a context that notes the objects this thread makes, for `register_made`."""
        if "torchmetrics" in sys.modules:
            metric_binding.install()
        first_call.install()
        self._unfinished = False
        with self._made.noting():
            yield

    @property
    def pending(self) -> bool:
        """True if there are objects for `register_made` to register."""
        return self._made.pending

    def register_made(self) -> bool:
        """Register the objects made in scopes, and added to models that were made in one, since the last call.

        All replicas must call this at the same point of their programs. Return whether any variable was new, which is
        the same on all replicas.
        """
        if not self._made.pending:
            return False
        if "torchmetrics" in sys.modules and not metric_binding.is_installed():
            metric_binding.bind_all()
        self._unfinished = True
        alive = self._made.pop(self._is_new)
        roots = roots_of([each for each in alive if isinstance(each, torch.nn.Module)])
        # A Keras model holds the parameters of layers that torch does not see as its modules. Larger models go first,
        # so that a parameter is registered with the model, not with one of its layers.
        roots.sort(key=lambda root: -sum(1 for _ in own_parameters(root)) if hasattr(root, _OF_KERAS) else 0)
        within = {id(parameter) for root in roots for _, parameter in own_parameters(root)}
        loose = [each for each in alive if isinstance(each, torch.nn.Parameter) and id(each) not in within]
        is_any_new = self._register_all(roots, loose)
        self._unfinished = False
        return is_any_new

    def discard_made(self) -> bool:
        """Discard the objects that `register_made` has not registered. Return whether there were any."""
        unfinished = self._unfinished or self._made.pending
        self._made.forget()
        self._unfinished = False
        return unfinished

    def _is_new(self, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, torch.nn.Parameter):
            return tensor not in _buffers
        return find_mirror(tensor) is None and not tensor.is_meta and not isinstance(tensor, SyncOnReadVariable)

    def _grow(self, module: torch.nn.Module, name: str, value: Any, in_replica: bool) -> None:
        """Register a parameter or module that is added to a registered model.

        In `run` it is registered at once, because the current forward pass uses it. Otherwise the model is noted for
        `register_made`.
        """
        if isinstance(value, torch.nn.Module):
            self._made.own(value.modules())
            if has_statistics(value):
                self._average_statistics(module, self._key_of(module))
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
            self._make_equal(*self._enter_module(value, key, f"{name}.", module), what=f"{key.label}.build")
        elif self._register(value, key):
            self._make_equal([(key.label, value)], [], what=f"{key.label}.build")

    def _adopt(self, module: torch.nn.Module) -> None:
        for adopter in adopters_of(module):
            adopter.adopt(self.strategy, module)
            self._adopted.add(module)

    def register_model(self, model: torch.nn.Module, unowned: Iterable[torch.nn.Parameter]) -> None:
        """Register the parameters that a model of a scope has gained since it was made. All replicas must call this.

        The second argument has further parameters to register, which belong to no module.
        """
        self.register_made()
        self._register_all([model], unowned)

    def register_equal(self, roots: Iterable[torch.nn.Module], loose: Iterable[torch.nn.Parameter]) -> None:
        """Register modules and parameters whose values are already equal. All replicas must call this.

        Args:
            roots: The modules.
            loose: Parameters that belong to no module.
        """
        self._enter(roots, loose)
        note_versions(self._sync.groups)

    def place_of(self, made: torch.Tensor | torch.nn.Module) -> ParameterKey | None:
        """Return the key of a parameter or a model, for a replica that receives a copy. None: it is not registered."""
        if isinstance(made, torch.nn.Module):
            known = self._keys.get(made)
            return None if known is None else ParameterKey(self._sync.identify(known), 0, known.label)
        mirror = find_mirror(made)
        if mirror is None or mirror.sync() is not self._sync:
            return None
        return ParameterKey(mirror.group.identity, mirror.place, mirror.group.label)

    def mirrored(self) -> dict[tuple[Identity, int], torch.nn.Parameter]:
        """Return the parameters that are kept in sync, by keys that are the same on all replicas."""
        groups = self._sync.groups
        return {(group.identity, place): parameter for group in groups for place, parameter in group.living()}

    def register_copies(self, values: Sequence[tuple[Any, Sequence[ParameterKey | None]]]) -> None:
        """Register modules, optimizers and parameters copied from another replica as they are registered there.

        Args:
            values: The copies, each with the results of `place_of` there for what is `registered_in` it.
        """
        roots = roots_of([value for value, _ in values if isinstance(value, torch.nn.Module)])
        for root in roots:
            self._made.own([*root.modules(), *(part for adopter in adopters_of(root) for part in adopter.parts(root))])
        names = {id(parameter): f".{name}" for root in roots for name, parameter in _named(root)}
        keys: dict[Identity, _GroupKey] = {}
        # A Keras pickle has a copy of a layer for each model that contains it. The last registered copy of a parameter
        # is kept in sync, so larger models come last.
        for value, places in sorted(values, key=lambda each: len(each[1])):
            for parameter, place in zip(registered_in(value), places, strict=True):
                key = None if place is None else keys.setdefault(place.identity, _GroupKey(place.label))
                if isinstance(parameter, torch.nn.Module):
                    if key is not None and place is not None:
                        self._sync.identify(key, place.identity)
                        self._keys[parameter] = key
                    continue
                if isinstance(parameter, Variable):
                    self._made_variables = max(self._made_variables, parameter.number)
                if key is not None:
                    self._register(parameter, key, names.get(id(parameter), ""), place)
            if isinstance(value, torch.nn.Module):
                self._adopt(value)
            else:
                foreign_libraries.restore_shared(value, self.strategy)
        for root in roots:
            if root not in self._keys:
                mirrors = [mirror for _, each in own_parameters(root) if (mirror := find_mirror(each)) is not None]
                self._keys[root] = (mirrors and mirrors[0].group.key()) or _GroupKey(type(root).__name__)
            if has_statistics(root):
                self._average_statistics(root, self._keys[root])
            _buffers.update((each, True) for each in root.buffers())

    def _register_all(self, roots: Iterable[torch.nn.Module], loose: Iterable[torch.nn.Parameter]) -> bool:
        """Register modules and loose parameters, and make them equal to replica 0's. Return whether anything was new.

        The gradients of a module's parameters are reduced together. All replicas must register in the same order.
        """
        roots = list(roots)
        if self.group.size > 1:
            _refuse_renormalising(roots)
        with self._made.paused():
            self._prepare(roots)
        return self._make_equal(*self._enter(roots, loose))

    def _prepare(self, roots: Sequence[torch.nn.Module]) -> None:
        """Prepare modules before their parameters are registered, on all replicas."""

    def _make_equal(
        self,
        new: Sequence[tuple[str, torch.Tensor]],
        unvalued: Sequence[torch.nn.Module],
        what: str = "strategy.scope",
    ) -> bool:
        if self.group.size == 1:
            return bool(new)
        for part in unvalued:
            first_call.equalise_at_first_call(part, self._equalise)
        ready = [(name, tensor) for name, tensor in new if not is_lazy(tensor)]
        if ready:
            self.group.note(what, ())
        self._equalise(ready)
        return bool(new)

    def _equalise(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        pending = self.statistics.changed()
        make_equal(self.group, named, self._description)
        self.statistics.note(but=pending)
        note_versions(self._sync.groups)

    def _enter(
        self, roots: Iterable[torch.nn.Module], loose: Iterable[torch.nn.Parameter]
    ) -> tuple[list[tuple[str, torch.Tensor]], list[torch.nn.Module]]:
        """Register the parameters and buffers of modules, and loose parameters.

        Returns:
            The new parameters and buffers by name, and the modules with lazy parameters, which have no values yet.
        """
        new: list[tuple[str, torch.Tensor]] = []
        unvalued: list[torch.nn.Module] = []
        for root in roots:
            self._made.own(root.modules())
            if any(True for _ in own_parameters(root)) or any(True for _ in root.buffers()):
                its, parts = self._enter_module(root, key := self._key_of(root))
                if has_statistics(root):
                    self._average_statistics(root, key)
                new += its
                unvalued += [part for part in parts if any(map(is_lazy, _parameters_in(part)))]
        key = _GroupKey("parameters")
        new += [("Parameter", parameter) for parameter in loose if self._register(parameter, key)]
        return new, unvalued

    def _enter_module(
        self, module: torch.nn.Module, key: _GroupKey, prefix: str = "", owner: torch.nn.Module | None = None
    ) -> tuple[list[tuple[str, torch.Tensor]], list[torch.nn.Module]]:
        """Register a module's parameters, whose gradients are reduced with the key's other parameters, and its buffers.

        Args:
            module: The module.
            key: The key of the model to which the module belongs.
            prefix: The path from this model to the module, with which the names of parameters and buffers begin.
            owner: The module to which this one has just been added, if it was.

        Returns:
            The new parameters and buffers by name, and the modules within `module` that have new parameters.
        """
        new: list[tuple[str, torch.Tensor]] = []
        for name, each in _named(module, prefix, owner):
            if self._register(each, key, f".{name}"):
                new.append((f"{key.label}.{name}", each))
        fresh = {id(each) for _, each in new}
        buffers = [
            (f"{key.label}.{prefix}{name}", each)
            for name, each in module.named_buffers()
            if each not in _buffers and not each.is_meta
        ]
        _buffers.update((each, True) for _, each in buffers)
        parts = [part for part in module.modules() if not fresh.isdisjoint(map(id, _parameters_in(part)))]
        return new + buffers, parts

    def _key_of(self, root: torch.nn.Module) -> _GroupKey:
        key = self._keys.setdefault(root, _GroupKey(torch_internals.original_class(root).__name__))
        self._sync.identify(key)
        return key

    def _average_statistics(self, root: torch.nn.Module, key: _GroupKey) -> None:
        """Average the statistics of a model from now on."""
        identity = self._sync.identify(key)
        self._sync.models.add(identity)
        self.statistics.add(identity, root)

    @property
    def _description(self) -> str:
        """A description of the strategy with the options that must be equal on all replicas, for their comparison.

        Options of other types, such as a replica's own task, are left out.
        """
        options = self.strategy.spec.options
        plain = [(name, value) for name, value in options if isinstance(value, (str, bool, CommunicationOptions))]
        return f"{self.strategy.spec.kind}({', '.join(f'{name}={value!r}' for name, value in plain)})"

    def _register(
        self, parameter: torch.nn.Parameter, key: _GroupKey, name: str = "", at: ParameterKey | None = None
    ) -> bool:
        """Register a parameter unless it is already registered. Return whether it was new.

        Raises:
            ContextError: The parameter belongs to another strategy, or is sparse.
        """
        if parameter.is_meta:
            return False  # it has no data, and a parameter with data will replace it
        if parameter.layout is not torch.strided:
            raise ContextError(
                f"The parameter {(key.label + name)!r}, made in strategy.scope(), has the layout {parameter.layout}: "
                "its copies cannot be kept equal. Make a dense parameter (`parameter.to_dense()`), or keep the sparse "
                "tensor as an attribute of the module that is no parameter."
            )
        if isinstance(parameter, Variable):
            if parameter.distribute_strategy is not self.strategy:
                raise contexts.mixing(self.strategy, parameter.distribute_strategy)
            if isinstance(parameter, SyncOnReadVariable):
                return False  # the replicas' components differ by design
        mirror = find_mirror(parameter)
        if mirror is not None:
            if mirror.sync() is self._sync:
                return False
            raise ContextError(
                "Mixing different Strategy objects: a parameter that another strategy made was registered in the "
                f"scope of {self.strategy!r}. Make the model in the scope of the strategy that trains it."
            )
        self._sync.register(parameter, key, None if at is None else (at.identity, at.place))
        # A small parameter that is never trained is not worth sharing.
        worth_it = parameter.requires_grad or is_lazy(parameter) or parameter.nbytes >= _LARGE_NBYTES
        if self.shared is not None and worth_it:
            registered = find_mirror(parameter)
            assert registered is not None
            self.shared.expect(key.label + name, parameter, registered.group.identity, registered.place)
        return True


def same_everywhere(module: torch.nn.Module, given: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return a module's named parameters or buffers in an order and by names that are the same on all replicas.

    torch's order and names are, except in layers of a library that counts the layers of its process. Its feature has a
    function like this one at the extension point "names of parameters".
    """
    for kind, name in _kinds("names of parameters"):
        if any(isinstance(part, kind) for part in module.modules()):
            given = features.find("names of parameters", name)(module, given)
    return list(given)


def _named(
    module: torch.nn.Module, prefix: str = "", owner: torch.nn.Module | None = None
) -> list[tuple[str, torch.nn.Parameter]]:
    given = ((prefix + name, parameter) for name, parameter in own_parameters(module))
    return same_everywhere(module if owner is None else owner, given)


def _parameters_in(part: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a module's own parameters, without those of its submodules."""
    return [parameter for _, parameter in torch.nn.Module.named_parameters(part, recurse=False)]


def _refuse_renormalising(roots: Iterable[torch.nn.Module]) -> None:
    """Refuse embeddings whose forward pass changes the rows that it reads: each replica reads other rows."""
    for root in roots:
        for name, part in root.named_modules():
            if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.max_norm is not None:
                label = f"{type(root).__name__}.{name}" if name else type(root).__name__
                raise OptionError(
                    f"max_norm={part.max_norm!r} of {label}: its forward pass changes the rows that it reads, which "
                    "differ between replicas. Create it without max_norm and scale the rows that you use: "
                    "distnb.nn.embedding_lookup(table, ids, max_norm=…)."
                )


def roots_of(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules that are not contained in any of the others."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]
