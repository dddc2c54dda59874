"""The values of parameters that are only set in the first call of their module.

torch's lazy layers draw them there, in `strategy.run`: from the stream that all replicas share, so that they are those
of one process. Replica 0's are then sent to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.compat import patches
from distnb.runtime.randomness import streams

__all__ = ["equalise_at_first_call", "install"]


def install() -> None:
    """Make lazy layers of scopes draw from the shared stream from now on. Idempotent."""
    patches.wrap("torch.nn.modules.lazy:LazyModuleMixin._infer_parameters", _initialise)


def _initialise(original: Callable[..., None], lazy: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    own = torch.nn.Module.parameters(module, recurse=False)
    with streams.shared() if any(map(find_mirror, own)) else nullcontext():
        original(lazy, module, *args, **kwargs)


def equalise_at_first_call(
    part: torch.nn.Module, equalise: Callable[[Sequence[tuple[str, torch.Tensor]]], None]
) -> None:
    """Call `equalise` with a module's own parameters and buffers, by name, once all of them have values.

    The call happens in the module's first forward pass, once lazy parameters are initialised. A layer that is made in
    `strategy.run` has values of each replica's own random stream until then.
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
