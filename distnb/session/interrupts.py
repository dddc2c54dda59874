"""Ctrl-C while the main thread reads messages: told by a flag, so that no message is lost half-read."""

from __future__ import annotations

import os
import signal
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]  # `signal`'s wrappers cost 30 µs a call
from _signal import signal as set_handler
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupts"]

_SIGINT = int(signal.SIGINT)
_PACKING_S = 0.2


class Interrupts:
    """Within it, in the main thread, SIGINT sets `count` and makes `fd` readable instead of raising.

    It may be entered again within itself.

    KeyboardInterrupt can arise between any two bytecodes, also after a reply was taken from the socket and before
    it was kept: the wait for that reply would never end. In other threads nothing changes; SIGINT never comes there.
    """

    def __init__(self) -> None:
        self.count = 0
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._before: Any = None
        self._depth = 0
        self._packing: float | None = None

    def __enter__(self) -> Interrupts:
        self._depth += 1
        if self._depth > 1:
            return self
        self.count = 0
        if threading.get_ident() == threading.main_thread().ident:
            self._before = getsignal(_SIGINT)
            if callable(self._before):
                set_handler(_SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._packing = None
        if callable(self._before):
            set_handler(_SIGINT, self._before)
        self._before = None

    def packing(self) -> None:
        """From now until `packed`, a program is packed: what is noted as sent must be sent.

        How long that takes is the user's objects' affair, so where it takes long SIGINT raises all the same.
        """
        self._packing = time.monotonic()

    def packed(self) -> None:
        """From now on it is sent, and waited for."""
        self._packing = None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._packing is not None and (self.count or time.monotonic() > self._packing + _PACKING_S):
            raise KeyboardInterrupt
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
