"""Ctrl-C while the main thread reads messages: a flag reports it, so that no message is lost half-read."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]  # `signal`'s wrappers cost 30 µs a call
from _signal import signal as set_handler
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

from distnb.frames import within

__all__ = ["Interrupts", "drain"]

T = TypeVar("T")

_SIGINT = int(signal.SIGINT)
_BRIEFLY_S = 0.2
_AGAIN_S = 0.2


class Interrupts:
    """A context in the main thread in which SIGINT is counted and makes `fd` readable instead of raising.

    What nobody has taken is raised at its end. It may be entered again within itself.

    KeyboardInterrupt can arise between any two bytecodes, also after a reply was taken from the socket and before
    it was kept: the wait for that reply would never end. In other threads nothing changes; SIGINT never comes there.
    """

    def __init__(self) -> None:
        self.count = 0
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._before: Any = None
        self._depth = 0
        self._until: float | None = None  # for so long, and for one press, it is held back
        self._counted = 0
        self._questions = self._asking = 0  # how many the user was asked, and which he is asked now
        self._withdrawn = False
        self._asked = threading.Lock()  # for who is asked not to be withdrawn when that is over

    def __enter__(self) -> Interrupts:
        # SIGINT may raise until it is held back: what is changed before is as good without it.
        if not self._depth:
            self.count = 0
            self._before = None
            if threading.get_ident() == threading.main_thread().ident:
                before = getsignal(_SIGINT)
                if callable(before):
                    set_handler(_SIGINT, self._note)
                    self._before = before
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._until = None
        if self._before is not None:
            set_handler(_SIGINT, self._before)
        if kind is None and self.take():  # only now: from here on SIGINT raises by itself
            raise KeyboardInterrupt

    def take(self) -> bool:
        """Return whether SIGINT has come since the last call. The caller handles it."""
        self._asking = 0  # if a SIGINT came just as that ended
        count, self.count = self.count, 0
        return count > 0

    @contextmanager
    def brief(self) -> Iterator[None]:
        """Enter a context in which objects are packed or unpacked: all that is noted as sent or received must be so.

        How long that takes is up to the user's objects: where it takes long, SIGINT raises all the same.
        """
        self._until, self._counted = time.monotonic() + _BRIEFLY_S, self.count
        yield
        self._until = None

    def raised_in(self, ask: Callable[[], T]) -> T | None:
        """Ask the user something, in the main thread: there SIGINT raises as ever. None: `withdraw` has ended it.

        Raises:
            KeyboardInterrupt: The user's, which `note` counts.
        """
        self._questions += 1
        self._asking = self._questions
        try:
            return ask()
        except KeyboardInterrupt:
            if self._withdrawn:
                return None
            raise
        finally:
            self._asking = 0
            with self._asked:
                time.sleep(0)  # what a withdrawal has sent by now arrives, at the latest, in this call of the system
            self._withdrawn = False

    def withdraw(self) -> None:
        """Stop asking, from another thread, the party that is asked at the moment."""
        if self._asking:
            _thread.start_new_thread(self._press, (self._asking,))

    def _press(self, question: int) -> None:
        # More than once: one that is raised in a destructor or a callback is dropped.
        while True:
            with self._asked:
                if self._asking != question:
                    return
                self._withdrawn = True
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGINT)
            time.sleep(_AGAIN_S)

    def note(self) -> None:
        """Count a SIGINT that was raised like one that was not."""
        self.count += 1

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._asking:
            self._before(signum, frame)
            return
        if self._withdrawn:
            return  # it comes late
        lasts = self._until is not None and (self.count > self._counted or time.monotonic() > self._until)
        if lasts and not within(frame, _WHOLE):
            raise KeyboardInterrupt
        self.count += 1
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self.fd)


def drain(eventfd: int) -> None:
    """Make it unreadable again."""
    try:
        os.eventfd_read(eventfd)
    except BlockingIOError:
        pass


_WHOLE = frozenset({Interrupts.__exit__.__code__})  # half of it would leave SIGINT held back for ever
