"""The forming of a communicator: the replicas meet at the store, share a collective log, connect and leave together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distnb.collectives.group import exits, rendezvous
from distnb.collectives.group.backends import Backends
from distnb.collectives.group.communicator import Communicator
from distnb.collectives.group.rendezvous import Card
from distnb.collectives.shared_memory import host, shared_sum
from distnb.collectives.verify import collective_log
from distnb.collectives.verify.collective_log import CollectiveLog, Trouble
from distnb.collectives.verify.replicated_log import ReplicatedLog
from distnb.compat.c10d_internals import PrefixStore
from distnb.errors import CollectiveError

if TYPE_CHECKING:
    from distnb.collectives.group.membership import Membership

__all__ = ["Forming"]

_PERIOD_S = 0.1
_PAUSE_S = 0.0002
_LOOKS = 5  # after a replica has gone, until its last reports have certainly arrived
_HOPELESS_S = 60.0


class Forming:
    """The forming of one communicator."""

    def __init__(self, communicator: Communicator, membership: Membership) -> None:
        self.communicator = communicator
        self._membership = membership
        self._group = communicator.group
        self._rank: int = self._group.rank()
        self._size: int = self._group.size()
        self._store = PrefixStore(f"{membership.prefix}/{self._group.label}", membership.client.store())
        self._log: CollectiveLog | None = None
        self._connected: Backends | None = None
        self._next_check = 0.0
        self._lost_looks = 0
        self._local = False

    def run(self) -> tuple[Backends, CollectiveLog]:
        """Form the communicator. Raise CollectiveError if another replica does not arrive in time or does not
        connect."""
        try:
            self._log = log = self._share_log()
            return self._connect(log), log
        finally:
            self.communicator.waited()

    def _share_log(self) -> CollectiveLog:
        rank, size, extra_nbytes = self._rank, self._size, shared_sum.nbytes(self._size)
        memory, descriptor = collective_log.create_memory(size, extra_nbytes) if rank == 0 else (None, -1)
        try:
            card = Card(host=host.identity(), pid=os.getpid(), log=descriptor)
            what = f"the process group of replicas {list(self._group.replicas)}"
            timeout_s = self._membership.timeout_s
            cards = rendezvous.meet(self._store, rank, size, card, self._check, timeout_s=timeout_s, what=what)
            self._local = len({other.host for other in cards}) == 1
            if self._local and memory is None:
                with suppress(OSError):
                    memory = collective_log.open_memory(cards[0].pid, cards[0].log, size, extra_nbytes)
            # A container or a security module may forbid it to some replicas; then none shares memory.
            if self._local and self._all_agree("shares", memory is not None) and memory is not None:
                return CollectiveLog(memory, rank, size)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return ReplicatedLog(PrefixStore("log", self._store), rank, size)

    def _connect(self, log: CollectiveLog) -> Backends:
        try:
            connected = self._make_backends(log)
        except BaseException as error:
            with suppress(Exception):
                who = self._group.replicas[self._rank]
                log.set_trouble(Trouble("failed", f"Replica {who} could not connect: {error}"))
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

    def _make_backends(self, log: CollectiveLog) -> Backends:
        """Connect with the others, all of which are about to connect, too.

        The constructors cannot be interrupted, so they run on a thread. If a peer dies in these milliseconds, this
        replica abandons the thread.
        """
        made: list[Any] = []

        def make() -> None:
            try:
                made.append(Backends.connect(self._store, self._group, self._local))
            except BaseException as error:  # noqa: BLE001  (raised on the thread that waits)
                made.append(error)
            finished.set()

        finished = threading.Event()
        thread = threading.Thread(target=make, name="distnb-form", daemon=True)
        exits.note(thread)
        began = time.monotonic()
        who = f"Replica {self._rank}"
        try:
            thread.start()
            while not finished.wait(0.05):
                self._check()
                if time.monotonic() - began > _HOPELESS_S:
                    raise CollectiveError(
                        f"{who} met the other {self._size - 1} replicas at the store, but could not connect to them "
                        f"within {_HOPELESS_S:.0f} s. Is there a firewall between the machines, or is it the wrong "
                        "network interface (set GLOO_SOCKET_IFNAME)?"
                    )
        except BaseException:  # an order to end the program can be raised anywhere, not only in `_check`
            # The thread may block in the connection to the store: another one is used from now on.
            self._membership.client.spoil()
            log.lost = True
            raise
        if isinstance(made[0], Backends):
            return made[0]
        raise CollectiveError(f"{who} could not connect to the other {self._size - 1} replicas: {made[0]}") from made[0]

    def _leave_together(self, log: CollectiveLog) -> None:
        """Wait until all replicas are connected, because an abort on one would make the connecting of another fail."""
        if not log.shared:
            self._all_agree("connected", True)
            return
        log.set_phase(0, "running")
        began = time.monotonic()
        while any(log.phase(rank)[1] == "idle" for rank in range(self._size)):
            self._check()
            # Most arrive within a millisecond; one that does not has lost its core to another process.
            time.sleep(_PAUSE_S if time.monotonic() - began < 0.05 else 10 * _PAUSE_S)

    def _all_agree(self, name: str, agrees: bool) -> bool:
        """Return whether all replicas agree. The result is the same on each."""
        store = PrefixStore(name, self._store)
        answers = rendezvous.exchange(store, self._rank, self._size, "yes" if agrees else "no", self._check)
        return all(each == b"yes" for each in answers)

    def _check(self, absent: Callable[[], list[int]] = list) -> None:
        """Look for reasons to end the wait."""
        self._membership.attempt.check()
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _PERIOD_S
        self.communicator.examine_forming(absent)
        self._lost_looks = self._lost_looks + 1 if self._lost() else 0
        if self._lost_looks > _LOOKS:
            raise CollectiveError("The connection to another replica was lost, which may have died.")
        if self._log is not None:
            for rank in range(self._size):
                if rank != self._rank and (trouble := self._log.trouble_of(rank)) is not None:
                    raise CollectiveError(trouble.text)

    def _lost(self) -> bool:
        """Return whether a replica has gone without ending its program."""
        if self._connected is not None:
            return self._connected.connections.closed() > 0
        return self._group.parent is not None and self._group.parent.communicator.lost("ended", "failed") > 0
