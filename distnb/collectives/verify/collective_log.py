"""The collective log: what each replica of a process group tells the others about its collectives.

Replicas of one machine share the log's memory, so that a replica sees at once what the others have called. Across
machines each replica has a copy of its own, and the copies are kept equal through the store (`replicated_log.py`).

Each replica writes to its own part only. A part is a header and a ring of slots, one per collective.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

__all__ = [
    "HEADER_NBYTES",
    "KEY_NBYTES",
    "RING",
    "SLOT_NBYTES",
    "CollectiveLog",
    "CollectiveRecord",
    "CollectiveWait",
    "Departure",
    "Phase",
    "Position",
    "create_memory",
    "open_memory",
]

RING: Final = 2048
"""How many collectives a replica remembers; it never gets further ahead of the others than that."""

# A header: program, phase, last number; a wait and a verdict, each with its length before it; a departure; an end of
# data.
_HEADER = struct.Struct("<QQQ")
_NUMBER = struct.Struct("<Q")
_WAIT_AT: Final = _HEADER.size
_WAIT_NBYTES: Final = 512
_VERDICT_AT: Final = _WAIT_AT + 8 + _WAIT_NBYTES
_VERDICT_NBYTES: Final = 1024
_DEPARTURE_AT: Final = _VERDICT_AT + 8 + _VERDICT_NBYTES
_DEPARTURE = struct.Struct("<QII64s")
_DATA_END_AT: Final = _DEPARTURE_AT + _DEPARTURE.size
_DATA_END = struct.Struct("<QQ")
HEADER_NBYTES: Final = _DATA_END_AT + _DATA_END.size
# A slot: number, the record's key, program, position, length of text, text. What is compared at once stands together.
SLOT_NBYTES: Final = 256
KEY_NBYTES: Final = 40
_KEY_END: Final = 8 + KEY_NBYTES
_POSITION = struct.Struct("<IIIIQ")
_POSITION_AT: Final = _KEY_END + 8
_SAME_END: Final = _POSITION_AT + 8
_TEXT_AT: Final = _POSITION_AT + _POSITION.size + 8
_PART_NBYTES: Final = HEADER_NBYTES + RING * SLOT_NBYTES

Phase = Literal["idle", "running", "ended", "failed"]
_PHASES: Final[tuple[Phase, ...]] = ("idle", "running", "ended", "failed")


class CollectiveWait(NamedTuple):
    """What a replica waits in: which collective of which group, for which replicas, and a text for people."""

    group: str
    number: int
    absent: tuple[int, ...]
    text: str


class Position(NamedTuple):
    """Where in its program a replica is as it calls a collective. Regions are calls of `run` and scopes, numbered.

    Attributes:
        low, high: The regions that errors have left since the collective before this one; zeros if none did.
        outer, inner: The outermost and the innermost region that it is in; zeros outside.
        serial: The newest region that it entered.
    """

    low: int = 0
    high: int = 0
    outer: int = 0
    inner: int = 0
    serial: int = 0

    @property
    def left(self) -> bool:
        """Whether an error left a region."""
        return self.high > 0

    def misses(self, other: Position) -> bool:
        """Whether this replica left, by an error, where the other one is: it does not come there any more."""
        return self.left and (
            self.low <= other.outer <= self.high or self.low <= other.inner <= self.high or self.serial > other.serial
        )


class Departure(NamedTuple):
    """An error left regions of a replica, from `low` to `high`."""

    number: int
    """Of the replica's newest collective then."""
    low: int
    high: int
    text: str
    """What the error left, and its type, for people."""


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective as one replica called it.

    Attributes:
        key: Digests, 8 bytes each: of the signature, then the call site's identity (see `callsite.CallSite`).
        operation: The signature for people.
        place: The innermost line for people.
    """

    key: bytes
    operation: str
    place: str

    @cached_property
    def stored(self) -> bytes:
        """Operation and place as they are written to the log, their length first."""
        text = f"{self.operation}\0{self.place}".encode()[: SLOT_NBYTES - _TEXT_AT]
        return _NUMBER.pack(len(text)) + text

    @property
    def signature(self) -> bytes:
        """What must be equal on all replicas."""
        return self.key[:8]

    @property
    def line_text(self) -> bytes:
        """A digest of what the innermost line says."""
        return self.key[24:32]


class CollectiveLog:
    """The records of every replica, in memory that is zeroed at first, and shared by the replicas of one machine."""

    shared = True
    """Whether what a replica writes is seen by the others at once."""
    lost = False
    """Whether the others can no longer be heard of here."""

    def __init__(self, memory: mmap.mmap | bytearray, me: int, size: int) -> None:
        self.memory = memory
        self.me = me
        self.size = size
        self._mine = me * _PART_NBYTES

    # -- copies on several machines; where memory is shared there is one log, and nothing to do ---------------------

    @property
    def untold(self) -> bool:
        """Whether something that is written here has yet to be told to the others, by `exchange`."""
        return False

    def exchange(self) -> None:
        """Bring this copy and the others' up to date."""

    def tell_soon(self) -> None:
        """Have what is written here told to the others, without waiting for that."""

    def publish(self) -> None:
        """As `exchange`, for certain: what was written before is there for the others."""

    def acknowledged(self, replica: int) -> int:
        """Up to which number another replica surely has this one's records."""
        return self.last(self.me)

    # -- collectives ------------------------------------------------------------------------------------------------

    @staticmethod
    def nbytes(size: int) -> int:
        """How much memory the log of so many replicas takes."""
        return size * _PART_NBYTES

    @staticmethod
    def _slot(replica: int, number: int) -> int:
        return replica * _PART_NBYTES + HEADER_NBYTES + number % RING * SLOT_NBYTES

    def write(self, number: int, record: CollectiveRecord, program: int, position: Position = Position()) -> None:  # noqa: B008
        """Post this replica's collective of that number (numbers begin with 1)."""
        at = self._slot(self.me, number)
        content = record.key + _NUMBER.pack(program) + _POSITION.pack(*position) + record.stored
        # The number goes last: it says that the rest is valid.
        self.memory[at + 8 : at + 8 + len(content)] = content
        self.memory[at : at + 8] = _NUMBER.pack(number)

    def advance(self, number: int) -> None:
        """Say that this replica's newest collective is that one."""
        _NUMBER.pack_into(self.memory, self._mine + 16, number)

    def read(self, replica: int, number: int) -> tuple[CollectiveRecord, int] | None:
        """A replica's collective of that number with its program; None if not posted yet, or no more remembered."""
        at = self._slot(replica, number)
        slot = bytes(self.memory[at : at + SLOT_NBYTES])
        if _NUMBER.unpack_from(slot)[0] != number:
            return None
        program, length = _NUMBER.unpack_from(slot, _KEY_END)[0], _NUMBER.unpack_from(slot, _TEXT_AT - 8)[0]
        operation, _, place = slot[_TEXT_AT : _TEXT_AT + length].decode(errors="replace").partition("\0")
        return CollectiveRecord(slot[8:_KEY_END], operation, place), program

    def position(self, replica: int, number: int) -> Position:
        """Where a replica was as it called its collective of that number, which must be remembered."""
        return Position._make(_POSITION.unpack_from(self.memory, self._slot(replica, number) + _POSITION_AT))

    def same(self, replica: int, number: int) -> bool:
        """Whether another replica posted the very same under that number: signature, place, program, regions left."""
        mine, other = self._slot(self.me, number), self._slot(replica, number)
        return bool(self.memory[mine : mine + _SAME_END] == self.memory[other : other + _SAME_END])

    def last(self, replica: int) -> int:
        """The number of a replica's newest collective; 0 before the first."""
        return int(_NUMBER.unpack_from(self.memory, replica * _PART_NBYTES + 16)[0])

    # -- what else a replica tells ----------------------------------------------------------------------------------

    def set_phase(self, program: int, phase: Phase) -> None:
        """Say where this replica is: in which program, and whether it is still in it."""
        # In this order: a program that begins is never seen in the phase in which the last one ended.
        _NUMBER.pack_into(self.memory, self._mine + 8, _PHASES.index(phase))
        _NUMBER.pack_into(self.memory, self._mine, program)

    def phase(self, replica: int) -> tuple[int, Phase, int]:
        """Where a replica is: program, phase, number of its newest collective."""
        at = replica * _PART_NBYTES
        found = _HEADER.unpack_from(self.memory, at)
        while (again := _HEADER.unpack_from(self.memory, at)) != found:
            found = again  # it went on while it was read: the end of one program with the collectives of the next
        program, phase, last = found
        return program, _PHASES[phase], last

    def set_verdict(self, text: str) -> None:
        """Tell the others what this replica found wrong."""
        self._set_text(_VERDICT_AT, text.encode()[:_VERDICT_NBYTES])

    def verdict_of(self, replica: int) -> str:
        """What a replica found wrong; empty if nothing."""
        return self._text_of(replica, _VERDICT_AT)

    def set_departure(self, departure: Departure) -> None:
        """Tell the others that an error left regions here."""
        text = departure.text.encode()[: _DEPARTURE.size - 16]
        _DEPARTURE.pack_into(self.memory, self._mine + _DEPARTURE_AT, *departure[:3], text)

    def departure_of(self, replica: int) -> Departure:
        """The latest regions that an error left on a replica; zeros if none did."""
        number, low, high, text = _DEPARTURE.unpack_from(self.memory, replica * _PART_NBYTES + _DEPARTURE_AT)
        return Departure(number=number, low=low, high=high, text=text.rstrip(b"\0").decode(errors="replace"))

    def set_data_end(self, number: int, batches: int) -> None:
        """Tell the others that a loop over data ended here, between the collective of that number and the next."""
        _DATA_END.pack_into(self.memory, self._mine + _DATA_END_AT, number + 1, batches)

    def data_end_of(self, replica: int, number: int) -> int | None:
        """Return after how many batches a replica's loop over data ended just before a collective; None if none did."""
        before, batches = _DATA_END.unpack_from(self.memory, replica * _PART_NBYTES + _DATA_END_AT)
        return int(batches) if before == number else None

    def set_wait(self, wait: CollectiveWait | None) -> None:
        """Say what this replica waits in, or that it does not wait."""
        told = "" if wait is None else "\0".join([wait.group, str(wait.number), *map(str, wait.absent), wait.text])
        self._set_text(_WAIT_AT, told.encode()[:_WAIT_NBYTES])

    def wait_of(self, replica: int) -> CollectiveWait | None:
        """What a replica says that it waits in."""
        group, *numbers = self._text_of(replica, _WAIT_AT).split("\0")
        try:
            return CollectiveWait(
                group=group, number=int(numbers[0]), absent=tuple(map(int, numbers[1:-1])), text=numbers[-1]
            )
        except (IndexError, ValueError):
            return None  # none, or it is being written

    def _set_text(self, at: int, content: bytes) -> None:
        at += self._mine
        self.memory[at : at + 8 + len(content)] = _NUMBER.pack(len(content)) + content

    def _text_of(self, replica: int, at: int) -> str:
        at += replica * _PART_NBYTES
        length = _NUMBER.unpack_from(self.memory, at)[0]
        return bytes(self.memory[at + 8 : at + 8 + length]).decode(errors="replace")


def create_memory(size: int, beside: int = 0) -> tuple[mmap.mmap, int]:
    """Memory for a log, and `beside` bytes behind it, that other processes of this machine can open by its descriptor.

    The memory has no name: nothing of it is left behind when the processes end, however they end.
    """
    descriptor = os.memfd_create("distnb-log")
    os.ftruncate(descriptor, CollectiveLog.nbytes(size) + beside)
    return mmap.mmap(descriptor, CollectiveLog.nbytes(size) + beside), descriptor


def open_memory(pid: int, descriptor: int, size: int, beside: int = 0) -> mmap.mmap:
    """The memory that another process of this user made."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        return mmap.mmap(opened, CollectiveLog.nbytes(size) + beside)
    finally:
        os.close(opened)
