"""The end of the process, at which no thread may be returning from torch's C++ to Python.

Such a thread requests Python's lock. An interpreter that is ending does not grant it: it ends the thread in the middle
of C++ code that does not expect this, and with it the process ("terminate called without an active exception").
"""

from __future__ import annotations

import threading
import time
import weakref

__all__ = ["ending", "join_all", "note"]

ending = threading.Event()
"""Set when the interpreter is about to end. Threads that wait check it."""

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def note(thread: threading.Thread) -> None:
    """Register this thread, which calls C++ or destroys its objects, so that the interpreter's end waits a while for
    it."""
    _threads.add(thread)


def join_all(until: float) -> None:
    """Wait for all registered threads, at most until a deadline of `time.monotonic`."""
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, until - time.monotonic()))
