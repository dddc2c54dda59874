"""A collective log for replicas that share no memory: each has a copy, and the store keeps the copies equal.

Several times a second each replica publishes its own part, as far as others have not acknowledged it, and reads
theirs. A thread of its own does so: a question to the store takes a round trip, which no collective waits for but one
whose signature is new. That one is entered only when everyone has told the same; any other difference, found at once
where memory is shared, is found within a second here.

The store is plain text on the network, so no source text goes through it: digests do.
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
    """The records of every replica, as far as this one knows them from the store, where all publish theirs."""

    shared = False

    def __init__(self, store: Store, me: int, size: int) -> None:
        super().__init__(bytearray(self.nbytes(size)), me, size)
        self._store = store
        self._others = [rank for rank in range(size) if rank != me]
        self._pulled = [0] * size  # up to which number this replica knows each other's collectives
        self._acknowledged = [0] * size  # up to which number each other knows this replica's
        self._published = b""
        self._published_last = 0
        self._tell = False
        self._rewritten = 0
        self._seen = [b""] * size
        self._lock = threading.Lock()

    def acknowledged(self, replica: int) -> int:
        return self._acknowledged[replica]

    def write(self, number: int, record: CollectiveRecord, program: int, position: Position = Position()) -> None:  # noqa: B008
        super().write(number, record, program, position)
        if number <= self.last(self.me):  # taken back: others may have read the first word of it
            self._rewritten = number
            self._tell = True

    @property
    def untold(self) -> bool:
        return not self.lost and (self._tell or self.last(self.me) != self._published_last)

    def tell_soon(self) -> None:
        """The thread that tends the groups publishes what has changed."""
        self._tell = True

    def exchange(self) -> None:
        """Publish and read. A store that no longer answers is none of the collectives' business."""
        if self._lock.acquire(blocking=False):  # else another thread is at it
            self._exchange()

    def publish(self) -> None:
        self._lock.acquire()
        self._exchange()

    def _exchange(self) -> None:
        """The lock is held; it is released."""
        try:
            if self.lost:
                return
            self._tell = False
            packet, last = self._pack()
            if packet != self._published:
                self._store.set(f"log/{self.me}", packet)  # type: ignore[arg-type]
                self._published = packet
            self._published_last = last
            there = [rank for rank in self._others if self._seen[rank] or self._store.check([f"log/{rank}"])]
            if there:
                told = self._store.multi_get([f"log/{rank}" for rank in there])  # one question for all
                for rank, found in zip(there, told, strict=True):
                    self._unpack(rank, found)
        except RuntimeError:
            self.lost = True  # for good: torch's store does not connect again, and logs each attempt at length
        finally:
            self._lock.release()

    def _pack(self) -> tuple[bytes, int]:
        # The header first: another thread may post meanwhile, and it must not tell of a record that is not in here.
        header = bytes(self.memory[self._mine : self._mine + HEADER_NBYTES])
        last = int(_NUMBER.unpack_from(header, _LAST_AT)[0])
        known = min(self._acknowledged[rank] for rank in self._others)
        again = self._rewritten
        # Who has what was posted after it was taken back has heard of that, too.
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
        # The header goes last: it says up to which number there are records.
        start = self._slot(rank, 0) - HEADER_NBYTES
        self.memory[start : start + HEADER_NBYTES] = packet[:HEADER_NBYTES]
