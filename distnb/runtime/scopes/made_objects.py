"""The record of modules and parameters made in scopes, in the order of creation, until they are registered.

    with strategy.scope():
        model = Net()                 # noted: Net, its layers, their parameters
        strategy.run(step)            # before `step` is called: registered, and made equal on all replicas
        head = torch.nn.Linear(8, 1)  # noted, and registered when the scope ends

A registered module may get parameters later: its first call may build a layer, or a program may attach a head to
it. The registration is notified of these parameters as well, inside or outside a scope.
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

from distnb.compat import torch_internals
from distnb.runtime import contexts

__all__ = ["CHANGES", "MadeObjects", "own_parameters"]


class _Changes:
    """The count of events after which a function may use other modules or parameters than before.

    Attributes:
        count: Increases when any module of this process gets a parameter or a submodule, and when a program begins.
    """

    count = 0


CHANGES = _Changes()

_open: dict[Any, MadeObjects] = {}
"""The `MadeObjects` of each strategy whose scope is open."""

_owners = WeakIdKeyDictionary()
"""The `MadeObjects` of each registered module."""


class MadeObjects:
    """Objects that the scopes of one strategy have made and that its registration has not registered yet.

    Args:
        strategy: The strategy in whose cross-replica context objects are noted.
        begin: Called with each module at the start of its construction, when it has no parameters yet.
        grow: Called when a registered module gets a parameter or a submodule outside a scope. (In a scope
            the module is noted instead.) The arguments are the module, the new member's name, the member, and whether
            the calling thread is in a replica context of the strategy.
        place: Called with the data of each new parameter. Returns data for the parameter, the same or other.
        before_call: Called before a module is called while objects are noted.
    """

    def __init__(
        self,
        strategy: Any,
        begin: Callable[[torch.nn.Module], None],
        grow: Callable[[torch.nn.Module, str, Any, bool], None],
        place: Callable[[Any], Any] = lambda data: data,
        before_call: Callable[[], None] = lambda: None,
    ) -> None:
        self.strategy = strategy
        self.begin = begin
        self.grow = grow
        self.place = place
        self.before_call = before_call
        self._noted: dict[int, weakref.ref[Any]] = {}
        self._is_paused = False
        _install_hooks()

    @property
    def pending(self) -> bool:
        """True if anything was noted."""
        return bool(self._noted)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Return a context that notes objects made in it, in the strategy's cross-replica context."""
        is_outermost = self.strategy not in _open
        try:
            _open[self.strategy] = self
            _WRAPPERS.update()
            yield
        finally:
            if is_outermost:
                _open.pop(self.strategy, None)
                _WRAPPERS.update()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which nothing is noted."""
        before = self._is_paused
        try:
            self._is_paused = True
            yield
        finally:
            self._is_paused = before

    def note(self, made: Any) -> None:
        """Note a module or a parameter, unless it is already noted."""
        if self._is_paused:
            return
        identity, noted = id(made), self._noted
        reference = noted.get(identity)
        if reference is None or reference() is not made:
            # The entry may belong to a freed object with the same id. Without it, the new object is added at the end,
            # so the order of creation is the same on all replicas.
            noted.pop(identity, None)
            noted[identity] = weakref.ref(made)

    def pop(self, is_new: Callable[[torch.Tensor], bool]) -> list[Any]:
        """Return the noted objects that still exist, and clear the record.

        Args:
            is_new: Returns whether a parameter or buffer is still to be registered.
        """
        alive = self._alive()
        if any(is_new(tensor) for made in alive for tensor in _tensors(made)):
            # All replicas must return the same objects. An unreferenced object in a reference cycle exists until the
            # garbage collector happens to run, at a different time on each replica. So collect now, on all of them. If
            # no tensor is new, then none that the collection could free is new either, and no collection is needed.
            del alive
            gc.collect()
            alive = self._alive()
        self._noted.clear()
        return alive

    def forget(self) -> None:
        """Clear the record."""
        self._noted.clear()

    def own(self, modules: Iterable[torch.nn.Module]) -> None:
        """Call `grow` for parameters and submodules that these modules get from now on."""
        for module in modules:
            if _owners.get(module) is not self:
                _owners[module] = self

    def _alive(self) -> list[Any]:
        return [made for reference in self._noted.values() if (made := reference()) is not None]


def begin_program() -> None:
    """Close the scopes that an earlier program left open."""
    if _open:
        _open.clear()
        _WRAPPERS.update()


def own_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of a module and its submodules, with their names.

    A Keras layer keeps its parameters in a submodule, which it makes when its own `named_parameters` is called. If it
    made the submodule before the layer is built, the submodule would get variables that exist only while Keras traces
    the layer. So torch's method is called instead.
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
    """Return the `MadeObjects` of the scope that the calling thread is in, or None outside a scope."""
    innermost = contexts.innermost()
    return _open.get(innermost[0]) if innermost is not None and innermost[1] is None else None


@functools.cache
def _install_hooks() -> None:
    """Install hooks that run when any module gets a parameter, buffer or submodule. Idempotent."""
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
    # Buffers made outside scopes stay local to a replica: caches and masks whose shapes depend on its slice.
    here = _open_here()
    if here is not None:
        here.note(module)


class _Wrappers:
    """The wrappers around the torch methods that make, copy, unpickle and call modules and parameters.

    They are installed while any scope is open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plain: tuple[Any, ...] | None = None  # torch's methods, while the wrappers are installed

    def update(self) -> None:
        """Install the wrappers if a scope is open, and remove them if none is."""
        with self._lock:
            if _open and self._plain is None:
                self._install()
            elif not _open and self._plain is not None:
                self._set(self._plain, None)

    def _install(self) -> None:
        new: Any = torch.nn.Parameter.__dict__["__new__"]
        init: Any = torch.nn.Module.__init__
        set_state: Any = torch.nn.Module.__setstate__
        call: Any = torch.nn.Module.__call__

        def new_parameter(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
            here = _open_here()
            if here is None:
                return new.__func__(cls, data, *args, **kwargs)
            parameter = new.__func__(cls, here.place(data), *args, **kwargs)
            if torch_internals.local_tensor(parameter) is None:
                here.note(parameter)  # torch could not exchange a sharded one to which there is a weak reference
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

        def call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if (here := _open_here()) is not None and here.pending:
                here.before_call()
            return call(module, *args, **kwargs)

        wrappers = staticmethod(new_parameter), init_module, set_module_state, call_module
        self._set(wrappers, (new, init, set_state, call))

    def _set(self, methods: tuple[Any, ...], plain: tuple[Any, ...] | None) -> None:
        # No interrupt can arrive between these assignments, because they call nothing.
        self._plain = plain
        torch.nn.Parameter.__new__ = methods[0]  # type: ignore[method-assign]
        torch.nn.Module.__init__ = methods[1]  # type: ignore[method-assign]
        torch.nn.Module.__setstate__ = methods[2]  # type: ignore[method-assign]
        torch.nn.Module.__call__ = methods[3]  # type: ignore[method-assign]


_WRAPPERS = _Wrappers()
