"""The rendezvous of a process group's replicas, which leave a card each in a store."""

from __future__ import annotations

import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from distnb.compat.c10d_internals import FileStore, PrefixStore, Store, TCPStore
from distnb.errors import CollectiveError
from distnb.topology import Team

__all__ = ["Card", "StoreClient", "absent", "attempt", "exchange", "meet"]

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


def attempt(store: Store, rank: int, size: int, timeout_s: float | None = None) -> str:
    """Return a name for this start of the replicas, the same on all and different from that of every other start.

    torchrun starts all processes again when one is lost, and keeps its store, so a rank would find the keys of its dead
    predecessors. (Its count of restarts differs between machines.) Here each process leaves a name of its own. Rank 0
    proposes the names that it finds. The others accept a proposal if it has their own name in their place:

        rank 0                                    rank 1
                                                  name/1 = b7
        name/0 = a4; names: a4, 1c (a dead one)
        proposal = a4 1c                          1c is not mine
        names: a4, b7; proposal = a4 b7           accepted/a4 b7/1
        all have accepted: begun/a4 b7            begun: the start's name is "a4 b7"

    Args:
        store: The store.
        rank, size: This replica's rank, and the number of replicas.
        timeout_s: The time limit.

    Raises:
        CollectiveError: A replica did not arrive in time.
    """
    check = _limited(rank, size, timeout_s, "the other replicas' start")
    mine = secrets.token_hex(8)
    store.set(f"name/{rank}", mine)
    places = [f"name/{other}" for other in range(size)]
    pause = 0.0002
    while True:
        proposal = ""
        if rank == 0 and store.check(places):
            names = [store.get(place).decode() for place in places]
            if names[0] == mine:  # else another process has taken this rank, and this one is about to be ended
                proposal = "-".join(names)
                store.set("proposal", proposal)
        elif rank and store.check(["proposal"]):
            found = store.get("proposal").decode()
            if found.split("-")[rank : rank + 1] == [mine]:
                proposal = found
                store.set(f"accepted/{proposal}/{rank}", "")
        accepted = [f"accepted/{proposal}/{other}" for other in range(1, size)]
        if proposal and rank == 0 and store.check(accepted):
            store.set(f"begun/{proposal}", "")
        if proposal and store.check([f"begun/{proposal}"]):
            return proposal
        check(lambda: absent(store, places))
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _limited(rank: int, size: int, timeout_s: float | None, what: str) -> Callable[[Callable[[], list[int]]], None]:
    """Return a function that raises CollectiveError after the time limit, given a function for the absent ranks."""
    began = time.monotonic()

    def check(absent_ranks: Callable[[], list[int]]) -> None:
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            raise CollectiveError(
                f"Rank {rank} waited {timeout_s:g} s for {what}; these of {size} ranks did not come: "
                f"{', '.join(map(str, absent_ranks()))}."
            )

    return check


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
    limit = _limited(rank, size, timeout_s, what)

    def check_both(absent_ranks: Callable[[], list[int]]) -> None:
        check(absent_ranks)
        limit(absent_ranks)

    cards = exchange(PrefixStore("card", store), rank, size, json.dumps(asdict(card)), check_both)
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
    pause = 0.0002
    while not store.check(keys):
        check(lambda: absent(store, keys))
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return [store.get(key) for key in keys]


def absent(store: Store, keys: Sequence[str]) -> list[int]:
    """Return the ranks whose keys, given in rank order, are not in the store yet."""
    return [rank for rank, key in enumerate(keys) if not store.check([key])]
