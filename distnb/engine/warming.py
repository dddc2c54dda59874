"""What first programs would wait for, loaded while the engine is idle.

Not by a thread: two threads that import what imports each other find modules half-made (`torch._inductor`, when one
imports `torch._dynamo` and the other `torch.compile`'s parts), and fail both. So programs and these imports take turns
on the main thread.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence

from tornado.ioloop import IOLoop

__all__ = ["warm_up_when_idle"]

_IDLE_S = 2.0
# The first optimizer of a process imports torch._dynamo, and so do others of torch's own functions: 1.5 to 3 s. Those
# before it are parts of it: a program that comes meanwhile waits for one of them only.
_MODULES = ("sympy", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")


def warm_up_when_idle(idle_s: Callable[[], float], modules: Sequence[str] = _MODULES) -> None:
    """Load modules one by one once no program has run for some seconds; to be called on the event loop's thread.

    Programs that follow each other closely load what they need themselves, and are not disturbed meanwhile.

    Args:
        idle_s: For how long no program has run; 0 while one does.
        modules: Their names.
    """
    loop = IOLoop.current()
    left = list(modules)

    def load_when_idle() -> None:
        if idle_s() <= _IDLE_S:
            loop.call_later(_IDLE_S, load_when_idle)  # a program runs the event loop, or has just done so
            return
        with contextlib.suppress(Exception):  # who needs it hears of it
            importlib.import_module(left.pop(0))
        if left:
            loop.call_later(0, load_when_idle)  # after the programs that came meanwhile

    loop.call_later(_IDLE_S, load_when_idle)
