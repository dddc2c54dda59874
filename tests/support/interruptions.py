"""An interrupt at every place of distnb's code where one can arrive."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from distnb.frames import OWN, SPARED_S, within

__all__ = ["interrupted_everywhere"]

_FILES = (OWN, contextlib.__file__)


def interrupted_everywhere(function: Callable[[], object]) -> Iterator[int]:
    """Call a function again and again, each time with KeyboardInterrupt raised at another place, and yield after each.

    Python handles a signal as a function begins or a generator continues, and as a call of a function in C ends. (Loops
    are left out.) The places are those in distnb's own code and in the contexts that it enters. Functions that are
    spared are left out, as the guard of an engine does.
    """
    place = 0
    while _interrupted_at(place, function):
        yield place
        place += 1


def _interrupted_at(place: int, function: Callable[[], object]) -> bool:
    """Return whether the function reached the place."""
    places, raised = iter(range(place + 1)), False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal raised
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(_FILES):
            return
        if not raised and not within(frame, SPARED_S) and next(places) == place:
            raised = True
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return raised
