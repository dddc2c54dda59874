"""A notice in the cells of a ShardedStrategy that train what it has not sharded. Importing this loads no FSDP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distnb.collectives.gradients.optimizer_steps import optimized
from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.collectives.verify import callsite
from distnb.compat import torch_internals
from distnb.runtime.this_process import this_process

__all__ = ["noticing"]


@contextmanager
def noticing() -> Iterator[None]:
    """Return a context in which the first step of an optimizer with parameters that nobody has sharded is noticed."""
    noticed = False

    def notice(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal noticed
        process = this_process.replica
        if noticed or process is None or process.size == 1 or process.rank > 0:
            return
        parameters = optimized(optimizer)
        if all(map(_is_whole_everywhere, parameters)):
            noticed = True
            kind, line = type(optimizer).__name__, callsite.current()
            print(
                f"distnb: this cell trains parameters that its ShardedStrategy has not sharded ({kind}, {line}): each "
                "replica holds all of them. Make the model in strategy.scope(). A trainer of another library shards a "
                "model only if you configure its own FSDP: see docs/other_libraries.md.",
                file=sys.stderr,
            )

    handle = register_optimizer_step_pre_hook(notice)
    try:
        yield
    finally:
        handle.remove()


def _is_whole_everywhere(parameter: Any) -> bool:
    """Return whether a parameter is neither a shard, of distnb or of another library, nor made in a scope."""
    is_own = type(parameter) is torch.nn.Parameter and find_mirror(parameter) is None
    return is_own and torch_internals.local_tensor(parameter) is None
