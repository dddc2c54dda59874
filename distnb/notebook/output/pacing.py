"""How much output a cell may show: a burst at first, then so much a second."""

from __future__ import annotations

__all__ = ["Pace"]


class Pace:
    """A token bucket that, once empty, stays shut until it has filled up a good part.

    Without that, a flood would let single lines through, each with a note about those left out around it.

    Args:
        burst: Units that may come at once.
        per_second: Units that it gains in a second.
        reopen_s: After running empty it stays shut for this long.
    """

    def __init__(self, burst: float, per_second: float, reopen_s: float = 2.0) -> None:
        self._burst = burst
        self._per_second = per_second
        self._reopen = min(burst, per_second * reopen_s)
        self._level = burst
        self._then: float | None = None
        self._shut = False

    def take(self, units: float, now: float) -> bool:
        """Take so many units, or none and False."""
        self._fill(now)
        if self._shut or units > self._level:
            self._shut = True
            return False
        self._level -= units
        return True

    def grant(self, units: float, now: float) -> float:
        """Take as many of these units as there are; returns how many."""
        self._fill(now)
        granted = 0.0 if self._shut else min(units, self._level)
        self._level -= granted
        self._shut = granted < units
        return granted

    def _fill(self, now: float) -> None:
        if self._then is not None:
            self._level = min(self._burst, self._level + (now - self._then) * self._per_second)
        self._then = now
        if self._shut and self._level >= self._reopen:
            self._shut = False
