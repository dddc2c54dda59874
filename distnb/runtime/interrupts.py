"""The handling of Ctrl-C while the main thread reads messages. A flag reports it, so no message is lost half-read."""

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
_BRIEFLY_S = 0.2  # the longest time for which `brief` holds SIGINT back
_AGAIN_S = 0.2  # the interval at which `withdraw` sends SIGINT again


class Interrupts:
    """A context in the main thread in which SIGINT is counted and makes `fd` readable instead of raising.

    Python can raise KeyboardInterrupt between any two bytecodes. In this code a reply would be lost:

        reply = socket.recv()     # SIGINT arrives here: the reply has left the socket,
        replies.append(reply)     # but it is never stored, so the wait for it never ends

    If `pop` has not returned a SIGINT by the end of the context, KeyboardInterrupt is raised there. The context may be
    nested. In other threads it changes nothing, because Python handles SIGINT only in the main thread.

    Attributes:
        count: The number of SIGINTs since `pop` was last called.
        fd: The eventfd that becomes readable at a SIGINT; see `drain`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._before: Any = None
        self._depth = 0
        self._until: float | None = None  # in `brief`: until this time one SIGINT is held back
        self._counted = 0  # `count` when `brief` began
        self._questions = self._asking = 0  # the number of questions so far, and the current one's number or 0
        self._withdrawn = False
        self._asked = threading.Lock()  # ensures that `withdraw` sends no SIGINT after its question has ended

    def __enter__(self) -> Interrupts:
        # SIGINT may still raise until the handler is set. Changes before that are harmless if the rest does not follow.
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
        if kind is None and self.pop():  # after the handler is restored, so that a later SIGINT raises by itself
            raise KeyboardInterrupt

    def pop(self) -> bool:
        """Return whether SIGINT has arrived since the last call. The caller must handle it."""
        self._asking = 0  # it is still set if a SIGINT interrupted the end of `raised_in`
        count, self.count = self.count, 0
        return count > 0

    @contextmanager
    def brief(self) -> Iterator[None]:
        """Return a context for packing or unpacking objects, which must not be interrupted in the middle.

        A message that is recorded as sent or received must be complete. But the user's objects determine how long this
        takes. After `_BRIEFLY_S` seconds, or at the second SIGINT, KeyboardInterrupt is raised all the same.
        """
        self._until, self._counted = time.monotonic() + _BRIEFLY_S, self.count
        yield
        self._until = None

    def raised_in(self, ask: Callable[[], T]) -> T | None:
        """Call `ask`, which asks the user a question in the main thread. Meanwhile SIGINT raises as usual.

        Returns:
            The result of `ask`, or None if `withdraw` has ended the question.

        Raises:
            KeyboardInterrupt: The user has pressed Ctrl-C. The caller counts it with `note`.
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
                time.sleep(0)  # a system call, in which a SIGINT that `withdraw` has sent arrives at the latest
            self._withdrawn = False

    def withdraw(self) -> None:
        """End the current question, if there is one, from another thread."""
        if self._asking:
            _thread.start_new_thread(self._press, (self._asking,))

    def _press(self, question: int) -> None:
        # Repeat the signal, because Python drops a KeyboardInterrupt that is raised in a destructor or a callback.
        while True:
            with self._asked:
                if self._asking != question:
                    return
                self._withdrawn = True
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGINT)
            time.sleep(_AGAIN_S)

    def note(self) -> None:
        """Count a SIGINT that was raised as KeyboardInterrupt."""
        self.count += 1

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._asking:
            self._before(signum, frame)
            return
        if self._withdrawn:
            return  # a late signal of `withdraw`
        lasts = self._until is not None and (self.count > self._counted or time.monotonic() > self._until)
        if lasts and not within(frame, _WHOLE):
            raise KeyboardInterrupt
        self.count += 1
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


def drain(eventfd: int) -> None:
    """Reset an eventfd, so that it is no longer readable."""
    try:
        os.eventfd_read(eventfd)
    except BlockingIOError:
        pass


_WHOLE = frozenset({Interrupts.__exit__.__code__})  # not interrupted: half an exit would hold SIGINT back for ever
