"""The coordinator's side of a scope: models, variables and optimizers made in the scope move to the servers."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from distnb.compat import torch_internals
from distnb.errors import OptionError
from distnb.options import VariableAggregation, VariableSynchronization
from distnb.runtime.scopes import metric_binding
from distnb.runtime.scopes.made_objects import MadeObjects, own_parameters
from distnb.runtime.scopes.registration import adopters_of, roots_of
from distnb.servers.variables.access import ServerAccess
from distnb.servers.variables.here import servers_here
from distnb.servers.variables.remote_optimizer import make_remote, will_be_remote
from distnb.servers.variables.server_variable import ServerVariable, represent
from distnb.servers.variables.shard_placement import Placement, Stored
from distnb.variables.settings import Settings

__all__ = ["RefreshHook", "ServerRegistration"]

_TABLES = (torch.nn.Embedding, torch.nn.EmbeddingBag)


class RefreshHook:
    """A hook that updates a model's copies before the model computes on the coordinator.

    On a worker the hook does nothing, because a closure updates the copies when it starts.
    """

    def __call__(self, module: torch.nn.Module, _args: Any) -> None:
        servers = servers_here.access
        if servers is None or servers.is_worker:
            return
        servers.refresh_copies((*module.parameters(), *module.buffers()))

    def before_state_dict(self, module: torch.nn.Module, _prefix: str, _keep_vars: bool) -> None:
        """Update the copies. torch calls this hook before it collects the model's `state_dict`."""
        self(module, ())

    def __reduce__(self) -> tuple[Any, ...]:
        return RefreshHook, ()


class ServerRegistration:
    """The registration of one strategy's variables, models and optimizers on the servers."""

    def __init__(self, strategy: Any, access: ServerAccess, placement: Placement) -> None:
        self.strategy = strategy
        self.access = access
        self.placement = placement
        self._roots: list[weakref.ref[torch.nn.Module]] = []
        self._made = MadeObjects(strategy, self._adopt, self._grow)
        self._made_optimizers: list[torch.optim.Optimizer] = []

    @property
    def roots(self) -> list[torch.nn.Module]:
        """The registered models that still exist, the latest last."""
        return [root for each in self._roots if (root := each()) is not None]

    def make_variable(self, value: torch.Tensor, settings: Settings) -> ServerVariable:
        """Make a `distnb.Variable` on the servers and return its representative."""
        name = settings.name or "Variable"
        stored = self.placement.place(name, value.shape, value.dtype, trainable=settings.trainable)
        self.access.requests.create(stored, value)
        made = represent(stored, settings, self.strategy)
        self.access.represented.own(stored, made)
        return made

    def make_table(self, shape: tuple[int, ...], dtype: torch.dtype, name: str, *, trainable: bool) -> ServerVariable:
        """Make a table: a variable of zeros whose rows are read on demand. It takes no memory in this process."""
        stored = self.placement.place(name, shape, dtype, trainable=trainable)
        self.access.requests.create(stored, None)
        return self._table(stored)

    def as_table(self, parameter: torch.Tensor) -> ServerVariable:
        """Return a table, whose rows are read on demand, that replaces a parameter which is on the servers."""
        stored = self.access.represented.stored_of(parameter)
        assert stored is not None
        self.access.copies.send_changes()
        self.access.copies.drop([stored.number])
        return self._table(stored)

    def _table(self, stored: Stored) -> ServerVariable:
        settings = Settings(
            trainable=stored.trainable,
            name=stored.name,
            synchronization=VariableSynchronization.AUTO,
            aggregation=VariableAggregation.NONE,
        )
        made = represent(stored, settings, self.strategy, rows_apart=True)
        self.access.represented.own(stored, made)
        return made

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Return a context that notes objects made by this thread, for `register_made`. An error discards the notes."""
        try:
            with _tables_made_by(self), _noting_optimizers(self._made_optimizers), self._made.noting():
                yield
        except BaseException:
            self._made.forget()
            self._made_optimizers.clear()
            raise

    def register_made(self) -> None:
        """Put the objects that scopes have made since the last call on the servers."""
        if self._made.pending or self._made_optimizers:
            self._register_noted()
        if "torchmetrics" in sys.modules:
            metric_binding.install()

    def _register_noted(self) -> None:
        alive = self._made.pop(self._is_new)
        roots = roots_of([each for each in alive if isinstance(each, torch.nn.Module)])
        within: set[torch.nn.Module] = set()  # the layers of Keras models, which torch may not see as their modules
        for root in sorted(roots, key=lambda root: not adopters_of(root)):
            self._made.own(root.modules())
            if root not in within:
                self.register_model(root)
                within.update(part for adopter in adopters_of(root) for part in adopter.parts(root))
        for each in alive:
            # A parameter without gradients outside a model is never trained, such as the counters of Keras's metrics
            # and optimizers. It stays in this process.
            if isinstance(each, torch.nn.Parameter) and each.requires_grad:
                self._register_tensor(each, "", trainable=True)
        while self._made_optimizers:
            make_remote(self._made_optimizers.pop(0))

    def _is_new(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and self.access.represented.stored_of(tensor) is None

    def _grow(self, module: torch.nn.Module, _name: str, value: Any, in_replica: bool) -> None:
        """Register a parameter or module that is added to a registered model.

        In a function that `run` calls here it is registered at once, because the function uses it. Otherwise
        `register_made` registers it.
        """
        if isinstance(value, torch.nn.Module):
            self._made.own(value.modules())
            found = [parameter for _, parameter in own_parameters(value)]
        else:
            found = [value]
        if not any(map(self._is_new, found)):
            return
        if not in_replica:
            self._made.note(module)
            return
        for parameter in found:
            self._register_tensor(parameter, "", trainable=parameter.requires_grad)

    def _adopt(self, module: torch.nn.Module) -> None:
        for adopter in adopters_of(module):
            adopter.adopt(self.strategy, module)

    def register_model(self, root: torch.nn.Module) -> None:
        """Put a model's parameters and buffers on the servers, except those that are already there.

        Raises:
            OptionError: A lazy parameter has no shape yet.
        """
        for name, parameter in own_parameters(root):
            if is_lazy(parameter):
                raise OptionError(
                    f"{type(root).__name__}.{name} has no shape before the first batch, but the servers need it when "
                    "the scope ends or trains. Give the layer its sizes, or call the model once within the scope."
                )
            self._register_tensor(parameter, name, trainable=parameter.requires_grad)
        for name, buffer in root.named_buffers():
            self._register_tensor(buffer, name, trainable=False)
        if not any(isinstance(hook, RefreshHook) for hook in torch_internals.pre_hooks(root)):
            hook = RefreshHook()
            root.register_forward_pre_hook(hook)
            root.register_state_dict_pre_hook(hook.before_state_dict)
        within = set(root.modules())
        self._roots = [*(weakref.ref(each) for each in self.roots if each not in within), weakref.ref(root)]

    def _register_tensor(self, tensor: torch.Tensor, name: str, *, trainable: bool) -> None:
        if self.access.represented.stored_of(tensor) is not None or tensor.is_meta:
            return
        stored = self.placement.place(name, tensor.shape, tensor.dtype, trainable=trainable, whole=not trainable)
        versions = self.access.requests.create(stored, tensor)
        self.access.represented.own(stored, tensor)
        self.access.copies.adopt(stored, tensor, versions, keep=False)


@contextmanager
def _tables_made_by(registration: ServerRegistration) -> Iterator[None]:
    """Return a context in which embeddings are made with their tables on the servers.

    A table may be too large for this process. So the module is first made on the meta device, which takes no memory,
    and its weight is then replaced by a table on the servers, which `reset_parameters` fills piece by piece.
    """
    plain = {cls: cls.__init__ for cls in _TABLES}

    def wrapped(cls: Any) -> Callable[..., None]:
        init: Any = plain[cls]

        @functools.wraps(init)
        def make(module: Any, *args: Any, **kwargs: Any) -> None:
            given = kwargs.get("_weight")
            if given is not None or kwargs.get("device") is not None:
                init(module, *args, **kwargs)
                return
            init(module, *args, **kwargs, device="meta")
            weight = module.weight
            module.weight = registration.make_table(
                tuple(weight.shape), weight.dtype, "weight", trainable=weight.requires_grad
            )
            module.weight.sparse_gradients = module.sparse
            module.reset_parameters()

        return make

    try:
        for cls in _TABLES:
            cls.__init__ = wrapped(cls)  # type: ignore[method-assign]
        yield
    finally:
        for cls, init in plain.items():
            cls.__init__ = init  # type: ignore[method-assign]


@contextmanager
def _noting_optimizers(made: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Return a context that adds the torch optimizers made in it to a list."""
    init: Any = torch.optim.Optimizer.__init__

    @functools.wraps(init)
    def noting(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        will_be_remote(optimizer)
        made.append(optimizer)

    torch.optim.Optimizer.__init__ = noting  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]
