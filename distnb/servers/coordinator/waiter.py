"""A thread that waits for a condition, or for SIGINT."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from distnb.runtime.interrupts import drain

__all__ = ["Waiter"]


class Waiter:
    """A single wait of a thread.

    Args:
        ready: The condition. It is called with the lock under which it may change.
    """

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._woken = False

    def check(self) -> None:
        """Check the condition after a change. The caller holds the lock."""
        if not self._woken and self._ready():
            self._woken = True
            os.eventfd_write(self._fd, 1)

    def wait(self, interrupts_fd: int | None) -> bool:
        """Wait for the condition. Return False if a signal interrupted the wait."""
        if interrupts_fd is not None:
            self._poll.register(interrupts_fd, select.POLLIN)
        ready = [descriptor for descriptor, _ in self._poll.poll()]
        if interrupts_fd in ready and interrupts_fd is not None:
            drain(interrupts_fd)
        return self._fd in ready and self._woken

    def wait_for(self, seconds: float) -> None:
        """Wait for at most this time."""
        if not self._ready():
            self._poll.poll(seconds * 1000)

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self._fd)
