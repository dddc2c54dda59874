"""The making of parameters in the scopes of a ShardedStrategy: in host memory, until they are divided.

    with strategy.scope():                            replica 0          the others
        first = torch.nn.Linear(1000, 1000)           on the host        on the host: among the first 64 MB
        second = torch.nn.Linear(100_000, 1000)       on the host        transient: on the host for a while

Replica 0 makes each model as plain PyTorch would, whatever its constructor does. The others have no memory for a large
one (`transient.py`), and get their rows from replica 0 when it is divided (`initial_values.py`). Within
`torch.device("cpu")` all replicas make the whole model, and within `torch.device("meta")` none does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from distnb.compat import torch_internals
from distnb.runtime.fsdp.transient import RecentValues, TransientTensor

__all__ = ["Construction"]

_KEPT_NBYTES = 64 * 2**20
_SMALL_NBYTES = 16_384
_HOST = torch.device("cpu")


class Construction:
    """The rules for parameters that the scopes of one strategy make on this replica.

    Args:
        device: Returns the device of this replica.
        has_all: Returns whether this replica gives values to all parameters.
        before_call: Called before a module is called in a scope.
    """

    def __init__(
        self, device: Callable[[], torch.device], has_all: Callable[[], bool], before_call: Callable[[], None]
    ) -> None:
        self._device = device
        self._has_all = has_all
        self._before_call = before_call
        self._left = _KEPT_NBYTES
        self._recent = RecentValues(_KEPT_NBYTES)

    def begin(self) -> None:
        """Begin to count bytes again: the parameters made before are divided."""
        self._left = _KEPT_NBYTES
        self._recent.clear()

    def place(self, data: Any) -> Any:
        """Return the data of a new parameter, given the data that the program has for it."""
        if type(data) not in (torch.Tensor, torch.nn.Parameter) or data.is_meta or data.layout is not torch.strided:
            return data
        if not _in_constructor():
            return data  # it may belong to no module
        if self._has_all() or data.nbytes <= _SMALL_NBYTES or torch_internals.default_device() == _HOST:
            return data.to(_HOST)
        self._left -= data.nbytes
        return data.to(_HOST) if self._left >= 0 else TransientTensor.of(data.to(_HOST), self._recent)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which modules are constructed in host memory."""
        handle = register_module_forward_pre_hook(self._check_call)
        try:
            with _HostFactories() if self._device().type != "cpu" else nullcontext():
                yield
        finally:
            handle.remove()

    def _check_call(self, _module: torch.nn.Module, _inputs: Any) -> None:
        if not _in_constructor():
            self._before_call()


class _HostFactories(TorchFunctionMode):
    """torch's mode in which constructors of modules make tensors in host memory, and other code on the device."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in torch_internals.factories() and kwargs.get("device") is None and _in_constructor():
            kwargs = {**kwargs, "device": _HOST}
        return function(*args, **kwargs)


def _in_constructor() -> bool:
    """Return whether the constructor of a module has called this function, at any distance."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        own = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "__init__" and code.co_varnames else None
        if isinstance(own, torch.nn.Module):
            return True
        frame = frame.f_back
    return False
