"""How processes that load data for this one are ended: they may tidy up, but they are not waited for.

A DataLoader's worker makes its temporary folder, for the socket by which tensors are handed over, late and on a thread
that its end does not wait for; and an interrupt can find it tidying up already. Either would leave the folder behind.
So the folder is there, and known as one to remove, before anything else, and tidying up is not interrupted.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Iterable
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import Any

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


# -- in the workers ----------------------------------------------------------------------------------------------------

_WORKERS = "torch.utils.data._utils.worker"
_BEFORE_ALL, _AFTER_ALL = 1000, -100  # multiprocessing's own finalizers have priorities in between


def _prepare(_: object) -> None:
    """Called first of all in each process that multiprocessing forks from this one."""
    process: Any = multiprocessing.current_process()
    if getattr(process._target, "__module__", "") != _WORKERS or process._config.get("tempdir") is not None:
        return
    util.Finalize(None, signal.signal, args=(signal.SIGINT, signal.SIG_IGN), exitpriority=_BEFORE_ALL)
    folder = os.path.join(tempfile.gettempdir(), f"pymp-{secrets.token_hex(4)}")
    util.Finalize(None, _remove, args=(folder,), exitpriority=_AFTER_ALL)  # known before it is there
    os.mkdir(folder, 0o700)
    process._config["tempdir"] = folder


def _remove(folder: str) -> None:
    for _ in range(3):  # the thread that hands tensors over may be adding its socket
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


util.register_after_fork(_interrupted, _prepare)
