"""The rendezvous of a process group's replicas, which leave a card each in a store."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

from distnb.compat.c10d_internals import FileStore, PrefixStore, Store, TCPStore
from distnb.errors import CollectiveError
from distnb.topology import Team

__all__ = ["Card", "StoreClient", "exchange", "meet"]

_CONNECT = timedelta(seconds=60)


@dataclass(frozen=True)
class Card:
    """A replica's description of itself.

    Attributes:
        host: A text that is equal on two replicas if they can open each other's memory.
        pid: Its process id.
        log: The file descriptor of the collective log's memory on the replica that made it; -1 on the others.
        device: Its device.
        accelerator: A name of the device that is unique on the host.
    """

    host: str
    pid: int
    log: int = -1
    device: str = ""
    accelerator: str = ""


class StoreClient:
    """A connection to a store, made at its first use and kept, because a new one can take seconds."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._store: Store | None = None

    @classmethod
    def of(cls, team: Team) -> StoreClient:
        """Return this process's client of the store of a team and generation."""
        if not team.store_directory:
            return cls.at(team.store_host, team.store_port)
        # One file per generation, because a replica that is killed while it writes corrupts the file.
        return cls.in_file(os.path.join(team.store_directory, f"store-{team.generation}"))

    @staticmethod
    @functools.cache
    def at(address: str, port: int) -> StoreClient:
        """Return this process's client of the TCPStore at that address."""
        return StoreClient(lambda: _connect(address, port))

    @staticmethod
    @functools.cache
    def in_file(path: str) -> StoreClient:
        """Return this process's client of the store in that file."""
        return StoreClient(lambda: _open(path))

    def store(self) -> Store:
        """Return the connection. Raise CollectiveError if the store does not answer."""
        if self._store is None:
            self._store = self._connect()
        return self._store

    def spoil(self) -> None:
        """Use another connection from now on, because an abandoned thread may block in this one."""
        self._store = None


def _open(path: str) -> Store:
    store = FileStore(path)
    store.set_timeout(_CONNECT)
    return store


def _connect(address: str, port: int) -> Store:
    try:
        return TCPStore(address, port, None, is_master=False, wait_for_workers=False, timeout=_CONNECT)
    except RuntimeError as error:
        raise CollectiveError(f"The rendezvous store at {address}:{port} does not answer: {error}") from error


def meet(
    store: Store,
    rank: int,
    size: int,
    card: Card,
    check: Callable[[Callable[[], list[int]]], None],
    *,
    timeout_s: float | None = None,
    what: str = "the process group",
) -> list[Card]:
    """Exchange cards in a store (see `exchange`).

    Raises:
        CollectiveError: A replica did not arrive in time for `what`. Without a limit, `check` ends the wait.
    """
    began = time.monotonic()

    def check_limit(absent: Callable[[], list[int]]) -> None:
        check(absent)
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            missing = ", ".join(map(str, absent()))
            raise CollectiveError(
                f"Rank {rank} waited {timeout_s:g} s for {what}; these of {size} ranks did not come: {missing}."
            )

    cards = exchange(PrefixStore("card", store), rank, size, json.dumps(asdict(card)), check_limit)
    return [Card(**json.loads(each)) for each in cards]


def exchange(
    store: Store, rank: int, size: int, value: str, check: Callable[[Callable[[], list[int]]], None]
) -> list[bytes]:
    """Leave a value in the store, and return all ranks' values in rank order.

    Args:
        store: The store, under a new prefix.
        rank, size: This replica's rank, and the number of replicas.
        value: This replica's value.
        check: Called while waiting, with a function that returns the absent ranks; raises an error to end the wait.
    """
    store.set(str(rank), value)
    keys = [str(other) for other in range(size)]

    def absent() -> list[int]:
        return [other for other, key in enumerate(keys) if not store.check([key])]

    pause = 0.0002
    while not store.check(keys):
        check(absent)
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return [store.get(key) for key in keys]
