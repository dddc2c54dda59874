"""The variables of one strategy on a replica: what its scopes made is made equal, and kept in sync from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.errors import ContextError
from distnb.options import CommunicationOptions, VariableAggregation
from distnb.runtime import contexts
from distnb.runtime.consistency.equal_values import make_equal
from distnb.runtime.scopes.running_statistics import RunningStatistics
from distnb.runtime.scopes.scope_buffers import ScopeBuffers
from distnb.variables.sync_on_read import SyncOnReadVariable
from distnb.variables.variable import Variable, component_of, settings_of

if TYPE_CHECKING:
    from distnb.collectives.gradients.gradient_sync import GradientSync
    from distnb.collectives.group.groups import Group
    from distnb.runtime.central.shared_variables import SharedVariables

__all__ = ["Adoption", "roots_of"]


class FamilyKey:
    """Names the parameters of one model to GradientSync without keeping the model alive.

    Args:
        label: How errors call it.
    """

    def __init__(self, label: str) -> None:
        self.label = label


class Adoption:
    """The variables of one strategy on this replica.

    Args:
        strategy: Whose.
        sync: Keeps parameters in sync.
        group: Gives the process group of the present generation.
        shared: Where the replicas' variables are the same memory: what sees to that.
    """

    def __init__(
        self, strategy: Any, sync: GradientSync, group: Callable[[], Group], shared: SharedVariables | None = None
    ) -> None:
        self.strategy = strategy
        self.shared = shared
        self._sync = sync
        self._group = group
        self._families: weakref.WeakKeyDictionary[torch.nn.Module, FamilyKey] = weakref.WeakKeyDictionary()
        self.scope_buffers = ScopeBuffers(group)
        self.running_statistics = RunningStatistics(group)
        self._made_variables = 0

    @property
    def group(self) -> Group:
        """The replicas."""
        return self._group()

    def take_variable(self, variable: Variable) -> None:
        """A variable was made, in a scope or in a replica: at once replica 0's value for all."""
        # Replica 0 counts: a replica that was replaced knows less.
        number = torch.tensor(self._made_variables + 1)
        if self.group.size > 1:
            told = settings_of(variable).told
            make_equal(self.group, [("number", number), (told, component_of(variable))], self._told)
        variable.number = self._made_variables = int(number)
        self._adopt(variable, FamilyKey(f"Variable {variable.name}" if variable.name else "Variable"))

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter was made in a scope of this strategy."""
        if isinstance(parameter, SyncOnReadVariable):
            return parameter.distribute_strategy is self.strategy
        mirror = find_mirror(parameter)
        return mirror is not None and mirror.sync() is self._sync

    def take(
        self, roots: Iterable[torch.nn.Module], loose: Iterable[torch.nn.Parameter], *, equalise: bool = True
    ) -> None:
        """Adopt the parameters and buffers of modules, and parameters that belong to no module.

        Args:
            roots: In the same order on every replica; each is a family of its own.
            loose: Likewise.
            equalise: Give every replica the values of replica 0. Without it the caller has made them equal.
        """
        new: list[tuple[str, torch.Tensor]] = []
        lazy: list[torch.nn.Module] = []
        for root in roots:
            key = self._families.setdefault(root, FamilyKey(type(root).__name__))
            self.scope_buffers.take(root)
            self.running_statistics.take(key, root)
            new += [(f"{type(root).__name__}.{name}", tensor) for name, tensor in self._new_of(root, key)]
            lazy += [part for part in root.modules() if any(map(is_lazy, part.parameters(recurse=False)))]
        key = FamilyKey("parameters")
        for parameter in loose:
            if self._adopt(parameter, key):
                new.append(("Parameter", parameter))
        if not equalise or self._group().size == 1:
            return
        for part in lazy:
            _equalise_when_materialised(part, self._group)
        ready = [(name, tensor) for name, tensor in new if not is_lazy(tensor)]
        if ready:
            self._group().note("strategy.scope", ())
        make_equal(self._group(), ready, self._told)
        self._sync.note_equal()

    @property
    def _told(self) -> str:
        """What the strategy was told that must be the same on every replica: all but who is where."""
        options = self.strategy.spec.options
        plain = [(name, value) for name, value in options if isinstance(value, (str, bool, CommunicationOptions))]
        return f"{self.strategy.spec.kind}({', '.join(f'{name}={value!r}' for name, value in plain)})"

    def take_restored(self, values: Iterable[Any]) -> None:
        """Adopt modules, optimizers and parameters that were copied from another replica, values included."""
        modules, loose = [], []
        for value in values:
            for variable in _variables_in(value):
                self._made_variables = max(self._made_variables, variable.number)
                if isinstance(variable, SyncOnReadVariable) and variable.aggregation is VariableAggregation.SUM:
                    component_of(variable).zero_()  # a copy of another replica's component would be added twice
            if isinstance(value, torch.nn.Module):
                modules.append(value)
            elif isinstance(value, torch.optim.Optimizer):
                loose += [parameter for group in value.param_groups for parameter in group["params"]]
            elif isinstance(value, torch.nn.Parameter):
                loose.append(value)
        self.take(roots_of(modules), loose, equalise=False)

    def buffers(self) -> list[tuple[str, list[torch.Tensor]]]:
        """The buffers of each model, in the order of making, with the model's name."""
        return [
            (key.label, [each for each in root.buffers() if not is_lazy(each) and each.layout is torch.strided])
            for root, key in list(self._families.items())
        ]

    def _new_of(self, root: torch.nn.Module, key: FamilyKey) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in root.named_parameters():
            if self._adopt(parameter, key, f".{name}"):
                yield name, parameter
        for name, buffer in root.named_buffers():
            if self.scope_buffers.is_new(buffer):
                yield name, buffer

    def _adopt(self, parameter: torch.nn.Parameter, key: FamilyKey, name: str = "") -> bool:
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
        self._sync.register(parameter, key)
        if self.shared is not None:
            self.shared.expect(key.label + name, parameter)
        return True


def _variables_in(value: Any) -> list[Variable]:
    parameters = value.parameters() if isinstance(value, torch.nn.Module) else [value]
    return [parameter for parameter in parameters if isinstance(parameter, Variable)]


def roots_of(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of the modules that are in none of the others."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def _equalise_when_materialised(part: torch.nn.Module, group: Callable[[], Group]) -> None:
    """Lazy parameters get their values in the first forward pass, from each replica's own random stream."""

    def hook(module: torch.nn.Module, _args: Any) -> None:
        tensors = list(module.named_parameters(recurse=False)) + list(module.named_buffers(recurse=False))
        if not any(is_lazy(tensor) for _, tensor in tensors):
            handle.remove()
            make_equal(group(), [(f"{type(module).__name__}.{name}", tensor) for name, tensor in tensors])

    handle = part.register_forward_pre_hook(hook)  # after the module's own, which materialises
