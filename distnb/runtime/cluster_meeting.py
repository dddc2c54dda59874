"""How the replicas of a cluster of machines meet at the chief's store, before they form their process group.

They compare what each was told of the cluster first: a TF_CONFIG that differs is an error on every machine, and not a
wait without end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store

from distnb.cluster.worker_placement import WorkerPlacement
from distnb.collectives.group import rendezvous
from distnb.collectives.group.rendezvous import StoreClient
from distnb.errors import CollectiveError, OptionError

__all__ = ["ClusterMeeting", "connect"]

_WAIT_S = 1800.0  # machines of a cluster may start at very different times; torch's own limit
_FIRST_NOTICE_S = 10.0
_NOTICE_S = 60.0
_PAUSE_S = 0.02


class _Patience:
    """A wait with an end, which tells now and then what it waits for."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._began = time.monotonic()
        self._next_notice = self._began + _FIRST_NOTICE_S

    def pause(self, what: str) -> None:
        """Wait a little. Raises CollectiveError when it has been too long."""
        now = time.monotonic()
        if now - self._began > _WAIT_S:
            raise CollectiveError(f"{self._who} waited {_WAIT_S:.0f} s for {what}. Does it run, with the same cluster?")
        if now > self._next_notice:
            self._next_notice = now + _NOTICE_S
            print(f"distnb: {self._who} waits for {what}.", file=sys.stderr, flush=True)
        time.sleep(_PAUSE_S)


def connect(host: str, port: int, placement: WorkerPlacement) -> Store:
    """The chief's store, as soon as it answers.

    Raises:
        CollectiveError: It did not in half an hour.
    """
    patience = _Patience(str(placement.me))
    while True:
        # torch would try in C++, where Ctrl-C does not reach, and log each attempt.
        with suppress(OSError), socket.create_connection((host, port), timeout=5.0):
            return StoreClient.at(host, port).store()
        patience.pause(str(placement.chief))


@dataclass
class ClusterMeeting:
    """One replica's part in the meeting.

    Attributes:
        store: The chief's.
        placement: Which worker this is.
        rank: The replica's number.
        replicas: How many each worker has.
    """

    store: Store
    placement: WorkerPlacement
    rank: int
    replicas: int

    def __post_init__(self) -> None:
        self._store = PrefixStore("cluster", self.store)
        self._me = f"{rendezvous.host()} {os.getpid()}"
        self._patience = _Patience(str(self.placement.me))

    def hold(self) -> None:
        """Compare, and wait until all replicas of all workers are here.

        Raises:
            OptionError: The workers were told of different clusters, or have different numbers of replicas.
            CollectiveError: Two processes are the same task; or the chief went away, or somebody never came.
        """
        try:
            self._compare()
            self._arrive()
            self._wait()
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            raise CollectiveError(
                f"{self.placement.me}: the connection to {self.placement.chief} was lost before all workers were "
                f"there. It has ended, or cannot be reached any more: {error}"
            ) from error

    def _compare(self) -> None:
        """What rank 0 was told is what holds."""
        workers = [[worker.task_type, worker.task_id, worker.address] for worker in self.placement.workers]
        mine = {"workers": workers, "replicas": self.replicas}
        if self.rank == 0:
            self._store.set("told", json.dumps(mine))
        while not self._store.check(["told"]):
            self._patience.pause(str(self.placement.chief))
        theirs = json.loads(self._store.get("told"))
        if theirs == mine:
            return
        me, chief = self.placement.me, self.placement.chief
        if theirs["workers"] != workers:
            text = (
                f"{me} and {chief} were told of different clusters. {me.task_type} {me.task_id}: {_show(workers)}; "
                f'{chief.task_type} {chief.task_id}: {_show(theirs["workers"])}. Give every machine the same "cluster" '
                "in its TF_CONFIG."
            )
        else:
            text = (
                f"{me} has {self.replicas} replica(s), and {chief} has {theirs['replicas']}. Start as many on every "
                "machine: `distnb run script.py -n …`, or the script alone for one."
            )
        self._store.set("refused", text)
        raise OptionError(text)

    def _arrive(self) -> None:
        key = f"here/{self.rank}"
        found = self._store.compare_set(key, "", self._me).decode()
        if found != self._me:
            # It may have been restarted; what came before it on this machine can be asked.
            if _lives(found):
                self._refuse_double(found)
            self._store.set(key, self._me)

    def _wait(self) -> None:
        size = len(self.placement.workers) * self.replicas
        keys = [f"here/{rank}" for rank in range(size)]
        while not self._store.check(keys):
            if self._store.check(["refused"]):
                raise OptionError(self._store.get("refused").decode())
            absent = {rank // self.replicas for rank, key in enumerate(keys) if not self._store.check([key])}
            self._patience.pause(", ".join(str(self.placement.workers[worker]) for worker in sorted(absent)))
        found = self._store.compare_set(f"formed/{self.rank}", "", self._me).decode()
        if found != self._me:
            self._refuse_double(found)

    def _refuse_double(self, found: str) -> None:
        host, _, pid = found.rpartition(" ")
        raise CollectiveError(
            f"Another process is {self.placement.me} already: pid {pid} on {host.partition('/')[0]}. Each task of the "
            "cluster is one machine's; is the index in this one's TF_CONFIG right?"
        )


def _lives(found: str) -> bool:
    host, _, pid = found.rpartition(" ")
    return host == rendezvous.host() and os.path.exists(f"/proc/{pid}")


def _show(workers: list[list[object]]) -> str:
    return ", ".join(f"{kind} {index} at {address}" for kind, index, address in workers)
