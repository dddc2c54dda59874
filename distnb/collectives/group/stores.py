"""Interruptible waits for torch's stores, whose own waits in C++ ignore signals.

A program may make a store of its own, or use that of its process group: `store.get(key)` waits for a key, and
`TCPStore(host, port)` waits for a listener. torch does both in C++, for minutes, on the main thread. Here the main
thread waits in Python: it polls for the keys, or waits for a thread that it can abandon.

This module runs on the replicas.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from distnb.collectives.group import exits
from distnb.compat import patches
from distnb.compat.c10d_internals import Store, TCPStore
from distnb.errors import CollectiveError

__all__ = ["install"]

_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
_CONNECT_S = 2.0


def install() -> None:
    """Replace the waiting methods of torch's stores. Idempotent."""
    methods: dict[str, Callable[..., Any]] = {
        "get": _get,
        "multi_get": _get,
        "wait": _wait,
        "queue_pop": _on_thread,
        "barrier": _on_thread,
    }
    for name, wrapper in methods.items():
        if hasattr(Store, name):  # not every version of torch has all of them
            patches.wrap(f"torch.distributed:Store.{name}", wrapper)
    patches.wrap("torch.distributed:TCPStore.__init__", _connect)


def _get(original: Callable[..., Any], store: Any, keys: str | Sequence[str]) -> Any:
    _await(store, [keys] if isinstance(keys, str) else list(keys), store.timeout)
    return original(store, keys)


def _wait(original: Callable[..., Any], store: Any, keys: Sequence[str], timeout: timedelta | None = None) -> None:
    _await(store, list(keys), store.timeout if timeout is None else timeout)


def _await(store: Store, keys: list[str], timeout: timedelta) -> None:
    until, pause_s = time.monotonic() + timeout.total_seconds(), _PAUSE_S
    while not store.check(keys):
        if time.monotonic() > until:
            missing = [key for key in keys if not store.check([key])]
            raise DistStoreError(f"wait timeout after {timeout / timedelta(milliseconds=1):.0f}ms, keys: {missing}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _connect(
    original: Callable[..., Any],
    store: TCPStore,
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    *args: Any,
    **kwargs: Any,
) -> None:
    if not is_master:
        _require_listener(host_name, port)
    _on_thread(original, store, host_name, port, world_size, is_master, *args, **kwargs)


def _require_listener(host: str, port: int) -> None:
    """Raise CollectiveError if no replica is going to listen at the address where this program looks for a store.

    Replicas of one machine need no store at MASTER_ADDR and MASTER_PORT. A program may make one there on replica 0
    while the others wait for it. If replica 0 looks for it, too, all would wait in vain.
    """
    environment = os.environ
    named = (environment.get("MASTER_ADDR"), environment.get("MASTER_PORT"))
    if environment.get("RANK") != "0" or (host, str(port)) != named:
        return
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        raise CollectiveError(
            f"Replica 0 looks for a store at {host}:{port} (MASTER_ADDR and MASTER_PORT), where nobody listens "
            f"({error}): replicas of one machine meet without one. Make a store there before, on all replicas: "
            '`store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), '
            'is_master=os.environ["RANK"] == "0", wait_for_workers=False)`. Other users can connect to it.'
        ) from error


def _on_thread(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method on a separate thread, which is abandoned if the wait for it is interrupted."""
    called: Future[Any] = Future()

    def call() -> None:
        try:
            called.set_result(original(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  (raised where it is waited for)
            called.set_exception(error)

    thread = threading.Thread(target=call, name="distnb-store", daemon=True)
    exits.note(thread)
    thread.start()
    return called.result()
