"""What first programs would wait for, loaded while the engine is idle."""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
from collections.abc import Callable

from tornado.ioloop import IOLoop

__all__ = ["warm_up_when_idle"]

_IDLE_S = 1.0
# The first optimizer of a process imports it, and so do others of torch's own functions: 1.5 to 3 s.
_MODULES = ("torch._dynamo",)


def warm_up_when_idle(is_idle: Callable[[], bool], is_new: Callable[[], bool]) -> None:
    """Load them once this engine has been idle for a second, in a thread; to be called on the event loop's thread.

    A program that is the first thing an engine hears loads what it needs itself, and is not disturbed meanwhile.

    Args:
        is_idle: Whether no program runs.
        is_new: Whether none has run so far.
    """
    loop = IOLoop.current()

    def look() -> None:
        if is_idle():
            threading.Thread(target=load, name="distnb-warm-up", daemon=True).start()
        else:
            loop.call_later(_IDLE_S, look)

    def load() -> None:
        for name in _MODULES:
            with contextlib.suppress(Exception):  # who needs it hears of it
                importlib.import_module(name)
        loop.add_callback(spare_collector)

    def spare_collector() -> None:
        if is_new():  # nothing of the user's is there yet, which one day may be garbage
            gc.freeze()

    loop.call_later(_IDLE_S, look)
