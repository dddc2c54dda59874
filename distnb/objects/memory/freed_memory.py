"""Memory that a program has freed, and that malloc keeps for this process.

After a training of half a minute, that was a tenth of a notebook's memory and of each of its engines'.
"""

from __future__ import annotations

import ctypes
import time

__all__ = ["return_freed_memory"]

_LONG_S = 1.0

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


def return_freed_memory(began: float) -> None:
    """Return the memory to the system if a program has run for long; `began` is its start, by `time.monotonic`.

    Memory that is needed again costs a millisecond for every few megabytes, which a long program does not notice.
    """
    if _trim is not None and time.monotonic() - began >= _LONG_S:
        _trim(0)
