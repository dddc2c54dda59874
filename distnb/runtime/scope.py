"""What is made while a strategy's scope is open on a replica: found, made equal, and kept in sync from then on."""

from __future__ import annotations

import gc
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from distnb.accelerators import torch_device
from distnb.collectives.mirrored import find_mirror
from distnb.errors import ContextError, StructureError
from distnb.options import CommunicationOptions, VariableAggregation
from distnb.runtime import contexts, metric_binding
from distnb.runtime.running_statistics import RunningStatistics
from distnb.runtime.scope_buffers import ScopeBuffers
from distnb.variables.sync_on_read import SyncOnReadVariable
from distnb.variables.variable import Variable, component_of

if TYPE_CHECKING:
    from distnb.collectives.gradients import GradientSync
    from distnb.collectives.groups import Group
    from distnb.runtime.shared_variables import SharedVariables

__all__ = ["Adoption", "ScopeWatch", "make_equal"]

_MESSAGE_NBYTES = 256 * 2**20


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
            label = f"Variable {variable.name or ''}".strip()
            make_equal(self.group, [("number", number), (label, component_of(variable))], self._told)
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
        self.take(_roots(modules), loose, equalise=False)

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
        self._sync.adopt(parameter, key)
        if self.shared is not None:
            self.shared.expect(key.label + name, parameter)
        return True


def _variables_in(value: Any) -> list[Variable]:
    parameters = value.parameters() if isinstance(value, torch.nn.Module) else [value]
    return [parameter for parameter in parameters if isinstance(parameter, Variable)]


def _roots(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
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


# -- equal values ------------------------------------------------------------------------------------------------------


def make_equal(group: Group, named: Sequence[tuple[str, torch.Tensor]], strategy: str = "") -> None:
    """Give every replica the values that replica 0 holds, in one flat message (several, for very large models).

    Args:
        group: The replicas.
        named: The same tensors on each; the names are for errors.
        strategy: Whose variables they are, as every replica must have it.

    Raises:
        StructureError: The replicas made different variables, or different strategies.
    """
    if not named:
        return
    descriptions = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    head = torch.tensor(
        [len(named), zlib.crc32(repr((strategy, descriptions)).encode())],
        dtype=torch.int64,
        device=torch_device(group.device),
    )
    if any(not torch.equal(other, head) for other in group.all_gather(head)):
        _refuse_other_strategies(group.all_gather_object(strategy))
        _refuse_unlike(group.all_gather_object(descriptions))
    pack: list[torch.Tensor] = []
    nbytes = 0
    with torch.no_grad():
        for _, tensor in named:
            if pack and nbytes + tensor.nbytes > _MESSAGE_NBYTES:
                _broadcast_pack(group, pack)
                pack, nbytes = [], 0
            pack.append(tensor)
            nbytes += tensor.nbytes
        _broadcast_pack(group, pack)


def _broadcast_pack(group: Group, pack: Sequence[torch.Tensor]) -> None:
    device = torch_device(group.device)
    flat = torch.cat([tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8) for tensor in pack])
    if not flat.numel():
        return
    group.broadcast(flat, 0)
    if group.rank == 0:
        return
    begin = 0
    for tensor in pack:
        piece = flat[begin : begin + tensor.nbytes]
        begin += tensor.nbytes
        # Cloned, since a view as another dtype needs an aligned beginning.
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _refuse_other_strategies(strategies: Sequence[str]) -> None:
    if len(set(strategies)) > 1:
        shown = "\n".join(f"  replica {replica}: {strategy}" for replica, strategy in enumerate(strategies))
        raise StructureError(
            f"The replicas are in the scopes of different strategies:\n{shown}\nMake the strategy with the same "
            "arguments on every replica and on every machine."
        )


def _refuse_unlike(descriptions: Sequence[Sequence[tuple[str, tuple[int, ...], str]]]) -> None:
    longest = max(len(one) for one in descriptions)
    for place in range(longest):
        entries = [one[place] if place < len(one) else None for one in descriptions]
        if any(entry != entries[0] for entry in entries):
            shown = "\n".join(
                f"  replica {replica}: "
                + (f"{entry[0]}, {entry[2].removeprefix('torch.')}{list(entry[1])}" if entry else "nothing")
                for replica, entry in enumerate(entries)
            )
            raise StructureError(
                f"The replicas made different variables in the scope. Variable {place} of it is\n{shown}\n"
                "Make the same model on every replica: what decides its shape must not depend on the replica."
            )


# -- seeing what is made -----------------------------------------------------------------------------------------------


class ScopeWatch:
    """Notes, while it is entered, which modules and parameters this thread makes; adopts them when it ends well.

    torch tells of registrations through its global hooks. Parameters that are in no module are seen in
    `Parameter.__new__`, and modules that are copied or unpickled in `Module.__setstate__`; both are wrapped for as long
    as a scope is open.
    """

    def __init__(self, adoption: Adoption) -> None:
        self._adoption = adoption
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._parameters: dict[int, weakref.ref[torch.nn.Parameter]] = {}
        self._handles: list[Any] = []
        self._knows_metrics = False

    def __enter__(self) -> Self:
        self._handles = [
            torch_module.register_module_parameter_registration_hook(self._on_parameter),
            torch_module.register_module_buffer_registration_hook(self._on_buffer),
            torch_module.register_module_module_registration_hook(self._on_module),
            _watch_making(self),
        ]
        self._knows_metrics = "torchmetrics" in sys.modules
        if self._knows_metrics:
            metric_binding.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if kind is None and not self._knows_metrics and "torchmetrics" in sys.modules:
            metric_binding.bind_all()
        if kind is None and (self._modules or self._parameters):
            self._adopt_all()

    def _adopt_all(self) -> None:
        # What was made and dropped must be gone on every replica, or none: garbage collectors run when they like.
        gc.collect()
        modules = [module for reference in self._modules.values() if (module := reference()) is not None]
        roots = _roots(modules)
        in_modules = {id(parameter) for root in roots for parameter in root.parameters()}
        alive = [parameter for reference in self._parameters.values() if (parameter := reference()) is not None]
        self._adoption.take(roots, [parameter for parameter in alive if id(parameter) not in in_modules])

    def _is_mine(self) -> bool:
        innermost = contexts.innermost()
        return innermost is not None and innermost[0] is self._adoption.strategy and innermost[1] is None

    def note_module(self, module: torch.nn.Module) -> None:
        """Something was registered in a module, or it was copied or unpickled."""
        if self._is_mine():
            _note(self._modules, module)

    def _on_parameter(self, module: torch.nn.Module, _name: str, _parameter: Any) -> None:
        self.note_module(module)

    def _on_buffer(self, module: torch.nn.Module, _name: str, _buffer: Any) -> None:
        self.note_module(module)

    def _on_module(self, module: torch.nn.Module, _name: str, child: Any) -> None:
        self.note_module(module)

    def on_parameter_made(self, parameter: torch.nn.Parameter) -> None:
        """A parameter was made, in a module or alone."""
        if self._is_mine():
            _note(self._parameters, parameter)


def _note(known: dict[int, weakref.ref[Any]], made: Any) -> None:
    reference = known.get(id(made))
    if reference is None or reference() is not made:
        known.pop(id(made), None)  # of something that is gone: what is new comes last, as on the other replicas
        known[id(made)] = weakref.ref(made)


_watches: list[ScopeWatch] = []
_plain_new: Any = None
_plain_setstate: Any = None


class _Watching:
    """A watch that is told of everything made; removing the last one leaves torch as it was."""

    def __init__(self, watch: ScopeWatch) -> None:
        self._watch = watch

    def remove(self) -> None:
        _watches.remove(self._watch)
        if not _watches:
            torch.nn.Parameter.__new__ = _plain_new  # type: ignore[method-assign]
            torch.nn.Module.__setstate__ = _plain_setstate  # type: ignore[method-assign]


def _watch_making(watch: ScopeWatch) -> _Watching:
    global _plain_new, _plain_setstate
    if not _watches:
        _plain_new = torch.nn.Parameter.__dict__["__new__"]
        _plain_setstate = torch.nn.Module.__setstate__
        torch.nn.Parameter.__new__ = staticmethod(_new_parameter)  # type: ignore[method-assign]
        torch.nn.Module.__setstate__ = _set_module_state  # type: ignore[method-assign]
    _watches.append(watch)
    return _Watching(watch)


def _new_parameter(cls: Any, *args: Any, **kwargs: Any) -> Any:
    parameter = _plain_new.__func__(cls, *args, **kwargs)
    for watch in _watches:
        watch.on_parameter_made(parameter)
    return parameter


def _set_module_state(module: torch.nn.Module, state: Any) -> None:
    _plain_setstate(module, state)
    for watch in _watches:
        watch.note_module(module)
