"""Reductions and gathers in memory that the replicas of one machine share: several times faster than Gloo.

Each replica has a header and an area that only it writes to. All write to the two common areas:

    collective log │ header 0 │ header 1 │ … │ area 0 │ area 1 │ … │ common area 0 │ common area 1
    header         posted │ done │ news │ (unused) │ offsets of 256 slots
    area           tensors, each at the beginning of a cache line
    common area    one tensor of which each replica has written its shard

To reduce a tensor, a replica copies it to its area, writes its offset to the header, and then raises `posted`. It waits
until the others have raised theirs, and adds up the tensors of all areas in replica order, so that every replica gets
the same bits. A gather copies the tensors instead. At the end the replica raises `done`. When all replicas have done
so, the place in its area is free again.

For example, operation 5 sums two tensors of 1 KB. Replica 0 arrives first, and replica 1 while replica 0 sleeps:

    replica 0                                       replica 1
    copies its tensor to byte 0 of area 0
    offsets[5] = 0, then posted = 5
    reads 4 in header 1 and sleeps on that word
                                                    copies its tensor to byte 0 of area 1
                                                    offsets[5] = 0, then posted = 5, and wakes replica 0
    reads 5: adds up area 0 and area 1              reads 5 in header 0: adds up area 0 and area 1
    done = 5                                        done = 5

The tensors of sharded models are not copied: `room` is the memory in which a replica computes the tensor that it is
about to post. A reduce-scatter adds up the own parts of the tensors in all areas. `common_room` is the memory of a
tensor that is gathered from shards. Each replica writes its shard there, posts, and reads all of them in place when the
others have posted; gathers use the two common areas in turn. A replica gets no common room while any replica reads the
area's last tensor. It then posts its shard in its own area, and the others copy it to the common area, all of them the
same bytes.

Memory order. No replica takes a lock. A reader that sees `posted = 5` must also see the tensor and the offset, which
were written before. x86 never reorders plain stores, nor plain loads, so the order in the source is enough; C calls
between the stores keep the compiler from moving them. ARM reorders both, so Gloo is used there. The waiting replica
passes the value that it has read to the kernel (a futex): the kernel lets it sleep only if the word still has that
value, so a wake-up in between is not lost. It sleeps in slices of 100 ms, between which it notices an abort or a
mismatch.

An idle core takes long to wake up, above all in a virtual machine, and the replica that wakes it loses time, too: 50 µs
each, as long as a small sum takes. So if there is a core for each replica, a waiting replica reads the word for 100 µs
before it sleeps, and yields its core to other processes meanwhile. Reading for a millisecond saves no more, because two
cores may be one physical core, on which the reader slows the other replica down.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distnb import activity
from distnb.activity import Arrival
from distnb.collectives.verify.collective_log import CollectiveLog
from distnb.errors import CollectiveError

if TYPE_CHECKING:
    from distnb.collectives.group.communicator import Communicator

__all__ = ["GATHER", "SHARDS", "SharedSum", "SharedWork", "Write", "nbytes"]

GATHER, SHARDS = "gather", "shards"
Write = Callable[[torch.Tensor], object]
"""A function that writes a replica's tensor to memory in which the others read it."""

_PAGE = 4096
_LINE = 64
_AREA_NBYTES = 2**30  # of addresses: a page takes memory once it is written to
_MOST_NBYTES = 16 * 2**20
_MOST_SHARDED_NBYTES = 256 * 2**20  # of a tensor that would otherwise need as much memory of its own
_SLOTS = 256  # the number of operations that a replica may have under way
_POSTED, _DONE, _NEWS, _OFFSETS = 0, 1, 2, 16  # the number of words in a replica's header
_WORDS = _OFFSETS + _SLOTS
_HEADER_NBYTES = -(-4 * _WORDS // _LINE) * _LINE
_IN_COMMON = 2**32 - 2  # in place of an offset: this, or 1 more, for the first or second common area
_KNOWN_VIEWS = 256
_READING_S = 1e-4  # before a waiting replica sleeps
_TRIM_AFTER = 64  # operations: an area keeps the memory that those have used

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_DTYPES = frozenset(_FLOATS | {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})
_COMBINE: dict[str, Any] = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum}

_POSSIBLE = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_slice = _TimeSpec(0, 100_000_000)
_slice_at = ctypes.addressof(_slice)
_libc = ctypes.CDLL(None, use_errno=True)
_syscall: Any = _libc.syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, *[ctypes.c_long] * 2, *[ctypes.c_void_p] * 2, ctypes.c_long]
_syscall.restype = ctypes.c_long
_yield_core: Any = _libc.sched_yield


def nbytes(size: int) -> int:
    """Return the size of the areas of this number of replicas, behind a collective log, in bytes."""
    return _PAGE + size * _HEADER_NBYTES + (size + 2) * _AREA_NBYTES + _PAGE if _POSSIBLE else 0


class SharedSum:
    """The areas of one communicator, in its collective log's memory, behind the log itself."""

    def __init__(self, log: CollectiveLog) -> None:
        memory, size = log.memory, log.size
        self._me, self.size = log.me, size
        self._reading_s = _READING_S if len(os.sched_getaffinity(0)) >= size else 0.0
        self._others = [rank for rank in range(size) if rank != log.me]
        base = -(-CollectiveLog.nbytes(size) // _PAGE) * _PAGE
        heads = [base + rank * _HEADER_NBYTES for rank in range(size)]
        self._words = [(ctypes.c_uint32 * _WORDS).from_buffer(memory, head) for head in heads]
        self._addresses = [ctypes.addressof(words) for words in self._words]
        begin = -(-(base + size * _HEADER_NBYTES) // _PAGE) * _PAGE
        with torch.inference_mode(False):  # tensors made in it could not be written to outside it
            self._areas = [
                torch.frombuffer(memory, dtype=torch.uint8, count=_AREA_NBYTES, offset=begin + index * _AREA_NBYTES)
                for index in range(size + 2)
            ]
        self._memory = memory
        self._area_at = begin + log.me * _AREA_NBYTES
        self._trimmed_at = 0
        self._top, self._recent_top = 0, 0  # the end of the area's used memory: of all, and by the last operations
        self._begins = [area.data_ptr() for area in self._areas]
        self._number = 0
        self._gathers = 0  # the number of tensors that were gathered from shards
        self._last_in = [0, 0]  # the number of the last operation in each common area
        self._under_way: list[tuple[int, int, int]] = []  # (number, begin, end) of tensors that others may still read
        self._finished: set[int] = set()
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}

    @classmethod
    def of(cls, log: CollectiveLog) -> SharedSum | None:
        """Return the areas behind a log, or None if the replicas do not share memory."""
        return cls(log) if _POSSIBLE and log.shared and log.size > 1 else None

    def accepts(self, tensor: torch.Tensor, op: str) -> bool:
        """Return whether a tensor can be reduced or gathered here. The result is the same on all replicas."""
        size = tensor.numel() * tensor.dtype.itemsize
        if not 0 < size <= _MOST_NBYTES or size * self.size > 4 * _MOST_NBYTES:
            return False
        return op == GATHER or (op in _COMBINE and tensor.dtype in _DTYPES)

    def accepts_sharded(self, numel: int, dtype: torch.dtype, op: str) -> bool:
        """Return whether a tensor can be scattered after its reduction, or gathered from shards, here."""
        return 0 < numel * dtype.itemsize <= _MOST_SHARDED_NBYTES and (op == SHARDS or dtype in _DTYPES)

    # Writing -------------------------------------------------------------------------------------------------

    def room(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory for the tensor of the next operation, which `post` then does not copy. None if it is full."""
        begin = self._free(numel * dtype.itemsize) if self.accepts_sharded(numel, dtype, "sum") else None
        return None if begin is None else self._view(self._me, begin, (numel,), dtype)

    def common_room(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory for the tensor that the next operation gathers from shards. None while a replica uses it."""
        index = self._gathers % 2
        if not self.accepts_sharded(numel, dtype, SHARDS) or self._last_in[index] > self._read():
            return None
        return self._view(self.size + index, 0, (numel,), dtype)

    def post(
        self,
        tensor: torch.Tensor,
        communicator: Communicator,
        number: int,
        wanted: bool = True,
        write: Write | None = None,
    ) -> int:
        """Copy a tensor to this replica's area and notify the others. Return the operation's number here.

        Call it in the order of the collectives, one at a time. With `wanted` False the tensor is not copied, and with
        `write` that is called instead; only the tensor's size is used then.
        """
        size = tensor.numel() * tensor.dtype.itemsize
        begin = tensor.data_ptr() - self._begins[self._me]
        if not 0 <= begin < _AREA_NBYTES:
            begin = self._room(size, communicator, number)
            if wanted:
                place = self._view(self._me, begin, tensor.shape, tensor.dtype)
                place.copy_(tensor.detach()) if write is None else write(place)
        self._under_way.append((self._number + 1, begin, begin + -(-size // _LINE) * _LINE))
        self._recent_top = max(self._recent_top, begin + size)
        if self._number - self._trimmed_at >= _TRIM_AFTER:
            self._trim()
        return self._notify(begin // _LINE)

    def post_shard(self, shard: torch.Tensor, whole: torch.Tensor, communicator: Communicator, number: int) -> int:
        """Post this replica's shard of a tensor, which may be in the common room."""
        index = self._gathers % 2
        self._gathers += 1
        self._last_in[index] = self._number + 1
        if whole.data_ptr() == self._begins[self.size + index]:
            return self._notify(_IN_COMMON + index)
        return self.post(shard, communicator, number)

    def _notify(self, offset: int) -> int:
        """Begin an operation: notify the others where this replica's tensor is. Return the operation's number here."""
        own = self._number = self._number + 1
        words = self._words[self._me]
        words[_OFFSETS + own % _SLOTS] = offset
        words[_POSTED] = own
        _syscall(_SYS_FUTEX, self._addresses[self._me], _FUTEX_WAKE, self.size, None, None, 0)
        return own

    def _read(self) -> int:
        """Return the number of the last operation that no replica reads any longer, nor any before it."""
        return min([words[_DONE] for words in self._words])  # this replica reads its own part, too, and may be the last

    def _free(self, size: int) -> int | None:
        """Return a free place in the area, as near to the beginning as possible, where caches are warm; or None."""
        size = -(-size // _LINE) * _LINE
        read = self._read()
        self._under_way = occupied = [entry for entry in self._under_way if entry[0] > read]
        begin = 0
        for _, other, end in sorted(occupied, key=lambda entry: entry[1]):
            if begin + size <= other:
                break
            begin = max(begin, end)
        return begin if begin + size <= _AREA_NBYTES and len(occupied) < _SLOTS else None

    def _trim(self) -> None:
        """Release the memory behind all places of the last operations, and of those under way."""
        ends = [end for _, _, end in self._under_way]
        kept = -(-max(self._recent_top, *ends) // _PAGE) * _PAGE
        if kept < self._top and isinstance(self._memory, mmap.mmap):
            self._memory.madvise(mmap.MADV_REMOVE, self._area_at + kept, self._top - kept)
        self._top, self._recent_top, self._trimmed_at = kept, 0, self._number

    def _room(self, size: int, communicator: Communicator, number: int) -> int:
        """Wait for a free place in the area."""
        while True:
            read = self._read()
            if (begin := self._free(size)) is not None:
                return begin
            if self._words[self._me][_DONE] == read:
                raise CollectiveError(
                    f"More than {_SLOTS} reductions, or {_AREA_NBYTES >> 20} MiB of them, were started on this replica "
                    "and not waited for. Call wait() on what all_reduce_start returned."
                )
            slowest = min(self._others, key=lambda rank: self._words[rank][_DONE])
            self._sleep(slowest, _DONE, self._words[slowest][_DONE], communicator, number)

    # News in the collective log ------------------------------------------------------------------------------

    def announce_news(self) -> None:
        """Wake the replicas that wait for this one's reports in the collective log."""
        self._words[self._me][_NEWS] += 1
        _syscall(_SYS_FUTEX, self._addresses[self._me] + 4 * _NEWS, _FUTEX_WAKE, self.size, None, None, 0)

    def news(self) -> list[int]:
        """Return each replica's count of reports."""
        return [words[_NEWS] for words in self._words]

    def await_news(self, rank: int, seen: int, communicator: Communicator, number: int) -> None:
        """Wait until a replica's count of reports is no longer `seen`, or a slice of time is over."""
        self._sleep(rank, _NEWS, seen, communicator, number)

    # Reading -------------------------------------------------------------------------------------------------

    def collect(self, own: int, tensor: torch.Tensor, op: str, work: SharedWork) -> list[torch.Tensor]:
        """Wait for the others. Write a reduction's result into the tensor, or return a gather's tensors.

        A tensor gathered from shards may be in a common area, which is used again when `done` is called for it.
        """
        sources = work.sources
        if not self.posted(own, sources):
            self._wait_for(sources, own, work)
        if op == SHARDS:
            self._complete(own, tensor)
            work.communicator.finished(work)  # so that nothing refers to the work, whose end calls `done`
            return [tensor]
        slot = _OFFSETS + own % _SLOTS
        shift = self._me * tensor.numel() * tensor.dtype.itemsize if work.scatters else 0
        views = [
            self._view(rank, self._words[rank][slot] * _LINE + shift, tensor.shape, tensor.dtype) for rank in sources
        ]
        if op == GATHER:
            gathered = [view.to(tensor.device, copy=True) for view in views]
            self.done(own)
            return gathered
        combine = _COMBINE[op]
        with torch.no_grad():
            target = tensor.detach() if tensor.device.type == "cpu" else torch.empty_like(views[0])
            combine(views[0], views[1], out=target)
            for view in views[2:]:
                combine(target, view, out=target)
            if op == "mean":
                target.div_(self.size)
            if tensor.device.type != "cpu":
                tensor.detach().copy_(target)
        self.done(own)
        return [tensor]

    def _complete(self, own: int, whole: torch.Tensor) -> None:
        """Copy the shards of the other replicas that are not in their places."""
        shards = whole.view(self.size, -1)
        nbytes = shards[0].numel() * whole.dtype.itemsize
        for rank in self._others:
            offset = self._words[rank][_OFFSETS + own % _SLOTS]
            is_common = offset >= _IN_COMMON
            area = self.size + offset - _IN_COMMON if is_common else rank
            begin = rank * nbytes if is_common else offset * _LINE
            if self._begins[area] + begin != whole.data_ptr() + rank * nbytes:
                shards[rank].copy_(self._view(area, begin, shards[rank].shape, whole.dtype))

    def _wait_for(self, ranks: Sequence[int], own: int, work: SharedWork) -> None:
        communicator = work.communicator
        communicator.watch(work)
        try:
            for rank in ranks:
                words = self._words[rank]
                while (posted := words[_POSTED]) < own:
                    self._sleep(rank, _POSTED, posted, communicator, work.number)
        finally:
            communicator.finished(work)

    def posted(self, own: int, ranks: Sequence[int]) -> bool:
        """Return whether these replicas have posted that operation."""
        return all(self._words[rank][_POSTED] >= own for rank in ranks)

    def done(self, own: int) -> None:
        """Report that this replica no longer reads tensors of that operation."""
        words = self._words[self._me]
        self._finished.add(own)
        while words[_DONE] + 1 in self._finished:
            self._finished.discard(words[_DONE] + 1)
            words[_DONE] += 1

    def wake(self) -> None:
        """Wake every waiting replica, so that it looks for a reason to stop."""
        for address in self._addresses:
            _syscall(_SYS_FUTEX, address, _FUTEX_WAKE, self.size, None, None, 0)

    def _sleep(self, rank: int, word: int, seen: int, communicator: Communicator, number: int) -> None:
        """Wait until a word of a replica has changed, or a slice of time is over."""
        if communicator.failure is not None:
            communicator.raise_failure()
        words, until = self._words[rank], time.perf_counter() + self._reading_s
        while time.perf_counter() < until:
            if words[word] != seen:
                return
            _yield_core()
        if _syscall(_SYS_FUTEX, self._addresses[rank] + 4 * word, _FUTEX_WAIT, seen, _slice_at, None, 0) == 0:
            return
        if words[word] == seen:
            try:
                communicator.examine(number)
                if communicator.lost("ended") > 0:
                    communicator.explain(number, RuntimeError("it was closed"))
            finally:
                communicator.waited()

    def _view(self, area: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        key = (area, begin, shape, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _KNOWN_VIEWS:
                self._views.clear()
            size = math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):  # as above: a view as another dtype counts as made here
                view = self._areas[area][begin : begin + size].view(dtype).view(shape)
            self._views[key] = view
        return view


class SharedWork:
    """A reduction or gather under way.

    Args:
        tensor: The tensor for the result, or the one that is gathered.
        sources: The replicas whose tensors are read, in this order; None means all.
        scatters: Whether the tensor gets this replica's part of the result.
    """

    def __init__(
        self,
        shared: SharedSum,
        own: int,
        tensor: torch.Tensor,
        op: str,
        communicator: Communicator,
        arrival: Arrival,
        sources: Sequence[int] | None = None,
        scatters: bool = False,
    ) -> None:
        self._shared = shared
        self._own = own
        self._tensor: torch.Tensor | None = tensor
        self._op = op
        self.communicator = communicator
        self.number = arrival.number
        self._arrival = arrival
        self.sources = range(shared.size) if sources is None else sources
        self.scatters = scatters

    def wait(self) -> None:
        """Wait for the end, when the tensor holds the result."""
        self.result()

    def result(self) -> list[torch.Tensor]:
        """Wait for the end and return a gather's tensors, source by source. Call it once."""
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            return []
        if self.communicator.failed:
            self.communicator.raise_failure()
        activity.begin("collective", self._arrival)
        try:
            return self._shared.collect(self._own, tensor, self._op, self)
        finally:
            activity.end()

    def conclude(self) -> None:
        """Wake the wait, because the communicator has failed."""
        self._shared.wake()

    def under_way(self) -> bool:
        """Return False: it does not run outside of Python."""
        return False

    def is_completed(self) -> bool:
        """Return whether all replicas whose tensors this one reads have posted."""
        return self._shared.posted(self._own, self.sources)

    def __del__(self) -> None:
        # Nobody waits for it, or reads a common area, so the others' data is no longer needed.
        if self._tensor is not None or self._op == SHARDS:
            self._shared.done(self._own)
