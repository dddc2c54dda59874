"""Threads that a program starts belong to it: it ends when they have ended, as a Python process does.

A thread that the notebook's user did not start as a daemon may still communicate or write a file: torch's
`checkpoint.async_save` does both. Python waits for such threads before it ends, and so does a program here. It does not
wait for threads that have nothing to do, such as the workers of a pool: later programs may go on to use them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from distnb.engine.output import telemetry

__all__ = ["threads_awaited"]

_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_PATIENCE_S = 1.0
_PYTHON = os.path.dirname(threading.__file__)
# Where the threads of Python's own pools, timers, event loops and servers are while they wait for something to do.
_POOLS = tuple(
    os.path.join(_PYTHON, *path.split("/"))
    for path in (
        "threading.py",
        "queue.py",
        "selectors.py",
        "socketserver.py",
        "concurrent/futures/thread.py",
        "concurrent/futures/process.py",
        "multiprocessing/connection.py",
        "asyncio/",
    )
)
_WAITS = frozenset({"wait", "select", "_worker"})


@contextmanager
def threads_awaited() -> Iterator[None]:
    """Wait, at the end of a block that ends well, for the threads that began to work in it; on the main thread.

    A notice names those that take long. Threads that an earlier program left at work, since it failed or was
    interrupted, are not waited for again.
    """
    earlier = set(_working())  # not their frames, which keep what the threads hold
    yield
    pause_s, told = _PAUSE_S, False
    began = time.monotonic()
    while places := {thread: _place(frame) for thread, frame in _working().items() if thread not in earlier}:
        if not told and time.monotonic() - began > _PATIENCE_S:
            told = True
            threads = "; ".join(f"{thread.name} ({place})" for thread, place in places.items())
            print(
                f"distnb: waiting for threads that were started here and still work: {threads}. The stop button ends "
                "the wait. Start a thread with daemon=True if it is meant to go on.",
                file=sys.stderr,
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _working() -> dict[threading.Thread, FrameType]:
    """Return the threads that Python would wait for and that do something now, with their innermost frames."""
    main = threading.main_thread()
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
    if not threads:
        return {}
    frames = sys._current_frames()
    innermost = [(thread, frames.get(thread.ident or 0)) for thread in threads]
    return {thread: frame for thread, frame in innermost if frame is not None and not _waits(frame)}


def _waits(innermost: FrameType) -> bool:
    """Return whether a thread waits for something to do: it runs no code but Python's own, and that waits."""
    if innermost.f_code.co_name not in _WAITS:
        return False  # a thread that begins has no other code on its stack yet, either
    if innermost.f_code.co_name == "_worker" and not innermost.f_locals["work_queue"].empty():
        return False
    frame: FrameType | None = innermost
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_POOLS):
            return False
        frame = frame.f_back
    return True


def _place(innermost: FrameType) -> str:
    """Return the innermost line of a thread that is not Python's own."""
    frame: FrameType = innermost
    while frame.f_back is not None and _is_python(frame.f_code.co_filename):
        frame = frame.f_back
    filename = frame.f_code.co_filename
    return telemetry.name_cell(f'File "{filename}", line {frame.f_lineno}, in {frame.f_code.co_name}', filename)


def _is_python(filename: str) -> bool:
    return filename.startswith(_PYTHON) and "-packages" not in filename
