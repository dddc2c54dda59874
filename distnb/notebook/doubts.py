"""The doubt about call plans, which is raised wherever the engines, or the notebook's knowledge of them, change.

A planned call changes nothing by itself. Whatever else changes something calls `doubt`, and every plan that was made
before no longer holds. A doubt too many costs the time of one ordinary call, a doubt too few is a wrong number: when
unsure, doubt. See `distnb/notebook/README.md`.
"""

from __future__ import annotations

import itertools

__all__ = ["doubt", "latest_doubt"]

_numbers = itertools.count(1)
_latest = 0


def doubt() -> None:
    """Invalidate all call plans. Any thread may call this."""
    global _latest
    _latest = next(_numbers)  # never a number of before, whatever other threads do


def latest_doubt() -> int:
    """Return the number of the latest doubt. A plan holds while it stays the same."""
    return _latest
