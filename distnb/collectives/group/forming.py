"""How a process group is formed: the replicas meet at the store, share a board, connect, and leave together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore

from distnb.collectives.group import backends, rendezvous
from distnb.collectives.group.backends import Backends, Carrier
from distnb.collectives.group.process_group import GroupCore
from distnb.collectives.group.rendezvous import Card, StoreClient
from distnb.collectives.shared_memory import shared_sum
from distnb.collectives.verify import collective_log
from distnb.collectives.verify.collective_log import CollectiveLog
from distnb.collectives.verify.replicated_log import ReplicatedLog
from distnb.errors import CollectiveError

__all__ = ["Forming", "Parts"]

_PERIOD_S = 0.1
_PAUSE_S = 0.0002


@dataclass
class Parts:
    """What a formed group consists of."""

    transport: Backends
    board: CollectiveLog


@dataclass
class Forming:
    """One forming of one group.

    Attributes:
        group: Which group.
        client: The store's.
        prefix: Where in the store this team of this generation meets.
        device: This replica's device, by its name.
        carrier: What carries tensors of the replicas' own devices; None where nothing but Gloo does.
        staged: Device types whose tensors go through host memory.
        give_up: Raises once the joining was given up.
        timeout_s: How long to wait for the others to come; None for as long as there is hope.
    """

    group: GroupCore
    client: StoreClient
    prefix: str
    device: str
    carrier: Carrier | None
    staged: frozenset[str]
    give_up: Callable[[], None]
    timeout_s: float | None

    def __post_init__(self) -> None:
        self._connect_store()
        self._rank: int = self.group.rank()
        self._size: int = self.group.size()
        self._board: CollectiveLog | None = None
        self._next_look = 0.0
        self._local = self._abandoned = False

    def _connect_store(self) -> None:
        self._store = PrefixStore(f"{self.prefix}/{self.group.meeting}", self.client.store())

    def _abandon(self) -> None:
        """A thread is left behind that may block in the connection to the store: use another one from now on."""
        self.client.spoil()
        self._abandoned = True

    def run(self) -> Parts:
        """Form the group.

        Raises:
            CollectiveError: Another replica did not come in time, or could not be connected to.
        """
        try:
            self._board = made = self._share_board()
            return Parts(self._connect(made), made)
        finally:
            self.group.waited()

    def _share_board(self) -> CollectiveLog:
        rank, size, beside = self._rank, self._size, shared_sum.nbytes(self._size)
        memory, descriptor = collective_log.create_memory(size, beside) if rank == 0 else (None, -1)
        try:
            card = Card(rendezvous.host(), os.getpid(), descriptor, self.device)
            what = f"the process group of replicas {list(self.group.replicas)}"
            cards = rendezvous.meet(self._store, rank, size, card, self._check, timeout_s=self.timeout_s, what=what)
            self._local = len({other.host for other in cards}) == 1
            if self._local and memory is None:
                with suppress(OSError):
                    memory = collective_log.open_memory(cards[0].pid, cards[0].board, size, beside)
            # A container or a security module may forbid it to some; then nobody shares memory.
            if self._local and self._all_agree("shares", memory is not None) and memory is not None:
                return CollectiveLog(memory, rank, size)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return ReplicatedLog(self._board_store(), rank, size)

    def _board_store(self) -> PrefixStore:
        return PrefixStore("board", self._store)

    def _connect(self, made: CollectiveLog) -> Backends:
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
                if self._abandoned and isinstance(made, ReplicatedLog):
                    self._connect_store()
                    made.move(self._board_store())
                made.set_verdict(f"Replica {self.group.replicas[self._rank]} could not connect: {error}")
                made.exchange()
            raise
        try:
            self._leave_together(made)
        except BaseException:
            connected.abort()
            connected.release(lambda: True)
            raise
        return connected

    def _leave_together(self, made: CollectiveLog) -> None:
        """Wait until everyone is connected: an abort on one replica would spoil the connecting of another."""
        if not made.shared:
            self._all_agree("connected", True)
            return
        made.set_phase(0, "running")
        began = time.monotonic()
        while any(made.phase(rank)[1] == "idle" for rank in range(self._size)):
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
        self.group.check_forming(absent)
        if self._board is not None:
            found = [self._board.verdict_of(rank) for rank in range(self._size) if rank != self._rank]
            if any(found):
                raise CollectiveError(next(filter(None, found)))
