"""The end of the process: no thread may be on its way back from torch's C++ to Python then.

Such a thread asks for Python's lock, which an ending interpreter does not give: it ends the thread instead, in the
middle of C++ that does not expect it, and so the process ("terminate called without an active exception").
"""

from __future__ import annotations

import threading
import time
import weakref

__all__ = ["ending", "join_all", "note"]

ending = threading.Event()
"""Set when the interpreter is about to end. Threads that wait for something look at it."""

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def note(thread: threading.Thread) -> None:
    """Have the interpreter's end wait a while for this thread, which calls C++ or destroys its objects."""
    _threads.add(thread)


def join_all(until: float) -> None:
    """Wait for all such threads, at most until a moment of `time.monotonic`."""
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, until - time.monotonic()))
