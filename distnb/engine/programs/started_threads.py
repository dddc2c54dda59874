"""The wait for a program's threads. Like a Python process, a program ends when the threads that it started have ended.

A thread that is not a daemon may still communicate or write a file. torch's `checkpoint.async_save` does both. Python
waits for such threads before it ends, and so does a program here. It does not wait for threads that have nothing to do,
such as the workers of a pool, which later programs may use.

The stack of a thread shows whether the thread works. The stack of a pool's worker does not: an idle worker looks like
one that has just received a task. So the tasks that pools receive are recorded.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import FrameType
from typing import Any

from distnb.compat import patches, threading_internals
from distnb.engine.output import telemetry

__all__ = ["note_work_of_pools", "threads_awaited"]

_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_PATIENCE_S = 1.0
_PYTHON = os.path.dirname(threading.__file__)
# The modules in which the threads of Python's own pools, timers, event loops and servers wait for something to do.
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


_Working = dict[threading.Thread | Future[Any], str]

_given: dict[Future[Any], str] = {}  # the unfinished tasks of pools, with the names of their functions
_idle: dict[int, threading.Thread] = {}  # the threads when there was none that Python would wait for


def note_work_of_pools() -> None:
    """Record, from now on, the tasks that this process submits to the pools of `concurrent.futures`. Idempotent."""
    for pool in ("ThreadPoolExecutor", "ProcessPoolExecutor"):
        patches.wrap(f"concurrent.futures:{pool}.submit", _submit)


def _submit(
    submit: Callable[..., Future[Any]], pool: Executor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any]:
    future = submit(pool, fn, *args, **kwargs)
    _given[future] = getattr(fn, "__qualname__", type(fn).__name__)
    future.add_done_callback(_forget)
    return future


def _forget(future: Future[Any]) -> None:
    _given.pop(future, None)


class threads_awaited:
    """Wait at the end of a successful block for the threads that began to work in it. Use it on the main thread.

    A notice names the threads that take long. Threads that still work for an earlier program, which failed or was
    interrupted, are not waited for again.
    """

    def __enter__(self) -> None:
        self._earlier = _at_work()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and (working := _at_work()):
            _await(working, self._earlier)


def _await(working: _Working, earlier: _Working) -> None:
    pause_s, notified = _PAUSE_S, False
    began = time.monotonic()
    while working := {each: name for each, name in working.items() if each not in earlier}:
        if not notified and time.monotonic() - began > _PATIENCE_S:
            notified = True
            threads = "; ".join(working.values())
            print(
                f"distnb: waiting for threads of this program that still work: {threads}. The stop button ends the "
                "wait. Start a thread with daemon=True if it should outlive the program.",
                file=sys.stderr,
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        working = _at_work()


def _at_work() -> _Working:
    """Return the working threads and unfinished tasks of pools that Python would wait for, each with a description."""
    global _idle
    if threading_internals.active == _idle and not (_given or threading_internals.starting):
        return {}  # a call of Python for each of its threads would take longer than a short program
    threads = threading.enumerate()
    working: _Working = {each: f"{name} in a pool" for each, name in _given.copy().items()}
    main = threading.main_thread()
    if all(thread.daemon or thread is main for thread in threads):
        _idle = {thread.ident: thread for thread in threads if thread.ident is not None}
    else:
        frames = sys._current_frames()
        for thread in threads:
            if thread.daemon or thread is main:
                continue
            if (frame := frames.get(thread.ident or 0)) is not None and not _waits(frame):
                working[thread] = f"{thread.name} ({_place(frame)})"
    return working


def _waits(innermost: FrameType) -> bool:
    """Return whether a thread waits for something to do: all its code is Python's own, and the innermost waits."""
    if innermost.f_code.co_name not in _WAITS:
        return False  # checked first, because a thread that begins has only Python's code on its stack, too
    frame: FrameType | None = innermost
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_POOLS):
            return False
        frame = frame.f_back
    return True


def _place(innermost: FrameType) -> str:
    """Return the innermost line of a thread outside Python's own code."""
    frame: FrameType = innermost
    while frame.f_back is not None and _is_python(frame.f_code.co_filename):
        frame = frame.f_back
    filename = frame.f_code.co_filename
    return telemetry.name_cell(f'File "{filename}", line {frame.f_lineno}, in {frame.f_code.co_name}', filename)


def _is_python(filename: str) -> bool:
    return filename.startswith(_PYTHON) and "-packages" not in filename
