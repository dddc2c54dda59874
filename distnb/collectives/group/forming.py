"""How a communicator is formed: the replicas meet at the store, share a collective log, connect, and leave together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore

from distnb.collectives.group import backends, rendezvous
from distnb.collectives.group.backends import Backends, Carrier
from distnb.collectives.group.communicator import Communicator
from distnb.collectives.group.rendezvous import Card, StoreClient
from distnb.collectives.shared_memory import shared_sum
from distnb.collectives.verify import collective_log
from distnb.collectives.verify.collective_log import CollectiveLog
from distnb.collectives.verify.replicated_log import ReplicatedLog
from distnb.errors import CollectiveError

__all__ = ["Forming"]

_PERIOD_S = 0.1
_PAUSE_S = 0.0002
_LOOKS = 5  # at a replica that is gone, until what it told before is surely known


@dataclass
class Forming:
    """One forming of one communicator.

    Attributes:
        communicator: What is formed.
        client: The store's.
        prefix: Where in the store this team of this generation meets.
        device: This replica's device, by its name.
        carrier: What carries tensors of the replicas' own devices; None where nothing but Gloo does.
        staged: Device types whose tensors go through host memory.
        give_up: Raises once the joining was given up.
        timeout_s: How long to wait for the others to come; None for as long as there is hope.
    """

    communicator: Communicator
    client: StoreClient
    prefix: str
    device: str
    carrier: Carrier | None
    staged: frozenset[str]
    give_up: Callable[[], None]
    timeout_s: float | None

    def __post_init__(self) -> None:
        self._group = self.communicator.group
        self._rank: int = self._group.rank()
        self._size: int = self._group.size()
        self._log: CollectiveLog | None = None
        self._connected: Backends | None = None
        self._next_look = 0.0
        self._lost_looks = 0
        self._local = self._abandoned = False
        self._connect_store()

    def _connect_store(self) -> None:
        self._store = PrefixStore(f"{self.prefix}/{self._group.meeting}", self.client.store())

    def run(self) -> tuple[Backends, CollectiveLog]:
        """Form it.

        Raises:
            CollectiveError: Another replica did not come in time, or could not be connected to.
        """
        try:
            self._log = log = self._share_log()
            return self._connect(log), log
        finally:
            self.communicator.waited()

    def _share_log(self) -> CollectiveLog:
        rank, size, beside = self._rank, self._size, shared_sum.nbytes(self._size)
        memory, descriptor = collective_log.create_memory(size, beside) if rank == 0 else (None, -1)
        try:
            card = Card(rendezvous.host(), os.getpid(), descriptor, self.device)
            what = f"the process group of replicas {list(self._group.replicas)}"
            cards = rendezvous.meet(self._store, rank, size, card, self._check, timeout_s=self.timeout_s, what=what)
            self._local = len({other.host for other in cards}) == 1
            if self._local and memory is None:
                with suppress(OSError):
                    memory = collective_log.open_memory(cards[0].pid, cards[0].log, size, beside)
            # A container or a security module may forbid it to some; then nobody shares memory.
            if self._local and self._all_agree("shares", memory is not None) and memory is not None:
                return CollectiveLog(memory, rank, size)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return ReplicatedLog(self._log_store(), rank, size)

    def _log_store(self) -> PrefixStore:
        return PrefixStore("log", self._store)

    def _connect(self, log: CollectiveLog) -> Backends:
        try:
            connected = backends.form(
                self._store,
                self._rank,
                self._size,
                carrier=self.carrier,
                staged=self.staged,
                local=self._local,
                check=self._check,
                on_abandon=self._abandon,
            )
        except BaseException as error:
            with suppress(Exception):
                if self._abandoned and isinstance(log, ReplicatedLog):
                    self._connect_store()
                    log.move(self._log_store())
                log.set_verdict(f"Replica {self._group.replicas[self._rank]} could not connect: {error}")
                log.exchange()
            raise
        self._connected = connected
        try:
            self._leave_together(log)
        except BaseException:
            connected.abort()
            connected.release(lambda: True)
            raise
        return connected

    def _abandon(self) -> None:
        """A thread is left behind that may block in the connection to the store: use another one from now on."""
        self.client.spoil()
        self._abandoned = True

    def _leave_together(self, log: CollectiveLog) -> None:
        """Wait until everyone is connected: an abort on one replica would spoil the connecting of another."""
        if not log.shared:
            self._all_agree("connected", True)
            return
        log.set_phase(0, "running")
        began = time.monotonic()
        while any(log.phase(rank)[1] == "idle" for rank in range(self._size)):
            self._check()
            # Most are here within a millisecond; a replica that is not has lost its core to another process.
            time.sleep(_PAUSE_S if time.monotonic() - began < 0.05 else 10 * _PAUSE_S)

    def _all_agree(self, name: str, agrees: bool) -> bool:
        return rendezvous.all_agree(PrefixStore(name, self._store), self._rank, self._size, agrees, self._check)

    def _check(self, absent: Callable[[], list[int]] = list) -> None:
        """Look, while waiting, for reasons not to wait any longer."""
        self.give_up()
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _PERIOD_S
        self.communicator.examine_forming(absent)
        self._lost_looks = self._lost_looks + 1 if self._lost() else 0
        if self._lost_looks > _LOOKS:
            raise CollectiveError("The connection to another replica was lost, which may have died.")
        if self._log is not None:
            found = [self._log.verdict_of(rank) for rank in range(self._size) if rank != self._rank]
            if any(found):
                raise CollectiveError(next(filter(None, found)))

    def _lost(self) -> bool:
        """Whether a replica is gone that has not ended its program."""
        if self._connected is not None:
            return self._connected.connections.closed() > 0
        return self._group.parent is not None and self._group.parent.communicator.lost() > 0
