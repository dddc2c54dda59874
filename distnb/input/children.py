"""How processes that load data for this one are ended: they may tidy up, but they are not waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Iterable
from multiprocessing.process import BaseProcess

__all__ = ["TIDY_UP_S", "end", "interrupt"]

TIDY_UP_S = 5.0  # nobody waits for it; one that is killed leaves its temporary files behind

_interrupted: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def interrupt(children: Iterable[BaseProcess]) -> None:
    """Do what Ctrl-C in a terminal would. Once to each: a second one would disturb its tidying up."""
    for child in children:
        if child not in _interrupted and child.pid is not None and child.is_alive():
            _interrupted.add(child)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)


def end(children: Iterable[BaseProcess]) -> None:
    """End them without waiting: those that do not heed an interrupt are terminated in a while."""
    children = list(children)
    interrupt(children)
    if children:
        threading.Thread(target=_terminate_late, args=(children,), name="distnb-children", daemon=True).start()


def _terminate_late(children: list[BaseProcess]) -> None:
    for child in children:
        child.join(TIDY_UP_S)
    for child in children:
        if child.is_alive():
            child.terminate()
