"""A board for replicas that share no memory: each has a copy, and the copies are kept equal through the store.

Several times a second each replica publishes its own part, as far as others have not acknowledged it, and reads
theirs. A thread of its own does so: a question to the store takes a round trip, which no collective waits for but one
whose signature is new. That one is entered only when everyone has told the same; any other difference, found at once
where memory is shared, is found within a second here.

The store is plain text on the network, so no source text goes through it: digests do, and who needs the text looks for
it in its own source.
"""

from __future__ import annotations

import struct
import threading

from torch._C._distributed_c10d import Store

from distnb.collectives.verify import callsite
from distnb.collectives.verify.collective_log import HEADER_NBYTES, RING, SLOT_NBYTES, CollectiveLog, Record, Stand

__all__ = ["ReplicatedLog"]

_NUMBER = struct.Struct("<Q")


class ReplicatedLog(CollectiveLog):
    """The records of every replica, as far as this one knows them.

    Args:
        store: Where the replicas publish, under a prefix that nobody used before.
        me: The replica that writes here.
        size: How many replicas there are.
    """

    shared = False

    def __init__(self, store: Store, me: int, size: int) -> None:
        super().__init__(bytearray(self.nbytes(size)), me, size)
        self._store = store
        self._pulled = [0] * size  # up to which number this replica knows each other's collectives
        self._acknowledged = [0] * size  # up to which number each other knows this replica's
        self._published = b""
        self._published_last = 0
        self._tell = False
        self._rewritten = 0
        self._seen = [b""] * size
        self._lock = threading.Lock()

    def move(self, store: Store) -> None:
        """Use another connection to the same store."""
        self._store = store

    def told(self, replica: int) -> int:
        """Up to which number another replica surely has this one's records."""
        return self._acknowledged[replica]

    def write(self, number: int, record: Record, program: int, stand: Stand = Stand()) -> None:  # noqa: B008
        """Post this replica's collective of that number, without its source text."""
        super().write(number, record.without_words, program, stand)
        if number <= self.last(self.me):  # taken back: others may have read the first word of it
            self._rewritten = number
            self._tell = True

    def read(self, replica: int, number: int) -> tuple[Record, int] | None:
        """A replica's collective, with the text that this replica's source has for it."""
        found = super().read(replica, number)
        if found is None:
            return None
        record, program = found
        return Record(record.key, f"{record.text}\0{callsite.words_of(record.site, record.place)}"), program

    @property
    def untold(self) -> bool:
        """Whether something here is yet to be published."""
        return not self.lost and (self._tell or self.last(self.me) != self._published_last)

    def tell_soon(self) -> None:
        """The thread that tends the groups publishes what has changed."""
        self._tell = True

    def exchange(self) -> None:
        """Publish and read. A store that no longer answers is none of the collectives' business."""
        if self._lock.acquire(blocking=False):  # else another thread is at it
            self._exchange()

    def publish(self) -> None:
        """Publish for certain, and read."""
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
                self._store.set(f"board/{self.me}", packet)  # type: ignore[arg-type]
                self._published = packet
            self._published_last = last
            others = [rank for rank in range(self.size) if rank != self.me]
            there = [rank for rank in others if self._seen[rank] or self._store.check([f"board/{rank}"])]
            if there:
                told = self._store.multi_get([f"board/{rank}" for rank in there])  # one question for all
                for rank, found in zip(there, told, strict=True):
                    self._unpack(rank, found)
        except RuntimeError:
            self.lost = True  # for good: torch's store does not connect again, and logs each attempt at length
        finally:
            self._lock.release()

    def _pack(self) -> tuple[bytes, int]:
        part = self.part(self.me)
        # The header first: another thread may post meanwhile, and it must not tell of a record that is not in here.
        header = bytes(self.memory[part.start : part.start + HEADER_NBYTES])
        last = self.last_of(header)
        known = min(number for rank, number in enumerate(self._acknowledged) if rank != self.me)
        again = self._rewritten
        # Who has what was posted after it was taken back has heard of that, too.
        first = max(known + 1 if known > again else min(known + 1, again), last - RING + 1, 1)
        slots = [bytes(self.memory[at : at + SLOT_NBYTES]) for at in map(self._own_slot, range(first, last + 1))]
        vector = b"".join(map(_NUMBER.pack, self._pulled))
        return header + vector + _NUMBER.pack(first) + b"".join(slots), last

    def _own_slot(self, number: int) -> int:
        return self._slot(self.me, number)

    def _unpack(self, rank: int, packet: bytes) -> None:
        if packet == self._seen[rank]:
            return
        self._seen[rank] = packet
        at = HEADER_NBYTES
        vector = [_NUMBER.unpack_from(packet, at + 8 * other)[0] for other in range(self.size)]
        self._acknowledged[rank] = max(self._acknowledged[rank], vector[self.me])
        at += 8 * self.size
        first = _NUMBER.unpack_from(packet, at)[0]
        at += _NUMBER.size
        count = (len(packet) - at) // SLOT_NBYTES
        for number in range(first, first + count):
            begin = at + (number - first) * SLOT_NBYTES
            into = self._slot(rank, number)
            self.memory[into : into + SLOT_NBYTES] = packet[begin : begin + SLOT_NBYTES]
        self._pulled[rank] = max(self._pulled[rank], first + count - 1)
        # The header goes last: it says up to which number there are records.
        start = self.part(rank).start
        self.memory[start : start + HEADER_NBYTES] = packet[:HEADER_NBYTES]
