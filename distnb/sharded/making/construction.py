"""The making of parameters in the scopes of a ShardedStrategy: beyond a limit in host memory, until they are divided.

    with strategy.scope():                            replica 0          the others
        first = torch.nn.Linear(1000, 1000)           on the device      on the device: among the first 64 MB
        second = torch.nn.Linear(100_000, 1000)       on the host        transient: on the host for a while

Replica 0 makes each model as plain PyTorch would, whatever its constructor does. The others have no memory for a large
one (`transient.py`), and get their rows from replica 0 when it is divided (`initial_values.py`). Within
`torch.device("cpu")` all replicas make the whole model, and within `torch.device("meta")` none does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from distnb.compat import torch_internals
from distnb.sharded.making.transient import RecentValues, TransientTensor

__all__ = ["Construction", "in_constructor"]

_KEPT_NBYTES = 64 * 2**20
_SMALL_NBYTES = 16_384
_HOST = torch.device("cpu")


class Construction:
    """The rules for parameters that the scopes of one strategy make on this replica.

    Args:
        device: Returns the device of this replica.
        has_all: Returns whether this replica gives values to all parameters.
    """

    def __init__(self, device: Callable[[], torch.device], has_all: Callable[[], bool]) -> None:
        self._device = device
        self._has_all = has_all
        self._left = _KEPT_NBYTES
        self._recent = RecentValues(_KEPT_NBYTES)

    @property
    def is_on_host(self) -> bool:
        """True if constructors make tensors in host memory, since there are many parameters."""
        return self._left < 0

    def begin(self) -> None:
        """Begin to count bytes again: the parameters made before are divided."""
        self._left = _KEPT_NBYTES
        self._recent.clear()

    def place(self, data: Any) -> Any:
        """Return the data of a new parameter, given the data that the program has for it."""
        if type(data) not in (torch.Tensor, torch.nn.Parameter) or data.is_meta or data.layout is not torch.strided:
            return data
        if data.nbytes <= _SMALL_NBYTES or torch_internals.default_device() == _HOST or not in_constructor():
            return data  # a parameter that no constructor makes may belong to no module
        self._left -= data.nbytes
        if not self.is_on_host:
            return data
        return data.to(_HOST) if self._has_all() else TransientTensor.of(data.to(_HOST), self._recent)

    def active(self) -> AbstractContextManager[Any]:
        """Return a context in which constructors make tensors by these rules."""
        return _HostFactories(self) if self._device().type != "cpu" else nullcontext()


class _HostFactories(TorchFunctionMode):
    """torch's mode in which constructors of large models make tensors in host memory, and other code on the device."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_placed = function in torch_internals.factories() and kwargs.get("device") is None
        if is_placed and self._construction.is_on_host and in_constructor():
            kwargs = {**kwargs, "device": _HOST}
        return function(*args, **kwargs)


def in_constructor() -> bool:
    """Return whether the constructor of a module has called this function, at any distance."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        own = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "__init__" and code.co_varnames else None
        if isinstance(own, torch.nn.Module):
            return True
        frame = frame.f_back
    return False
