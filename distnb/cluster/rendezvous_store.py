"""The rendezvous store, through which the replicas of a team exchange their addresses before they can communicate."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

from distnb.errors import StartError

if TYPE_CHECKING:
    from distnb.compat.c10d_internals import TCPStore

__all__ = ["RendezvousStore", "free_port", "use_rendezvous_files"]

_LOOPBACK = "127.0.0.1"
_BACKLOG = 1024
_TIMEOUT_S = 60.0


def free_port() -> int:
    """Return a port of loopback on which no process listens now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


def use_rendezvous_files(path: str) -> None:
    """Make torch's `env://` rendezvous in this process use files in a private directory instead of a port.

    Scripts use this rendezvous in `init_process_group`. This function imports torch.
    """
    from distnb.compat.c10d_internals import FileStore, rendezvous_handlers

    calls = count()

    def by_file(url: str, timeout: timedelta = timedelta(minutes=30), **given: Any) -> Iterator[tuple[Any, int, int]]:
        query = {name: values[-1] for name, values in parse_qs(urlparse(url).query).items()}
        rank, size = (int(query.get(name, os.environ[name.upper()])) for name in ("rank", "world_size"))
        store = FileStore(f"{path}-{next(calls)}")  # a new file, without the entries of a destroyed group
        store.set_timeout(timeout)
        yield store, rank, size

    rendezvous_handlers["env"] = by_file


class RendezvousStore:
    """A torch TCPStore on one address, served by threads of the process that creates it.

    The port is bound at once, but torch is imported only in `serve`. So engines can get the store's address while torch
    is still loading. Engines that connect early wait in the socket's queue.

    Any process that can reach the store can read and write it. Document each use of an address other than loopback.
    """

    def __init__(self, port: int = 0, host: str = _LOOPBACK) -> None:
        # TCPStore itself would listen on every interface, whatever its host is. It uses a bound socket as it is. Closed
        # connections of an earlier run, in TIME_WAIT, do not block the port.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket: socket.socket | None = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except (OSError, OverflowError) as error:
            raise StartError(
                f"The rendezvous store could not listen on {host}:{port}: {error}. "
                "Does this program run already? If not, choose another port."
            ) from error
        self.host: str = host
        self.port: int = self._socket.getsockname()[1]
        self._store: TCPStore | None = None
        self._lock = threading.Lock()

    def serve(self) -> TCPStore:
        """Start serving and return the store. Import torch if necessary. Later calls return the same store."""
        from distnb.compat.c10d_internals import TCPStore

        with self._lock:
            if self._store is None:
                if self._socket is None:
                    raise StartError(f"The rendezvous store on port {self.port} was closed.")
                self._store = TCPStore(
                    self.host,
                    self.port,
                    None,
                    is_master=True,
                    timeout=timedelta(seconds=_TIMEOUT_S),
                    wait_for_workers=False,
                    master_listen_fd=self._socket.fileno(),
                )
                self._socket.detach()  # from here on the store owns the descriptor
            return self._store

    def close(self) -> None:
        """Stop listening. Replicas that are connected to each other already continue."""
        with self._lock:
            self._store = None
            if self._socket is not None:
                self._socket.close()
                self._socket = None
