"""How processes that load data for this one are ended: they may tidy up, but they are not waited for.

A DataLoader's worker hands tensors over by a socket that multiprocessing puts into a temporary folder: made late, on a
thread that the worker's end does not wait for. It stays behind when the worker is terminated, or ends at the wrong
moment. So the socket has an address that is no file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import threading
import weakref
from collections.abc import Iterable
from multiprocessing import connection, util
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["TIDY_UP_S", "end", "interrupt"]

TIDY_UP_S = 5.0  # nobody waits for it

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


# -- in the workers ----------------------------------------------------------------------------------------------------

_WORKERS = "torch.utils.data._utils.worker"


def _prepare(_: object) -> None:
    """Called first of all in each process that multiprocessing forks from this one."""
    process: Any = multiprocessing.current_process()
    if getattr(process._target, "__module__", "") == _WORKERS:
        vars(connection)["arbitrary_address"] = _address_without_file


def _address_without_file(family: str) -> str:
    # Linux keeps such a name as long as the socket is open; who connects must know multiprocessing's key.
    return f"\0distnb-{os.getpid()}-{secrets.token_hex(8)}"


util.register_after_fork(_interrupted, _prepare)
