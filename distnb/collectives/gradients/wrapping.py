"""A scope-made model in DistributedDataParallel would be aggregated twice: it is refused."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distnb.collectives.gradients.mirrored_parameters import is_mirrored
from distnb.errors import GradientError

__all__ = ["refuse_wrapping"]


def refuse_wrapping() -> None:
    """From now on, wrapping mirrored parameters in DistributedDataParallel raises GradientError. Idempotent."""
    original = DistributedDataParallel.__init__
    if getattr(original, "_distnb", False):
        return

    @functools.wraps(original)
    def checked(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, torch.nn.Module) and any(map(is_mirrored, module.parameters())):
            raise GradientError(
                f"DistributedDataParallel was given a {type(module).__name__} that was made in a strategy's scope. Its "
                "gradients are aggregated already, and would be a second time. Use the model as it is; or, to use "
                "DistributedDataParallel, make it outside `with strategy.scope():`."
            )
        original(self, module, *args, **kwargs)

    checked._distnb = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = checked  # type: ignore[method-assign]
