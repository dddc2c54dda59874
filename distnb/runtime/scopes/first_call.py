"""The equalisation of parameters whose values are only set in the first call of their module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

__all__ = ["equalise_at_first_call"]


def equalise_at_first_call(
    part: torch.nn.Module, equalise: Callable[[Sequence[tuple[str, torch.Tensor]]], None]
) -> None:
    """Call `equalise` with a module's own parameters and buffers, by name, once all of them have values.

    The call happens in the module's first forward pass. Lazy parameters are initialised at the start of this pass, from
    each replica's own random stream, so the replicas' values differ until `equalise` is called. The same holds for a
    layer that is made in `strategy.run` and initialised once it is part of its model.
    """
    hook = _FirstCallHook(equalise)
    hook.handle = part.register_forward_pre_hook(hook)  # runs after the module's hook that initialises lazy parameters


class _FirstCallHook:
    handle: Any = None

    def __init__(self, equalise: Callable[[Sequence[tuple[str, torch.Tensor]]], None]) -> None:
        self._equalise = equalise

    def __call__(self, module: torch.nn.Module, _args: Any) -> None:
        own = torch.nn.Module.named_parameters(module, recurse=False)  # Keras's layers have a method of their own
        tensors = [*own, *module.named_buffers(recurse=False)]
        if not any(is_lazy(tensor) for _, tensor in tensors):
            self.handle.remove()
            self._equalise([(f"{type(module).__name__}.{name}", tensor) for name, tensor in tensors])

    def __reduce__(self) -> tuple[Any, ...]:
        return _hook_of_a_copy, ()  # replicas do not keep copies of a module equal


def _hook_of_a_copy() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_args: object) -> None:
    """Replace the original's hook in a copied module."""
