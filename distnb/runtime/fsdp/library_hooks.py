"""Replacements of torch's methods for sharded models: those of optimizers, and the reading of sharded tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from distnb.compat import patches
from distnb.runtime import contexts

__all__ = ["install"]

_READS = ("numpy", "tolist", "item", "__array__", "__float__", "__int__", "__bool__")


class _Handler(Protocol):
    """The runtime of a strategy that shards models."""

    def add_param_group(
        self, original: Callable[..., None], optimizer: torch.optim.Optimizer, param_group: dict[str, Any]
    ) -> None:
        """Handle the addition of parameters to an optimizer."""

    def zero_grad(self, original: Callable[..., None], owner: Any, *args: Any, **kwargs: Any) -> None:
        """Handle a call of the method `zero_grad` of an optimizer or a module."""


def install(handler: _Handler) -> None:
    """Install the replacements for one strategy's runtime."""
    patches.wrap("torch.optim:Optimizer.add_param_group", handler.add_param_group)
    patches.wrap("torch.optim:Optimizer.zero_grad", handler.zero_grad)
    patches.wrap("torch.nn:Module.zero_grad", handler.zero_grad)
    patches.wrap("torch.distributed.tensor:DTensor.full_tensor", _gather)
    for name in _READS:
        patches.replace(f"torch.distributed.tensor:DTensor.{name}", _of_whole(name))


def _gather(original: Callable[..., torch.Tensor], tensor: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Gather a tensor, unless the other replicas do not take part."""
    contexts.require_all_replicas()
    return original(tensor, *args, **kwargs)


@functools.cache
def _of_whole(name: str) -> Callable[..., Any]:
    """Return a method that calls the method of that name of the whole tensor, which all replicas gather.

    torch raises an error instead, or converts this replica's part to a number.
    """

    def method(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor.full_tensor(), name)(*args, **kwargs)

    return method
