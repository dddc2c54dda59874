"""Ending exactly the program that runs, from another thread, and never the engine.

A real-time signal of our own reaches the main thread; its handler raises only while the program's guarding frame
is on the stack. SIGINT would not do: user code swaps its handler, and libraries ignore it.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from distnb.errors import ProgramAborted

__all__ = ["Guard"]

_SIGNAL = signal.SIGRTMIN + 5
_RETRY_S = (0.0, 0.25, 0.5)  # then once a second: user code in a `finally` is given time to clean up
_LATER_S = 1.0


class Guard:
    """Knows which program runs in the main thread, and raises in it on demand.

    Make it in the main thread.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._lock = threading.Lock()
        self._program: int | None = None
        self._frame: FrameType | None = None
        self._reason: str | None = None
        self._interrupted = False
        self._presses = 0
        self._next_press = 0.0
        signal.signal(_SIGNAL, self._handle)

    @contextmanager
    def watching(self, program: int) -> Iterator[None]:
        """Within it, and only there, `abort(program)` raises in this thread."""
        with self._lock:
            self._program, self._reason, self._interrupted, self._presses = program, None, False, 0
        self._frame = sys._getframe()
        try:
            yield
        finally:
            self._frame = None
            with self._lock:
                self._program = None

    @property
    def aborted(self) -> bool:
        """Whether the last program was told to end. Whatever it then raised is a consequence, not a cause."""
        return self._reason is not None

    @property
    def interrupted(self) -> bool:
        """Whether it was the user who ended it."""
        return self._interrupted

    def abort(self, program: int, reason: str, *, interrupted: bool = False) -> bool:
        """Order the end of a program, from another thread. False if it is not the one that runs."""
        with self._lock:
            if self._program != program:
                return False
            if self._reason is None:
                self._reason, self._interrupted, self._next_press = reason, interrupted, time.monotonic()
        return True

    def press(self) -> None:
        """Send the signal if it is due; the control thread calls this often.

        One signal may be swallowed (in a destructor, a callback, a bare `except`), so it is sent again.
        """
        with self._lock:
            if self._program is None or self._reason is None or time.monotonic() < self._next_press or self._main is None:
                return
            self._presses += 1
            self._next_press = time.monotonic() + (_RETRY_S[self._presses] if self._presses < len(_RETRY_S) else _LATER_S)
            signal.pthread_kill(self._main, _SIGNAL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._reason is None or self._frame is None:
            return  # the program ended in the meantime: an idle engine must live on
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        if frame is not None:
            raise KeyboardInterrupt(self._reason) if self._interrupted else ProgramAborted(self._reason)
