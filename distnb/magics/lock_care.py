"""Ctrl-C in a cell, at a moment when a lock of Python's changes hands."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from types import FrameType

from distnb.frames import LOCKING, within

__all__ = ["LockCare"]

_LIMIT_S = 1.0
_AGAIN_S = 0.001


class LockCare:
    """A handler of SIGINT that raises KeyboardInterrupt as Python's own does, but not while a lock changes hands.

    A stop there would leave the lock taken, and a thread that needs it for the good of all waiting: the kernel's, which
    sends all output (each flush of a stream waits for an Event that it sets), and those of ours that draw and
    supervise.
    """

    def __init__(self) -> None:
        self._until: float | None = None

    def install(self) -> None:
        """Handle SIGINT from now on, where Python's own handler did. A kernel puts that in place for each cell anew."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def remove(self) -> None:
        """Give the place back to Python's."""
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if within(frame, LOCKING):
            now = time.monotonic()
            if self._until is None:
                self._until = now + _LIMIT_S
            if now < self._until:
                # Not a threading.Thread: those use such locks.
                _thread.start_new_thread(_repeat, (signum,))
                return
        self._until = None
        signal.default_int_handler(signum, frame)


def _repeat(signum: int) -> None:
    time.sleep(_AGAIN_S)
    signal.pthread_kill(threading.main_thread().ident or 0, signum)
