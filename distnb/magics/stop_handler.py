"""Ctrl-C in the notebook, at a moment when it must not be raised."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Collection
from types import CodeType, FrameType

from distnb.frames import LOCKING, within

__all__ = ["StopHandler"]

_LIMIT_S = 1.0
_AGAIN_S = 0.001
_UNNOTICED_S = 0.05


class StopHandler:
    """A handler of SIGINT that raises KeyboardInterrupt as Python's own does, but a little later where that would harm.

    A stop while a lock of Python's changes hands would leave the lock taken, and a thread that needs it waiting: the
    kernel's, which sends all output (each flush of a stream waits for an Event that it sets), and those of ours that
    draw and supervise. A stop in what IPython calls before and after a cell would leave that half done, and IPython
    would drop it and run the cell all the same: nothing is raised in such code (`whole`) for a second.
    """

    def __init__(self, whole: Collection[CodeType]) -> None:
        self._whole = LOCKING | frozenset(whole)
        self._until: float | None = None  # while a stop is put off
        self._handled = 0
        self._is_repeated = False

    def install(self) -> None:
        """Handle SIGINT from now on, where Python's own handler did. A kernel puts that in place for each cell anew."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._handled += 1
        repeated, self._is_repeated = self._is_repeated, False
        if repeated and self._until is None:
            return  # one that was thought to be unnoticed, and was raised meanwhile
        if within(frame, self._whole):
            now = time.monotonic()
            if self._until is None:
                self._until = now + _LIMIT_S
            if now < self._until:
                # Not a threading.Thread: those use such locks.
                _thread.start_new_thread(self._repeat, (signum, self._handled))
                return
        self._until = None
        signal.default_int_handler(signum, frame)

    def _repeat(self, signum: int, handled: int) -> None:
        time.sleep(_AGAIN_S)
        # Just before a system call, where the main thread has let go of the interpreter and this one runs, a signal is
        # taken and not noticed until that call returns: so it is sent until it is.
        while self._handled == handled:
            self._is_repeated = True
            signal.pthread_kill(threading.main_thread().ident or 0, signum)
            time.sleep(_UNNOTICED_S)
