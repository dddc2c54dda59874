"""A collective log for replicas without shared memory: each has a copy, and the store keeps the copies equal.

Several times a second each replica publishes the records that others have not acknowledged, and reads theirs. A
separate thread does so, because a request to the store takes a round trip. Only a collective whose signature is new
waits for it: a replica enters that one when all have posted the same. Any other difference is found within a second
here, and at once if memory is shared.

The store is plain text on the network, so it carries digests and no source text.
"""

from __future__ import annotations

import struct
import threading

from distnb.collectives.verify.collective_log import (
    HEADER_NBYTES,
    RING,
    SLOT_NBYTES,
    CollectiveLog,
    CollectiveRecord,
    Position,
)
from distnb.compat.c10d_internals import Store

__all__ = ["ReplicatedLog"]

_NUMBER = struct.Struct("<Q")
_LAST_AT = 16  # in a header


class ReplicatedLog(CollectiveLog):
    """A copy of every replica's records, read from the store in which all publish theirs."""

    shared = False

    def __init__(self, store: Store, me: int, size: int) -> None:
        super().__init__(bytearray(self.nbytes(size)), me, size)
        self._store = store
        self._others = [rank for rank in range(size) if rank != me]
        self._pulled = [0] * size  # the number up to which this replica has each other's collectives
        self._acknowledged = [0] * size  # the number up to which each other has this replica's
        self._published = b""
        self._published_last = 0
        self._changed = False
        self._rewritten = 0
        self._seen = [b""] * size
        self._lock = threading.Lock()

    def acknowledged(self, replica: int) -> int:
        return self._acknowledged[replica]

    def write(self, number: int, record: CollectiveRecord, program: int, position: Position = Position()) -> None:  # noqa: B008
        super().write(number, record, program, position)
        if number <= self.last(self.me):  # a rewritten record, whose first words others may have read
            self._rewritten = number
            self._changed = True

    @property
    def has_unsent(self) -> bool:
        return not self.lost and (self._changed or self.last(self.me) != self._published_last)

    def send_soon(self) -> None:
        """Request that the thread that tends the groups publishes the changes."""
        self._changed = True

    def exchange(self) -> None:
        """Publish and read. A store that no longer answers does not end collectives."""
        if self._lock.acquire(blocking=False):  # otherwise another thread is doing it
            self._exchange()

    def publish(self) -> None:
        self._lock.acquire()
        self._exchange()

    def _exchange(self) -> None:
        """Publish and read, with the lock held, and release the lock."""
        try:
            if self.lost:
                return
            self._changed = False
            packet, last = self._pack()
            if packet != self._published:
                self._store.set(f"log/{self.me}", packet)  # type: ignore[arg-type]
                self._published = packet
            self._published_last = last
            there = [rank for rank in self._others if self._seen[rank] or self._store.check([f"log/{rank}"])]
            if there:
                packets = self._store.multi_get([f"log/{rank}" for rank in there])  # one question for all
                for rank, found in zip(there, packets, strict=True):
                    self._unpack(rank, found)
        except RuntimeError:
            self.lost = True  # permanently: torch's store does not reconnect, and logs each attempt at length
        finally:
            self._lock.release()

    def _pack(self) -> tuple[bytes, int]:
        # The header is read first: another thread may post meanwhile, and the header must not count a missing record.
        header = bytes(self.memory[self._mine : self._mine + HEADER_NBYTES])
        last = int(_NUMBER.unpack_from(header, _LAST_AT)[0])
        known = min(self._acknowledged[rank] for rank in self._others)
        again = self._rewritten
        # A replica that has a later record also has the rewritten one.
        first = max(known + 1 if known > again else min(known + 1, again), last - RING + 1, 1)
        places = [self._slot(self.me, number) for number in range(first, last + 1)]
        slots = [bytes(self.memory[at : at + SLOT_NBYTES]) for at in places]
        vector = b"".join(map(_NUMBER.pack, self._pulled))
        return header + vector + _NUMBER.pack(first) + b"".join(slots), last

    def _unpack(self, rank: int, packet: bytes) -> None:
        if packet == self._seen[rank]:
            return
        self._seen[rank] = packet
        known, first = (
            _NUMBER.unpack_from(packet, HEADER_NBYTES + _NUMBER.size * place)[0] for place in (self.me, self.size)
        )
        self._acknowledged[rank] = max(self._acknowledged[rank], known)
        begin = HEADER_NBYTES + _NUMBER.size * (self.size + 1)
        for number, at in enumerate(range(begin, len(packet), SLOT_NBYTES), first):
            into = self._slot(rank, number)
            self.memory[into : into + SLOT_NBYTES] = packet[at : at + SLOT_NBYTES]
            self._pulled[rank] = max(self._pulled[rank], number)
        # The header is written last: it has the number of the last record.
        start = self._slot(rank, 0) - HEADER_NBYTES
        self.memory[start : start + HEADER_NBYTES] = packet[:HEADER_NBYTES]
