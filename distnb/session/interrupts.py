"""Ctrl-C while the main thread reads messages: told by a flag, so that no message is lost half-read."""

from __future__ import annotations

import os
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # `signal`'s wrappers cost 30 µs a call
from _signal import signal as set_handler
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupts"]

_SIGINT = int(signal.SIGINT)


class Interrupts:
    """Within it, in the main thread, SIGINT sets `count` and makes `fd` readable instead of raising.

    KeyboardInterrupt can arise between any two bytecodes, also after a reply was taken from the socket and before
    it was kept: the wait for that reply would never end. In other threads nothing changes; SIGINT never comes there.
    """

    def __init__(self) -> None:
        self.count = 0
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        self.count = 0
        if threading.get_ident() == threading.main_thread().ident:
            self._before = getsignal(_SIGINT)
            if callable(self._before):
                set_handler(_SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if callable(self._before):
            set_handler(_SIGINT, self._before)
        self._before = None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        os.eventfd_write(self.fd, 1)

    def drain(self) -> None:
        """Make `fd` unreadable again."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self.fd)
