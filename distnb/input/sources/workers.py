"""The processes that load for this one: whether they live, and how they end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import connection, util
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from distnb.compat import loader_internals

__all__ = [
    "end_processes",
    "end_workers",
    "forget_workers",
    "has_lost_workers",
    "has_workers",
    "raise_of_workers_only_while",
]

_PATIENCE_S = 1.0
_TIDY_UP_S = 5.0  # nobody waits for it


def has_workers(loader: DataLoader[Any]) -> bool:
    """Whether persistent workers of a loader wait for the next iteration."""
    return loader_internals.kept_iterator(loader) is not None and not has_lost_workers(loader)


def has_lost_workers(loader: DataLoader[Any]) -> bool:
    """Whether persistent workers of a loader have ended, as those of an interrupted program do."""
    kept = loader_internals.kept_iterator(loader)
    # Not `is_alive()`, which says yes of one that another thread waits for, when it has only just ended.
    return kept is not None and bool(connection.wait([worker.sentinel for worker in loader_internals.workers(kept)], 0))


def forget_workers(loader: DataLoader[Any]) -> None:
    """Have a loader start other workers for its next iteration."""
    loader_internals.forget_iterator(loader)


def end_workers(iterator: Any) -> None:
    """Shut the workers of a DataLoader's iterator down: tracebacks may hold the iterator for long.

    An interrupted program does not wait for one that is stuck.
    """
    if not loader_internals.is_shut_down(iterator):
        threading.Thread(target=_shut_down, args=(iterator,), name="distnb-input-end", daemon=True).start()


def _shut_down(iterator: Any) -> None:
    # Torch waits 5 s for one that is stuck, then ends it without letting it tidy up: it is interrupted before.
    hurry = threading.Timer(_PATIENCE_S, _interrupt, (loader_internals.workers(iterator),))
    hurry.daemon = True
    hurry.start()
    loader_internals.shut_down(iterator)
    hurry.cancel()


_interrupted: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def _interrupt(children: Iterable[BaseProcess]) -> None:
    """Do what Ctrl-C in a terminal would. Once to each: a second one would disturb its tidying up."""
    for child in children:
        if child not in _interrupted and child.pid is not None and child.is_alive():
            _interrupted.add(child)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)


def end_processes(children: Iterable[BaseProcess]) -> None:
    """End them without waiting: those that do not heed an interrupt are terminated in a while."""
    children = list(children)
    _interrupt(children)
    if children:
        threading.Thread(target=_terminate_late, args=(children,), name="distnb-children", daemon=True).start()


def _terminate_late(children: list[BaseProcess]) -> None:
    for child in children:
        child.join(_TIDY_UP_S)
    for child in children:
        if child.is_alive():
            child.terminate()


def raise_of_workers_only_while(running: Callable[[], bool]) -> None:
    """Keep torch's news of a worker that failed away from an engine which runs no program: it would end the engine.

    Torch tells by a handler of SIGCHLD that raises in whatever the main thread does. Who reads on is told anyhow. Call
    it in the main thread, before any loader has begun.
    """
    loader_internals.handle_ends_of_workers()
    tell = signal.getsignal(signal.SIGCHLD)
    assert callable(tell)

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            tell(number, frame)
        except RuntimeError:
            if running():
                raise

    signal.signal(signal.SIGCHLD, handle)


# A worker hands tensors over by a socket that multiprocessing puts into a temporary folder: made late, on a thread that
# the worker's end does not wait for. It stays behind when the worker is terminated, or ends at the wrong moment. So the
# socket has an address that is no file.

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
