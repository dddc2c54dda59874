"""Worker processes of DataLoaders: whether they are alive, and how they end."""

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
from distnb.compat.loader_internals import call_of

__all__ = [
    "end_processes",
    "end_workers",
    "forget_workers",
    "has_lost_workers",
    "has_workers",
    "raise_worker_errors_only_while",
]

_PATIENCE_S = 1.0
_TIDY_UP_S = 5.0  # the time for clean-up; no program waits for it


def has_workers(loader: DataLoader[Any]) -> bool:
    """Return whether persistent workers of a loader wait for the next iteration."""
    return loader_internals.kept_iterator(loader) is not None and not has_lost_workers(loader)


def has_lost_workers(loader: DataLoader[Any]) -> bool:
    """Return whether persistent workers of a loader have ended, as those of an interrupted program do."""
    kept = loader_internals.kept_iterator(loader)
    # Not `is_alive()`, which returns True for a process that has just ended while another thread waits for it.
    return kept is not None and bool(connection.wait([worker.sentinel for worker in loader_internals.workers(kept)], 0))


def forget_workers(loader: DataLoader[Any]) -> None:
    """Make a loader start new workers for its next iteration."""
    loader_internals.forget_iterator(loader)


def end_workers(iterator: Any) -> None:
    """Shut down the workers of a DataLoader's iterator. Tracebacks may keep the iterator alive for long.

    An interrupted program does not wait for a worker that is stuck.
    """
    if not loader_internals.is_shut_down(iterator):
        threading.Thread(target=_shut_down, args=(iterator,), name="distnb-input-end", daemon=True).start()


def _shut_down(iterator: Any) -> None:
    # torch waits 5 s for a stuck worker, then terminates it without clean-up. Interrupt it earlier.
    hurry = threading.Timer(_PATIENCE_S, _interrupt, (loader_internals.workers(iterator),))
    hurry.daemon = True
    hurry.start()
    loader_internals.shut_down(iterator)
    hurry.cancel()


_interrupted: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def _interrupt(children: Iterable[BaseProcess]) -> None:
    """Send SIGINT, as Ctrl-C in a terminal does. Send it once: a second one would disturb the clean-up."""
    for child in children:
        if child not in _interrupted and child.pid is not None and child.is_alive():
            _interrupted.add(child)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)


def end_processes(children: Iterable[BaseProcess]) -> None:
    """End processes without waiting. Those that ignore an interrupt are terminated later."""
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


def raise_worker_errors_only_while(running: Callable[[], bool]) -> None:
    """Suppress torch's error about a failed worker while the engine runs no program: the error would end the engine.

    torch reports it from a handler of SIGCHLD, which raises in the main thread at any point. A thread that
    continues to read the loader gets the error anyway. Call this in the main thread, before the first loader starts.
    """
    loader_internals.handle_ends_of_workers()
    report = signal.getsignal(signal.SIGCHLD)
    assert callable(report)

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            report(number, frame)
        except RuntimeError:
            if running():
                raise

    signal.signal(signal.SIGCHLD, handle)


# Workers use a socket without a file for this reason: A worker sends tensors through a socket that multiprocessing
# creates late, in a temporary folder, on a thread for which the worker does not wait when it ends. If the worker is
# terminated, or ends at the wrong moment, the file remains. An abstract address of a socket is not a file.

_WORKERS = "torch.utils.data._utils.worker"


def _prepare(_: object) -> None:
    """Set the address in a process that multiprocessing has forked from this one, before anything else runs there."""
    target, _ = call_of(multiprocessing.current_process())
    if getattr(target, "__module__", "") == _WORKERS:
        vars(connection)["arbitrary_address"] = _address_without_file


def _address_without_file(family: str) -> str:
    # Linux keeps such a name as long as the socket is open. A peer must know multiprocessing's key to connect.
    return f"\0distnb-{os.getpid()}-{secrets.token_hex(8)}"


util.register_after_fork(_interrupted, _prepare)
