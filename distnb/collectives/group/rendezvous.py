"""The rendezvous of a process group's replicas, by cards that each leaves in a store."""

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
        host: Equal on two replicas if they can open each other's memory.
        pid: Its process.
        log: File descriptor of the collective log's memory, on the replica that made it; else -1.
        device: Identity of its accelerator, or "" on the CPU.
    """

    host: str
    pid: int
    log: int = -1
    device: str = ""


class StoreClient:
    """A connection to a store, made when it is first needed and kept, since a new one can take seconds."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._store: Store | None = None

    @classmethod
    def of(cls, team: Team) -> StoreClient:
        """Return the client of the store where a team of a generation meets; one for the whole process."""
        if not team.store_directory:
            return cls.at(team.store_host, team.store_port)
        # A file for each generation: a replica that is killed while it writes spoils none but that.
        return cls.in_file(os.path.join(team.store_directory, f"store-{team.generation}"))

    @staticmethod
    @functools.cache
    def at(address: str, port: int) -> StoreClient:
        """Return the client of the TCPStore that listens there; one for the whole process."""
        return StoreClient(lambda: _connect(address, port))

    @staticmethod
    @functools.cache
    def in_file(path: str) -> StoreClient:
        """Return the client of the store that is a file; one for the whole process."""
        return StoreClient(lambda: _open(path))

    def store(self) -> Store:
        """Return the connection. Raise CollectiveError if nobody answers."""
        if self._store is None:
            self._store = self._connect()
        return self._store

    def spoil(self) -> None:
        """Use another connection from now on, since a thread that was left behind may block in this one."""
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
    """Exchange cards in a store; see `exchange`.

    Raises:
        CollectiveError: Somebody did not come to `what` is formed in time; without a limit it takes as long as `check`
            allows.
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
    """Leave a value in the store and wait for everyone's, in rank order.

    Args:
        store: Under a prefix that nobody used before.
        rank, size: This replica's rank, and the number of replicas.
        value: This replica's.
        check: Called while waiting, with a function that gives the ranks that have not come; raises when there is
            no point any more.
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
