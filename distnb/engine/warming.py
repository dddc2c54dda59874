"""What first programs would wait for, loaded while the engine is idle."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable

from tornado.ioloop import IOLoop

__all__ = ["warm_up_when_idle"]

_IDLE_S = 1.0
# The first optimizer of a process imports it, and so do others of torch's own functions: 1.5 to 3 s.
_MODULES = ("torch._dynamo",)


def warm_up_when_idle(is_idle: Callable[[], bool]) -> None:
    """Load them once this engine has been idle for a second, in a thread; to be called on the event loop's thread.

    A program that is the first thing an engine hears loads what it needs itself, and is not disturbed meanwhile.
    """

    def look() -> None:
        if is_idle():
            threading.Thread(target=_load, name="distnb-warm-up", daemon=True).start()
        else:
            IOLoop.current().call_later(_IDLE_S, look)

    IOLoop.current().call_later(_IDLE_S, look)


def _load() -> None:
    for name in _MODULES:
        with contextlib.suppress(Exception):  # who needs it hears of it
            importlib.import_module(name)
