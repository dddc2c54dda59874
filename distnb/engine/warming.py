"""Imports of slow modules while the engine is idle, so that first programs need not wait for them.

A second thread cannot import them. If the imports of two threads depend on each other, both find half-initialised
modules and fail (`torch._inductor` does, when one thread imports `torch._dynamo` and the other the parts of
`torch.compile`). Programs and these imports therefore take turns on the main thread.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence

from tornado.ioloop import IOLoop

__all__ = ["warm_up_when_idle"]

_IDLE_S = 2.0
# The first optimizer of a process, and other functions of torch, import torch._dynamo, which takes 1.5 to 3 s. The
# modules before it in this list are parts of it. They are imported one by one, so a program waits for one at most.
_MODULES = ("sympy", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")


def warm_up_when_idle(idle_s: Callable[[], float], modules: Sequence[str] = _MODULES) -> None:
    """Load modules one by one once no program has run for some seconds. Call it on the event loop's thread.

    Programs that follow each other closely are not delayed. They import the modules themselves.

    Args:
        idle_s: Returns the time since the latest program ended; 0 while one runs.
        modules: The names of the modules.
    """
    loop = IOLoop.current()
    left = list(modules)

    def load_when_idle() -> None:
        if idle_s() <= _IDLE_S:
            loop.call_later(_IDLE_S, load_when_idle)  # a program runs the event loop, or has just done so
            return
        with contextlib.suppress(Exception):  # raised again where a program imports the module
            importlib.import_module(left.pop(0))
        if left:
            loop.call_later(0, load_when_idle)  # after the programs that arrived meanwhile

    loop.call_later(_IDLE_S, load_when_idle)
