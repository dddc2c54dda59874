"""A board for replicas that share no memory: each has a copy, and the copies are kept equal through the store.

Several times a second each replica publishes its own part, as far as others have not acknowledged it, and reads
theirs. What is found at once where memory is shared is found within a second here; and a collective whose signature is
new is entered only when everyone has told the same.
"""

from __future__ import annotations

import struct
import threading

from torch._C._distributed_c10d import Store

from distnb.collectives.board import HEADER_NBYTES, RING, SLOT_NBYTES, Board

__all__ = ["ReplicatedBoard"]

_NUMBER = struct.Struct("<Q")


class ReplicatedBoard(Board):
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
        self._seen = [b""] * size
        self._lock = threading.Lock()

    def move(self, store: Store) -> None:
        """Use another connection to the same store."""
        self._store = store

    def told(self, replica: int) -> int:
        """Up to which number another replica surely has this one's records."""
        return self._acknowledged[replica]

    def exchange(self) -> None:
        """Publish and read. A store that no longer answers is none of the collectives' business."""
        if self.lost or not self._lock.acquire(blocking=False):
            return  # or another thread is at it
        try:
            packet = self._pack()
            if packet != self._published:
                self._store.set(f"board/{self.me}", packet)  # type: ignore[arg-type]
                self._published = packet
            others = [rank for rank in range(self.size) if rank != self.me]
            there = [rank for rank in others if self._seen[rank] or self._store.check([f"board/{rank}"])]
            for rank in there:
                self._unpack(rank, self._store.get(f"board/{rank}"))
        except RuntimeError:
            self.lost = True  # for good: torch's store does not connect again, and logs each attempt at length
        finally:
            self._lock.release()

    def _pack(self) -> bytes:
        part = self.part(self.me)
        last = self.last(self.me)
        known = min(number for rank, number in enumerate(self._acknowledged) if rank != self.me)
        first = max(known + 1, last - RING + 1)
        slots = [bytes(self.memory[at : at + SLOT_NBYTES]) for at in map(self._own_slot, range(first, last + 1))]
        header = bytes(self.memory[part.start : part.start + HEADER_NBYTES])
        vector = b"".join(map(_NUMBER.pack, self._pulled))
        return header + vector + _NUMBER.pack(first) + b"".join(slots)

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
        for number in range(max(first, self._pulled[rank] + 1), first + count):
            begin = at + (number - first) * SLOT_NBYTES
            into = self._slot(rank, number)
            self.memory[into : into + SLOT_NBYTES] = packet[begin : begin + SLOT_NBYTES]
        self._pulled[rank] = max(self._pulled[rank], first + count - 1)
        # The header goes last: it says up to which number there are records.
        start = self.part(rank).start
        self.memory[start : start + HEADER_NBYTES] = packet[:HEADER_NBYTES]
