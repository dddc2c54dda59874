"""The meeting of a cluster's replicas at the chief's store, before they form their process group.

First they compare their descriptions of the cluster. A TF_CONFIG that differs is thus an error on every machine instead
of an endless wait. The steps, with the keys that they set in the store (under "cluster"):

1. Rank 0 publishes its description. The others compare theirs; a replica whose own differs sets `refused` to an error
   text, which all raise.
2. Each replica sets `here/RANK` and waits until all ranks are there.
3. Each replica claims its rank by setting `formed/RANK` to its process. A second process of the same rank is an error.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress

from distnb.cluster.worker_placement import WorkerPlacement
from distnb.collectives.group.rendezvous import StoreClient, absent
from distnb.collectives.shared_memory import host
from distnb.compat.c10d_internals import PrefixStore, Store
from distnb.errors import CollectiveError, OptionError

__all__ = ["connect", "meet_workers"]

_WAIT_S = 1800.0  # machines of a cluster may start at very different times; torch's own limit
_FIRST_NOTICE_S = 10.0
_NOTICE_S = 60.0
_PAUSE_S = 0.02


class _Patience:
    """A wait with a time limit, which prints from time to time what it waits for."""

    def __init__(self, placement: WorkerPlacement) -> None:
        self._who = placement.me
        self._began = time.monotonic()
        self._next_notice = self._began + _FIRST_NOTICE_S

    def pause(self, what: object) -> None:
        """Wait for a moment. Raise CollectiveError after the time limit."""
        now = time.monotonic()
        if now - self._began > _WAIT_S:
            raise CollectiveError(
                f"{self._who} waited {_WAIT_S:.0f} s for {what}. Check that it runs and has the same cluster."
            )
        if now > self._next_notice:
            self._next_notice = now + _NOTICE_S
            print(f"distnb: {self._who} waits for {what}.", file=sys.stderr, flush=True)
        time.sleep(_PAUSE_S)


def connect(host: str, port: int, placement: WorkerPlacement) -> Store:
    """Return the chief's store as soon as it answers. Raise CollectiveError if it does not within half an hour."""
    patience = _Patience(placement)
    while True:
        # torch's own attempts run in C++, which Ctrl-C cannot interrupt, and log each failure.
        with suppress(OSError), socket.create_connection((host, port), timeout=5.0):
            return StoreClient.at(host, port).store()
        patience.pause(placement.chief)


def meet_workers(store: Store, placement: WorkerPlacement, rank: int, replicas: int) -> None:
    """Compare the descriptions of the cluster, and wait until all replicas of all workers have arrived.

    Args:
        store: The chief's store.
        placement: The place of this worker in the cluster.
        rank: This replica's number.
        replicas: The number of replicas of each worker.

    Raises:
        OptionError: The workers were given different clusters, or have different numbers of replicas.
        CollectiveError: Two processes have the same task, the chief was lost, or a replica has not arrived in time.
    """
    try:
        meeting, patience = PrefixStore("cluster", store), _Patience(placement)
        _compare(meeting, placement, rank, replicas, patience)
        meeting.set(f"here/{rank}", "")
        keys = [f"here/{each}" for each in range(len(placement.workers) * replicas)]
        while not meeting.check(keys):
            if meeting.check(["refused"]):
                raise OptionError(meeting.get("refused").decode())
            late = sorted({each // replicas for each in absent(meeting, keys)})
            patience.pause(", ".join(str(placement.workers[worker]) for worker in late))
        # A process claims its rank only now, so one that was restarted before all had arrived replaces its predecessor.
        me = f"{os.getpid()} on {host.identity()}"
        found = meeting.compare_set(f"formed/{rank}", "", me).decode()
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(
            f"{placement.me}: the connection to {placement.chief} was lost before all workers had arrived. It has "
            f"ended or is no longer reachable: {error}"
        ) from error
    if found != me:
        raise CollectiveError(
            f"Another process is {placement.me} already: pid {found.partition('/')[0]}. Each machine has its own task "
            "of the cluster. Check the index in this machine's TF_CONFIG."
        )


def _compare(store: Store, placement: WorkerPlacement, rank: int, replicas: int, patience: _Patience) -> None:
    """Compare this replica's description of the cluster with rank 0's. Raise OptionError if they differ."""
    me, chief = placement.me, placement.chief
    workers = [[worker.task_type, worker.task_id, worker.address] for worker in placement.workers]
    mine = {"workers": workers, "replicas": replicas}
    if rank == 0:
        store.set("cluster", json.dumps(mine))
    while not store.check(["cluster"]):
        patience.pause(chief)
    theirs = json.loads(store.get("cluster"))
    if theirs == mine:
        return
    if theirs["workers"] != workers:
        text = (
            f"{me} and {chief} describe different clusters. {me.task_type} {me.task_id}: {_shown(workers)}; "
            f'{chief.task_type} {chief.task_id}: {_shown(theirs["workers"])}. Give every machine the same "cluster" in '
            "its TF_CONFIG."
        )
    else:
        text = (
            f"{me} has {replicas} replica(s), and {chief} has {theirs['replicas']}. Start the same number on every "
            "machine: `distnb run script.py -n …`, or the script alone for one replica."
        )
    store.set("refused", text)
    raise OptionError(text)


def _shown(workers: list[list[object]]) -> str:
    return ", ".join(f"{kind} {index} at {address}" for kind, index, address in workers)
