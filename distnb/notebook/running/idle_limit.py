"""The time after which engines that nobody uses end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from distnb.errors import DistnbError

__all__ = ["IdleLimit"]

_logger = logging.getLogger("distnb.notebook")

_CHECKS = 20  # in the time of the limit


class IdleLimit:
    """The thread that notices that the engines were not used for some time.

    Args:
        limit_s: The time in seconds.
        latest: Returns the number of the latest program that has ended; None while one runs, or while there are no
            engines.
        expire: Called with that number when the time is over. If it raises an error of distnb's, the time begins again.
    """

    def __init__(self, limit_s: float, latest: Callable[[], int | None], expire: Callable[[int], None]) -> None:
        self._limit_s = limit_s
        self._latest = latest
        self._expire = expire
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="distnb-idle-limit", daemon=True).start()

    def _watch(self) -> None:
        program, since = self._latest(), time.monotonic()
        while not self._closed.wait(self._limit_s / _CHECKS):
            latest, now = self._latest(), time.monotonic()
            if latest is None or latest != program:
                program, since = latest, now
            elif now - since >= self._limit_s:
                try:
                    self._expire(latest)
                except (DistnbError, KeyboardInterrupt):
                    _logger.exception("idle engines were not ended")
                since = now

    def close(self) -> None:
        """End the thread, unless it is ending the engines just now."""
        self._closed.set()
