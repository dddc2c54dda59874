"""The collective log: the reports of each replica of a process group about its collectives.

Replicas of one machine share the log's memory, so each sees the others' calls at once. Across machines each replica has
a copy, and the store keeps the copies equal (`replicated_log.py`).

Each replica writes to its own part only, so no lock is needed. A part is a header and a ring of slots:

    header   program │ phase │ last number │ wait: length, text │ trouble: length, text │ end of data │ failed programs
             │ failed calls
    slot     number │ key (40 bytes) │ program │ errors │ crossed │ length │ operation \\0 content \\0 place
             └────────── compared at once by `same` ──────────┘

Collective n is in slot n % RING. A writer fills the slot first and writes its number last, and a reader that finds
another number there knows that the slot is not posted yet, or was overwritten. For example, replica 1 is in program 4
and calls its 17th collective, `all_reduce(float32[10], sum)` in line 3 of cell 8. Its slot 17 becomes

    17 │ digests of the signature and the line │ 4 │ 0 │ 1 │ 44 │ all_reduce(float32[10], sum)\\0\\0cell 8, line 3

and then its header's last number becomes 17. Replica 0, which is about to enter its own collective 17, compares the
first bytes of both slots 17. If they are equal, nothing else is read.
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
    "Phase",
    "Position",
    "CollectiveRecord",
    "CollectiveWait",
    "Trouble",
    "create_memory",
    "open_memory",
]

RING: Final = 2048
"""The number of collectives that a replica remembers. It never gets further ahead of the others than that."""

# A header: program, phase, last number; a wait and a trouble, each with its length before it; an end of data; the
# latest programs that failed, and the latest calls of `run` that raised.
_HEADER = struct.Struct("<QQQ")
_NUMBER = struct.Struct("<Q")
_NOTHING: Final = bytes(8)
_WAIT_AT: Final = _HEADER.size
_WAIT_NBYTES: Final = 512
_TROUBLE_AT: Final = _WAIT_AT + 8 + _WAIT_NBYTES
_TROUBLE_NBYTES: Final = 1024
_DATA_END_AT: Final = _TROUBLE_AT + 8 + _TROUBLE_NBYTES
_DATA_END = struct.Struct("<QQ")
_FAILED_AT: Final = _DATA_END_AT + _DATA_END.size
# A replica may begin this many more programs before those that it failed are ended on the others, and fail them, too.
_FAILED = struct.Struct("<16Q")
_FAILED_CALLS_AT: Final = _FAILED_AT + _FAILED.size
HEADER_NBYTES: Final = _FAILED_CALLS_AT + _FAILED.size
# A slot: number, the record's key, program, position, length of text, text. Fields compared at once are adjacent.
SLOT_NBYTES: Final = 256
KEY_NBYTES: Final = 40
_KEY_END: Final = 8 + KEY_NBYTES
_POSITION = struct.Struct("<II")
_POSITION_AT: Final = _KEY_END + 8
_SAME_END: Final = _POSITION_AT + 4
_TEXT_AT: Final = _POSITION_AT + _POSITION.size + 8
_PART_NBYTES: Final = HEADER_NBYTES + RING * SLOT_NBYTES

Phase = Literal["idle", "running", "ended", "failed"]
_PHASES: Final[tuple[Phase, ...]] = ("idle", "running", "ended", "failed")
_NUMBER_OF_PHASE: Final = {phase: number for number, phase in enumerate(_PHASES)}


class CollectiveWait(NamedTuple):
    """A replica's wait: the group, the number of the collective, the absent replicas, and a description."""

    group: str
    number: int
    absent: tuple[int, ...]
    text: str


class Position(NamedTuple):
    """The position of a replica in its program when it calls a collective (see `program_calls.py`).

    Attributes:
        errors: The number of errors that have left a call of `run`, a scope or a collective.
        crossed: The number of times that a call of `run` or a scope has begun or ended.
    """

    errors: int = 0
    crossed: int = 0


class Trouble(NamedTuple):
    """A replica's report of an error to the others.

    Attributes:
        kind: "raised" for an error of the program that may leave a collective undone; "failed" and "mismatch" for an
            error that ends the program on every replica.
        text: The error for people.
    """

    kind: Literal["raised", "failed", "mismatch"]
    text: str


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective as one replica called it.

    Attributes:
        key: Digests, 8 bytes each: of the signature, then the call site's identity (see `callsite.CallSite`).
        operation: The signature for people.
        place: The innermost line for people.
        content: A digest of this replica's data, which may differ between replicas.
    """

    key: bytes
    operation: str
    place: str
    content: str = ""

    @cached_property
    def stored(self) -> bytes:
        """The operation, the content and the place as bytes of the log, after their length."""
        text = f"{self.operation}\0{self.content}\0{self.place}".encode()[: SLOT_NBYTES - _TEXT_AT]
        return _NUMBER.pack(len(text)) + text

    @property
    def signature(self) -> bytes:
        """The digest that must be equal on all replicas."""
        return self.key[:8]

    @property
    def line_text(self) -> bytes:
        """A digest of the innermost line's source."""
        return self.key[24:32]


class CollectiveLog:
    """The records of every replica, in memory that is zeroed at first, and shared by the replicas of one machine."""

    shared = True
    """True if the others see a replica's reports at once."""
    lost = False
    """True if the others' reports no longer arrive here."""

    def __init__(self, memory: mmap.mmap | bytearray, me: int, size: int) -> None:
        self.memory = memory
        self.me = me
        self.size = size
        self._mine = me * _PART_NBYTES
        self._has_trouble = True  # unknown at first

    # -- copies on several machines; with shared memory there is one log, and these do nothing ---------------------

    @property
    def has_unsent(self) -> bool:
        """True if this replica has reports that `exchange` has not sent yet."""
        return False

    def exchange(self) -> None:
        """Update this copy and the others'."""

    def send_soon(self) -> None:
        """Request that this replica's reports are sent soon, without waiting for that."""

    def publish(self) -> None:
        """Exchange now: the others can read all earlier reports afterwards."""

    def acknowledged(self, replica: int) -> int:
        """Return the number up to which another replica has certainly received this one's records."""
        return self.last(self.me)

    # -- collectives ------------------------------------------------------------------------------------------------

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the size of the log of this number of replicas, in bytes."""
        return size * _PART_NBYTES

    @staticmethod
    def _slot(replica: int, number: int) -> int:
        return replica * _PART_NBYTES + HEADER_NBYTES + number % RING * SLOT_NBYTES

    def write(self, number: int, record: CollectiveRecord, program: int, position: Position = Position()) -> None:  # noqa: B008
        """Post this replica's collective under that number (numbers begin with 1)."""
        at = self._slot(self.me, number)
        content = record.key + _NUMBER.pack(program) + _POSITION.pack(*position) + record.stored
        # The number is written last: it marks the rest as valid.
        self.memory[at + 8 : at + 8 + len(content)] = content
        self.memory[at : at + 8] = _NUMBER.pack(number)

    def advance(self, number: int) -> None:
        """Report that this replica's newest collective has that number."""
        _NUMBER.pack_into(self.memory, self._mine + 16, number)

    def withdraw(self, number: int) -> None:
        """Remove this replica's newest collective, of that number, whose number another one will have."""
        at = self._slot(self.me, number)
        self.memory[at : at + 8] = _NUMBER.pack(0)
        self.advance(number - 1)

    def read(self, replica: int, number: int) -> tuple[CollectiveRecord, int] | None:
        """Return a replica's collective of that number and its program; None if it is not posted, or overwritten."""
        at = self._slot(replica, number)
        slot = bytes(self.memory[at : at + SLOT_NBYTES])
        if _NUMBER.unpack_from(slot)[0] != number:
            return None
        program, length = _NUMBER.unpack_from(slot, _KEY_END)[0], _NUMBER.unpack_from(slot, _TEXT_AT - 8)[0]
        text = slot[_TEXT_AT : _TEXT_AT + length].decode(errors="replace")
        operation, content, place = (*text.split("\0", 2), "", "")[:3]
        return CollectiveRecord(slot[8:_KEY_END], operation, place, content), program

    def position(self, replica: int, number: int) -> Position:
        """Return a replica's position at its collective of that number, which must not be overwritten."""
        return Position._make(_POSITION.unpack_from(self.memory, self._slot(replica, number) + _POSITION_AT))

    def same(self, replica: int, number: int) -> bool:
        """Return whether another replica posted the same under that number: signature, place, program, errors."""
        mine, other = self._slot(self.me, number), self._slot(replica, number)
        return bool(self.memory[mine : mine + _SAME_END] == self.memory[other : other + _SAME_END])

    def last(self, replica: int) -> int:
        """Return the number of a replica's newest collective; 0 before the first."""
        return int(_NUMBER.unpack_from(self.memory, replica * _PART_NBYTES + 16)[0])

    # -- other reports ----------------------------------------------------------------------------------------------

    def set_phase(self, program: int, phase: Phase) -> None:
        """Report this replica's program, and its phase in it."""
        if phase == "failed":
            self._add_failed(_FAILED_AT, program)
        # In this order, so that a new program is never seen in the phase in which the last one ended.
        _NUMBER.pack_into(self.memory, self._mine + 8, _NUMBER_OF_PHASE[phase])
        _NUMBER.pack_into(self.memory, self._mine, program)

    def phase(self, replica: int) -> tuple[int, Phase, int]:
        """Return a replica's program, its phase, and the number of its newest collective."""
        at = replica * _PART_NBYTES
        found = _HEADER.unpack_from(self.memory, at)
        while (again := _HEADER.unpack_from(self.memory, at)) != found:
            found = again  # written during the read, maybe by two programs
        program, phase, last = found
        return program, _PHASES[phase], last

    def has_failed(self, replica: int, program: int) -> bool:
        """Return whether a program has failed on a replica, which may have begun later ones."""
        return program in _FAILED.unpack_from(self.memory, replica * _PART_NBYTES + _FAILED_AT)

    def set_failed_call(self, program: int, crossed: int) -> None:
        """Report that an error has left a call of `run` of a program on this replica (`crossed`: see `Position`)."""
        self._add_failed(_FAILED_CALLS_AT, _call(program, crossed))

    def has_failed_call(self, replica: int, program: int, crossed: int) -> bool:
        """Return whether an error has left a call of `run` of a program on a replica."""
        at = replica * _PART_NBYTES + _FAILED_CALLS_AT
        return _call(program, crossed) in _FAILED.unpack_from(self.memory, at)

    def _add_failed(self, at: int, number: int) -> None:
        *others, _ = _FAILED.unpack_from(self.memory, self._mine + at)
        _FAILED.pack_into(self.memory, self._mine + at, number, *others)

    def set_trouble(self, trouble: Trouble | None) -> None:
        """Report an error to the other replicas, or withdraw the report."""
        if trouble is None and not self._has_trouble:
            return
        self._has_trouble = trouble is not None
        text = "" if trouble is None else f"{trouble.kind}\0{trouble.text}"
        self._set_text(_TROUBLE_AT, text.encode()[:_TROUBLE_NBYTES])

    def trouble_of(self, replica: int) -> Trouble | None:
        """Return the error that a replica reports, or None."""
        at = replica * _PART_NBYTES + _TROUBLE_AT
        if self.memory[at : at + 8] == _NOTHING:
            return None
        kind, separator, text = self._text_of(replica, _TROUBLE_AT).partition("\0")
        return Trouble(kind, text) if separator else None  # type: ignore[arg-type]

    def set_data_end(self, number: int, batches: int) -> None:
        """Report that a loop over data ended here, between the collective of that number and the next."""
        _DATA_END.pack_into(self.memory, self._mine + _DATA_END_AT, number + 1, batches)

    def data_end_of(self, replica: int, number: int) -> int | None:
        """Return the number of batches of the loop over data that a replica ended just before a collective, or None."""
        before, batches = _DATA_END.unpack_from(self.memory, replica * _PART_NBYTES + _DATA_END_AT)
        return int(batches) if before == number else None

    def set_wait(self, wait: CollectiveWait | None) -> None:
        """Report this replica's wait, or None."""
        text = "" if wait is None else "\0".join([wait.group, str(wait.number), *map(str, wait.absent), wait.text])
        self._set_text(_WAIT_AT, text.encode()[:_WAIT_NBYTES])

    def wait_of(self, replica: int) -> CollectiveWait | None:
        """Return the wait that a replica reports, or None."""
        at = replica * _PART_NBYTES + _WAIT_AT
        if self.memory[at : at + 8] == _NOTHING:
            return None
        group, *numbers = self._text_of(replica, _WAIT_AT).split("\0")
        try:
            return CollectiveWait(
                group=group, number=int(numbers[0]), absent=tuple(map(int, numbers[1:-1])), text=numbers[-1]
            )
        except (IndexError, ValueError):
            return None  # none, or one that is being written

    def _set_text(self, at: int, content: bytes) -> None:
        at += self._mine
        self.memory[at : at + 8 + len(content)] = _NUMBER.pack(len(content)) + content

    def _text_of(self, replica: int, at: int) -> str:
        at += replica * _PART_NBYTES
        length = _NUMBER.unpack_from(self.memory, at)[0]
        return bytes(self.memory[at + 8 : at + 8 + length]).decode(errors="replace")


def _call(program: int, crossed: int) -> int:
    return program << 24 | crossed & 0xFFFFFF


def create_memory(size: int, extra: int = 0) -> tuple[mmap.mmap, int]:
    """Return memory for a log with `extra` bytes behind it, and the descriptor through which other processes open it.

    The memory has no name, so it is freed when the processes end, however they end.
    """
    descriptor = os.memfd_create("distnb-log")
    os.ftruncate(descriptor, CollectiveLog.nbytes(size) + extra)
    return mmap.mmap(descriptor, CollectiveLog.nbytes(size) + extra), descriptor


def open_memory(pid: int, descriptor: int, size: int, extra: int = 0) -> mmap.mmap:
    """Open the memory that another process of this user made."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        return mmap.mmap(opened, CollectiveLog.nbytes(size) + extra)
    finally:
        os.close(opened)
