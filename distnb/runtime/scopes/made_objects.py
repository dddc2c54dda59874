"""The modules and parameters that scopes make, noted in the order of making until a registration takes them.

    with strategy.scope():
        model = Net()                 # noted: Net, its layers, their parameters
        strategy.run(step)            # taken before `step` is called: registered, and made equal on all replicas
        head = torch.nn.Linear(8, 1)  # noted, and taken as the scope ends

A module that was taken may get parameters later: a layer that is built by its first call, or a head that is attached
to it. The registration is notified of these as well, wherever it happens.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakIdKeyDictionary

from distnb.runtime import contexts

__all__ = ["CHANGES", "MadeObjects", "own_parameters"]


class _Changes:
    """The count of what may have brought a function other modules or parameters than it had before.

    Attributes:
        count: Grows when any module of this process gets a parameter or a submodule, and when a program begins.
    """

    count = 0


CHANGES = _Changes()

_open: dict[Any, MadeObjects] = {}
"""The objects of the strategies whose scopes are open, by strategy."""

_owners = WeakIdKeyDictionary()
"""The `MadeObjects` of each module that was taken."""


class MadeObjects:
    """Objects that the scopes of one strategy have made and that its registration has not taken yet.

    Args:
        strategy: Objects are noted in its cross-replica context.
        begin: Called with each module as its construction begins, when it has no parameters yet.
        grow: Called with a module that was taken before, the name and the parameter or module that it gets, and whether
            this is in a replica context of the strategy. Outside scopes only: within one the module is noted.
    """

    def __init__(
        self,
        strategy: Any,
        begin: Callable[[torch.nn.Module], None],
        grow: Callable[[torch.nn.Module, str, Any, bool], None],
    ) -> None:
        self.strategy = strategy
        self.begin = begin
        self.grow = grow
        self._noted: dict[int, weakref.ref[Any]] = {}
        self._open = 0
        _install_hooks()

    @property
    def pending(self) -> bool:
        """True if anything was noted."""
        return bool(self._noted)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is made within, in the strategy's cross-replica context."""
        self._open += 1
        _open[self.strategy] = self
        try:
            with _WRAPPERS:
                yield
        finally:
            self._open -= 1
            if not self._open:
                del _open[self.strategy]

    def note(self, made: Any) -> None:
        """Note a module or a parameter. Again it changes nothing."""
        identity, noted = id(made), self._noted
        reference = noted.get(identity)
        if reference is None or reference() is not made:
            noted.pop(identity, None)  # of something that is gone: what is new comes last, as elsewhere
            noted[identity] = weakref.ref(made)

    def take(self, is_new: Callable[[torch.Tensor], bool]) -> list[Any]:
        """Return the noted objects that still exist, and forget them.

        Args:
            is_new: Whether a parameter or buffer is still to be registered.
        """
        alive = self._alive()
        if any(is_new(tensor) for made in alive for tensor in _tensors(made)):
            # What was made and dropped must be gone on every replica, or none: garbage collectors run when they like.
            # Where nothing is new, what a collection might free is not new either, and none is needed.
            del alive
            gc.collect()
            alive = self._alive()
        self._noted.clear()
        return alive

    def forget(self) -> None:
        """Forget what was noted."""
        self._noted.clear()

    def own(self, modules: Iterable[torch.nn.Module]) -> None:
        """Notice the parameters that these modules get from now on."""
        for module in modules:
            if _owners.get(module) is not self:
                _owners[module] = self

    def _alive(self) -> list[Any]:
        return [made for reference in self._noted.values() if (made := reference()) is not None]


def own_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of a module and its submodules, with their names.

    Keras's layers keep theirs in a submodule that they make when they are asked for parameters. Made before the layer
    is built, it would be given variables that exist only while Keras traces the layer.
    """
    if hasattr(type(module), "torch_params"):
        return torch.nn.Module.named_parameters(module)
    return module.named_parameters()


def _tensors(made: Any) -> Iterator[torch.Tensor]:
    if isinstance(made, torch.nn.Module):
        yield from (parameter for _, parameter in own_parameters(made))
        yield from made.buffers()
    else:
        yield made


# -- torch's construction of modules and parameters --------------------------------------------------------------------


def _open_here() -> MadeObjects | None:
    """Return the objects of the scope in which this thread is."""
    innermost = contexts.innermost()
    return _open.get(innermost[0]) if innermost is not None and innermost[1] is None else None


@functools.cache
def _install_hooks() -> None:
    """Notice from now on every parameter, buffer and submodule that a module gets. Idempotent."""
    torch_module.register_module_parameter_registration_hook(_registered)
    torch_module.register_module_module_registration_hook(_registered)
    torch_module.register_module_buffer_registration_hook(_buffer_registered)


def _registered(module: torch.nn.Module, name: str, value: Any) -> None:
    CHANGES.count += 1
    here = _open_here()
    if here is not None:
        here.note(module)
        return
    owner = _owners.get(module)
    if owner is not None and value is not None:
        innermost = contexts.innermost()
        in_replica = innermost is not None and innermost[0] is owner.strategy and innermost[1] is not None
        owner.grow(module, name, value, in_replica)


def _buffer_registered(module: torch.nn.Module, _name: str, _buffer: Any) -> None:
    # Outside scopes buffers are a replica's own: caches and masks whose shapes follow from its slice.
    here = _open_here()
    if here is not None:
        here.note(module)


class _Wrappers:
    """The wrappers around what makes, copies and unpickles modules and parameters, while any scope is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._plain: tuple[Any, Any, Any] = (None, None, None)

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._wrap()

    def __exit__(self, *_exception: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._set(*self._plain)

    def _wrap(self) -> None:
        new: Any = torch.nn.Parameter.__dict__["__new__"]
        init: Any = torch.nn.Module.__init__
        set_state: Any = torch.nn.Module.__setstate__

        def new_parameter(cls: Any, *args: Any, **kwargs: Any) -> Any:
            parameter = new.__func__(cls, *args, **kwargs)
            if (here := _open_here()) is not None:
                here.note(parameter)
            return parameter

        def init_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            if (here := _open_here()) is not None:
                here.note(module)
                here.begin(module)

        def set_module_state(module: torch.nn.Module, state: Any) -> None:
            set_state(module, state)
            if (here := _open_here()) is not None:
                here.note(module)

        self._plain = new, init, set_state
        self._set(staticmethod(new_parameter), init_module, set_module_state)

    @staticmethod
    def _set(new: Any, init: Any, set_state: Any) -> None:
        torch.nn.Parameter.__new__ = new  # type: ignore[method-assign]
        torch.nn.Module.__init__ = init  # type: ignore[method-assign]
        torch.nn.Module.__setstate__ = set_state  # type: ignore[method-assign]


_WRAPPERS = _Wrappers()
