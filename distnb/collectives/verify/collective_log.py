"""The board: what each replica of a process group tells the others about its collectives.

Replicas of one machine share the board's memory, so that a replica sees at once what the others have called. Across
machines each replica has a copy of its own, and the copies are kept equal through the store (`replicated.py`).

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
    "TEXT_NBYTES",
    "CollectiveLog",
    "Leaving",
    "Phase",
    "Record",
    "Stand",
    "Wait",
    "create_memory",
    "open_memory",
]

RING: Final = 2048
"""How many collectives a replica remembers; it never gets further ahead of the others than that."""

_HEADER = struct.Struct("<QQQ")  # program, phase, last number
_NUMBER = struct.Struct("<Q")
_WAIT_AT: Final = 24
_WAIT_NBYTES: Final = 512
_VERDICT_AT: Final = _WAIT_AT + 8 + _WAIT_NBYTES
_VERDICT_NBYTES: Final = 1024
_LEAVING_AT: Final = _VERDICT_AT + 8 + _VERDICT_NBYTES
_LEAVING = struct.Struct("<QII64s")
HEADER_NBYTES: Final = _LEAVING_AT + _LEAVING.size
SLOT_NBYTES: Final = 256
# A slot: number, the record's key, program, stand, length of text, text. What is compared at once stands together.
KEY_NBYTES: Final = 40
_KEY_END: Final = 8 + KEY_NBYTES
_STAND = struct.Struct("<IIIIQ")
_STAND_AT: Final = _KEY_END + 8
_SAME_END: Final = _STAND_AT + 8
_FIXED_NBYTES: Final = _STAND_AT + _STAND.size + 8
TEXT_NBYTES: Final = SLOT_NBYTES - _FIXED_NBYTES
_LENGTH = struct.Struct("<Q")
_PART_NBYTES: Final = HEADER_NBYTES + RING * SLOT_NBYTES

Phase = Literal["idle", "running", "ended", "failed"]
_PHASES: Final[tuple[Phase, ...]] = ("idle", "running", "ended", "failed")


@dataclass(frozen=True)
class Wait:
    """What a replica waits in.

    Attributes:
        where: Names group and collective.
        absent: The replicas that it waits for.
        text: What it does, for people.
    """

    where: str
    absent: tuple[int, ...]
    text: str

    @property
    def group(self) -> str:
        """The group's name."""
        return self.where.rpartition("#")[0]


class Stand(NamedTuple):
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

    def misses(self, other: Stand) -> bool:
        """Whether this replica left, by an error, where the other one is: it does not come there any more."""
        return self.left and (
            self.low <= other.outer <= self.high or self.low <= other.inner <= self.high or self.serial > other.serial
        )


class Leaving(NamedTuple):
    """An error left regions of a replica.

    Attributes:
        number: That of the replica's newest collective then.
        low, high: The regions.
        text: What it left and by which error, for people.
    """

    number: int
    low: int
    high: int
    text: str


@dataclass(frozen=True)
class Record:
    """One collective as one replica called it.

    Attributes:
        key: Digests, 8 bytes each: of the signature, the line, the chain of lines that led there, and what the call
            and its callers are about as they are written (see `callsite.CallSite`).
        text: Operation, place and source text for people, with NULs between.
    """

    key: bytes
    text: str

    @cached_property
    def stored(self) -> bytes:
        """The text as it is written to the board, its length first."""
        text = self.text.encode()[:TEXT_NBYTES]
        return _LENGTH.pack(len(text)) + text

    @cached_property
    def without_words(self) -> Record:
        """The same without the source text."""
        return Record(self.key, f"{self.operation}\0{self.place}")

    @property
    def signature(self) -> bytes:
        """What must be equal on all replicas."""
        return self.key[:8]

    @property
    def bare_line(self) -> bytes:
        """At which line, whatever was called."""
        return self.key[8:16]

    @property
    def line(self) -> bytes:
        """What was called, at which line."""
        return self.key[:16]

    @property
    def chain(self) -> bytes:
        """What was called, at which line, from which lines."""
        return self.key[:24]

    @property
    def about(self) -> bytes:
        """What the call is about, as it is written; zeros if that is not known."""
        return self.key[24:32]

    @property
    def chain_about(self) -> bytes:
        """What the call and those that led to it are about, as they are written; zeros if that is not known."""
        return self.key[32:40]

    @property
    def site(self) -> bytes:
        """The identity of the call site."""
        return self.key[8:]

    @property
    def operation(self) -> str:
        """The operation for people."""
        return self._told(0)

    @property
    def place(self) -> str:
        """The place for people."""
        return self._told(1)

    @property
    def words(self) -> str:
        """The call as it is written; it may be cut, or empty."""
        return self._told(2)

    def _told(self, part: int) -> str:
        return [*self.text.split("\0"), "", ""][part]


class CollectiveLog:
    """The records of every replica.

    Args:
        memory: Zeroed at first; shared by the replicas of one machine.
        me: The replica that writes here.
        size: How many replicas there are.
    """

    shared = True
    """Whether what a replica writes is seen by the others at once."""
    lost = False
    """Whether the others can no longer be heard of here."""

    def __init__(self, memory: mmap.mmap | bytearray, me: int, size: int) -> None:
        self.memory = memory
        self.me = me
        self.size = size
        self._mine = me * _PART_NBYTES + HEADER_NBYTES

    @property
    def untold(self) -> bool:
        """Whether something that is written here has yet to be told to the others, by `exchange`."""
        return False

    def exchange(self) -> None:
        """Bring this copy and the others' up to date; there is one board only where memory is shared."""

    def tell_soon(self) -> None:
        """Have what is written here told to the others, without waiting for that."""

    def publish(self) -> None:
        """As `exchange`, for certain: what was written before is there for the others."""

    def told(self, replica: int) -> int:
        """Up to which number another replica surely has this one's records."""
        return self.last(self.me)

    @staticmethod
    def nbytes(size: int) -> int:
        """How much memory the board of so many replicas takes."""
        return size * _PART_NBYTES

    @staticmethod
    def part(replica: int) -> slice:
        """Where a replica's part lies."""
        return slice(replica * _PART_NBYTES, (replica + 1) * _PART_NBYTES)

    def write(self, number: int, record: Record, program: int, stand: Stand = Stand()) -> None:  # noqa: B008
        """Post this replica's collective of that number (numbers begin with 1)."""
        at = self._mine + number % RING * SLOT_NBYTES
        content = record.key + _NUMBER.pack(program) + _STAND.pack(*stand) + record.stored
        memory = self.memory
        # The number goes last: it says that the rest is valid.
        memory[at + 8 : at + 8 + len(content)] = content
        memory[at : at + 8] = _NUMBER.pack(number)

    def read(self, replica: int, number: int) -> tuple[Record, int] | None:
        """A replica's collective of that number with its program; None if not posted yet, or no more remembered."""
        at = self._slot(replica, number)
        slot = bytes(self.memory[at : at + SLOT_NBYTES])
        if _NUMBER.unpack_from(slot)[0] != number:
            return None
        program, length = _NUMBER.unpack_from(slot, _KEY_END)[0], _LENGTH.unpack_from(slot, _FIXED_NBYTES - 8)[0]
        text = slot[_FIXED_NBYTES : _FIXED_NBYTES + length].decode(errors="replace")
        return Record(slot[8:_KEY_END], text), program

    def stand(self, replica: int, number: int) -> Stand:
        """Where a replica was as it called its collective of that number, which must be remembered."""
        return Stand(*_STAND.unpack_from(self.memory, self._slot(replica, number) + _STAND_AT))

    def same(self, replica: int, number: int) -> bool:
        """Whether another replica posted the very same under that number: signature, place, program, regions left."""
        mine, other = self._slot(self.me, number), self._slot(replica, number)
        return bool(self.memory[mine : mine + _SAME_END] == self.memory[other : other + _SAME_END])

    def last(self, replica: int) -> int:
        """The number of a replica's newest collective; 0 before the first."""
        return int(_NUMBER.unpack_from(self.memory, replica * _PART_NBYTES + 16)[0])

    @staticmethod
    def last_of(header: bytes) -> int:
        """The same of a copy of a replica's header."""
        return int(_HEADER.unpack_from(header)[2])

    def advance(self, number: int) -> None:
        """Say that this replica's newest collective is that one."""
        _NUMBER.pack_into(self.memory, self.me * _PART_NBYTES + 16, number)

    def set_phase(self, program: int, phase: Phase) -> None:
        """Say where this replica stands: in which program, and whether it is still in it."""
        at = self.me * _PART_NBYTES
        # In this order: a program that begins is never seen in the phase in which the last one ended.
        _NUMBER.pack_into(self.memory, at + _NUMBER.size, _PHASES.index(phase))
        _NUMBER.pack_into(self.memory, at, program)

    def phase(self, replica: int) -> tuple[int, Phase, int]:
        """Where a replica stands: program, phase, number of its newest collective."""
        at = replica * _PART_NBYTES
        found = _HEADER.unpack_from(self.memory, at)
        while (again := _HEADER.unpack_from(self.memory, at)) != found:
            found = again  # it went on while it was read: the end of one program with the collectives of the next
        program, phase, last = found
        return program, _PHASES[phase], last

    def set_verdict(self, text: str) -> None:
        """Tell the others what this replica found wrong."""
        content = text.encode()[:_VERDICT_NBYTES]
        at = self.me * _PART_NBYTES + _VERDICT_AT
        self.memory[at + _NUMBER.size : at + _NUMBER.size + len(content)] = content
        _NUMBER.pack_into(self.memory, at, len(content))

    def verdict_of(self, replica: int) -> str:
        """What a replica found wrong; empty if nothing."""
        at = replica * _PART_NBYTES + _VERDICT_AT
        length = _NUMBER.unpack_from(self.memory, at)[0]
        return bytes(self.memory[at + _NUMBER.size : at + _NUMBER.size + length]).decode(errors="replace")

    def set_leaving(self, leaving: Leaving) -> None:
        """Tell the others that an error left regions here."""
        text = leaving.text.encode()[: _LEAVING.size - 16]
        _LEAVING.pack_into(self.memory, self.me * _PART_NBYTES + _LEAVING_AT, *leaving[:3], text)

    def leaving_of(self, replica: int) -> Leaving:
        """The latest regions that an error left on a replica; zeros if none did."""
        number, low, high, text = _LEAVING.unpack_from(self.memory, replica * _PART_NBYTES + _LEAVING_AT)
        return Leaving(number, low, high, text.rstrip(b"\0").decode(errors="replace"))

    def set_wait(self, wait: Wait | None) -> None:
        """Say what this replica waits in, or that it does not wait."""
        content = b""
        if wait is not None:
            content = "\0".join([wait.where, ",".join(map(str, wait.absent)), wait.text]).encode()
        at = self.me * _PART_NBYTES + _WAIT_AT
        content = content[:_WAIT_NBYTES]
        self.memory[at : at + _NUMBER.size + len(content)] = _NUMBER.pack(len(content)) + content

    def wait_of(self, replica: int) -> Wait | None:
        """What a replica says that it waits in."""
        at = replica * _PART_NBYTES + _WAIT_AT
        length = _NUMBER.unpack_from(self.memory, at)[0]
        if not length:
            return None
        content = bytes(self.memory[at + _NUMBER.size : at + _NUMBER.size + length]).decode(errors="replace")
        where, absent, text = [*content.split("\0"), "", ""][:3]
        return Wait(where, tuple(int(rank) for rank in absent.split(",") if rank.isdigit()), text)

    def _slot(self, replica: int, number: int) -> int:
        return replica * _PART_NBYTES + HEADER_NBYTES + number % RING * SLOT_NBYTES


def create_memory(size: int, beside: int = 0) -> tuple[mmap.mmap, int]:
    """Memory for a board that other processes of this machine can open, and its file descriptor.

    The memory has no name: nothing of it is left behind when the processes end, however they end.

    Args:
        size: How many replicas.
        beside: Bytes for other uses, behind the board.
    """
    descriptor = os.memfd_create("distnb-board")
    os.ftruncate(descriptor, CollectiveLog.nbytes(size) + beside)
    return mmap.mmap(descriptor, CollectiveLog.nbytes(size) + beside), descriptor


def open_memory(pid: int, descriptor: int, size: int, beside: int = 0) -> mmap.mmap:
    """The memory that another process of this user made."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        return mmap.mmap(opened, CollectiveLog.nbytes(size) + beside)
    finally:
        os.close(opened)
