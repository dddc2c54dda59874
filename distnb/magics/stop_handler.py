"""The handler of Ctrl-C in the notebook, which delays it at moments when it must not be raised."""

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
    """A SIGINT handler that raises KeyboardInterrupt as Python's own does, but delays it where it would do harm.

    A stop while one of Python's locks changes hands would leave the lock taken, and a thread that needs it waiting.
    Such threads are the kernel's IO thread, which sends all output (each flush of a stream waits for an Event that this
    thread sets), and distnb's own threads for drawing and supervision. A stop in IPython's hooks before and after a
    cell would leave them half done, and IPython would drop the stop and still run the cell. In such code (`whole`)
    nothing is raised for up to a second.
    """

    def __init__(self, whole: Collection[CodeType]) -> None:
        self._whole = LOCKING | frozenset(whole)
        self._until: float | None = None  # the time limit while a stop is delayed
        self._handled = 0
        self._is_repeated = False

    def install(self) -> None:
        """Replace Python's own handler of SIGINT, which a kernel installs again for each cell."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._handled += 1
        repeated, self._is_repeated = self._is_repeated, False
        if repeated and self._until is None:
            return  # a repetition of a stop that has been raised in the meantime
        if within(frame, self._whole):
            now = time.monotonic()
            if self._until is None:
                self._until = now + _LIMIT_S
            if now < self._until:
                # Not a threading.Thread, which uses such locks.
                _thread.start_new_thread(self._repeat, (signum, self._handled))
                return
        self._until = None
        signal.default_int_handler(signum, frame)

    def _repeat(self, signum: int, handled: int) -> None:
        time.sleep(_AGAIN_S)
        # A signal may arrive just before a system call, after the main thread has released the interpreter lock to this
        # thread. It is then not handled until the call returns. So it is sent again until it has been handled.
        while self._handled == handled:
            self._is_repeated = True
            signal.pthread_kill(threading.main_thread().ident or 0, signum)
            time.sleep(_UNNOTICED_S)
