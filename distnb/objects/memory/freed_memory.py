"""Memory that a program has freed, and that malloc and Python keep for this process.

After a training of half a minute, that was a tenth of a notebook's memory and of each of its engines'. After a text
file of 30 MB was read, Python's lists of free objects kept another 9 MB.
"""

from __future__ import annotations

import ctypes
import gc
import time

__all__ = ["keep_freed_memory", "return_freed_memory"]

_LONG_S = 1.0
_LITTLE = 0.02  # of a program's time

_KEPT_NBYTES = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_malloc = ctypes.CDLL(None)
_trim = getattr(_malloc, "malloc_trim", None)  # glibc has it
_latest_collection_s = 0.0


def keep_freed_memory() -> None:
    """Make malloc keep the blocks of tensors that a program frees, since its next step needs them again.

    By default glibc returns each block of more than 128 KiB to the system, until a larger one was freed. The pages of
    new blocks took a quarter of the time of training a small convolutional network.
    """
    if _trim is not None:
        _malloc.mallopt(_M_MMAP_THRESHOLD, _KEPT_NBYTES)
        _malloc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_NBYTES)


def return_freed_memory(began: float) -> None:
    """Return the memory to the system if a program has run for long; `began` is its start, by `time.monotonic`.

    Memory that is needed again costs a millisecond for every few megabytes, which a long program does not notice.
    """
    global _latest_collection_s
    ended = time.monotonic()
    if ended - began < _LONG_S:
        return
    if _latest_collection_s <= _LITTLE * (ended - began):
        gc.collect()  # a full collection empties the lists of free objects
        _latest_collection_s = time.monotonic() - ended
    if _trim is not None:
        _trim(0)
