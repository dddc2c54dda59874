"""Seeing which modules and parameters a thread makes while a strategy's scope is open on a replica."""

from __future__ import annotations

import gc
import sys
import weakref
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn.modules import module as torch_module

from distnb.runtime import contexts
from distnb.runtime.scopes import metric_binding
from distnb.runtime.scopes.registration import Adoption, roots_of

__all__ = ["ScopeWatch"]


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
        roots = roots_of(modules)
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
