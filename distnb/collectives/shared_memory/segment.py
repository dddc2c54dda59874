"""Memory that the replicas of one machine share, and that each of them maps twice.

The *common* view is the memory itself: all replicas see what is written to it. The *own* view shows the same pages
until the replica writes to one of them. Then the kernel gives the replica a private copy of that page (MAP_PRIVATE,
copy on write). Programs hold their tensors in the own view. So each replica can change a variable in place as if it had
its own copy of everything, and only changed pages take memory.

For example, a variable is on pages 0 to 2, and replica 1 writes to one element on page 1:

    page              0          1               2
    common            ███        ███             ███      the variable
    own, replica 0    common     common          common   sees the variable
    own, replica 1    common     private copy    common   sees its own element

`changed()` is [1] on replica 1, which can compare its copy with the common page, or write it there. `forget([1])` then
drops the copy, and the own view shows the common page again.

The kernel says in /proc/self/pagemap which pages are private: bit 61 of an entry is set for a page of a file or of
shared memory, and a private copy is neither. The memory has no name, so nothing of it is left when the processes end.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import torch

from distnb.collectives.shared_memory import host
from distnb.errors import CollectiveError

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group

__all__ = ["SharedMemory"]

_PAGE = mmap.PAGESIZE
_PAGEMAP = "/proc/self/pagemap"
# The highest bits of a pagemap entry: in memory, swapped out, of a file or shared. A private copy has no third bit.
_FLAGS_AT, _PRESENT, _SWAPPED, _OF_FILE = 61, 4, 2, 1


@dataclass(frozen=True)
class _Card:
    """A replica's description of itself and, from replica 0, of the memory that it made."""

    host: str
    pid: int
    descriptor: int
    problem: str


class SharedMemory:
    """A segment of common memory. All replicas create it together, or all raise CollectiveError."""

    def __init__(self, group: Group, nbytes: int) -> None:
        self.nbytes = -(-nbytes // _PAGE) * _PAGE
        descriptor, problem = -1, ""
        if group.rank == 0:
            descriptor, problem = _made(self.nbytes)
        try:
            cards = group.all_gather_object(
                _Card(host=host.identity(), pid=os.getpid(), descriptor=descriptor, problem=problem)
            )
            if group.rank != 0:
                descriptor, problem = _opened(cards[0])
            problems = [each for each in group.all_gather_object(problem) if each]
            if problems:
                raise CollectiveError(
                    f"The replicas cannot share the memory that central storage needs: {problems[0]}. Use "
                    "MirroredStrategy, where each replica has a copy of every variable."
                )
            self._common = mmap.mmap(descriptor, self.nbytes)
            self._own = mmap.mmap(descriptor, self.nbytes, flags=mmap.MAP_PRIVATE)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._address = torch.frombuffer(self._own, dtype=torch.uint8).data_ptr()

    def common(self, begin: int, nbytes: int) -> torch.Tensor:
        """Return the common view of a range of bytes."""
        return torch.frombuffer(self._common, dtype=torch.uint8, count=nbytes, offset=begin)

    def own(self, begin: int, nbytes: int) -> torch.Tensor:
        """Return the own view of a range of bytes."""
        return torch.frombuffer(self._own, dtype=torch.uint8, count=nbytes, offset=begin)

    def changed(self) -> list[int]:
        """Return the numbers of the pages that this replica has written to, and so has private copies of."""
        count = self.nbytes // _PAGE
        with open(_PAGEMAP, "rb", buffering=0) as file:
            entries = bytearray(os.pread(file.fileno(), 8 * count, 8 * (self._address // _PAGE)))
        flags = torch.frombuffer(entries, dtype=torch.int64) >> _FLAGS_AT
        copied = ((flags & (_PRESENT | _SWAPPED)) != 0) & ((flags & _OF_FILE) == 0)
        pages: list[int] = copied.nonzero().flatten().tolist()
        return pages

    @staticmethod
    def pages(begin: int, nbytes: int) -> range:
        """Return the numbers of the pages that a range of bytes touches."""
        return range(begin // _PAGE, (begin + nbytes - 1) // _PAGE + 1)

    def forget(self, pages: Sequence[int]) -> None:
        """Drop this replica's private copies of pages, so that its own view shows the common memory there."""
        begin = 0
        while begin < len(pages):
            end = begin + 1
            while end < len(pages) and pages[end] == pages[end - 1] + 1:
                end += 1
            self._own.madvise(mmap.MADV_DONTNEED, pages[begin] * _PAGE, (end - begin) * _PAGE)
            begin = end


def _made(nbytes: int) -> tuple[int, str]:
    """Return a descriptor of new memory, or -1 and the reason."""
    if sys.platform != "linux" or not os.access(_PAGEMAP, os.R_OK):
        return -1, f"this system does not report which pages of memory were written to ({_PAGEMAP})"
    available = psutil.virtual_memory().available
    if nbytes > available:
        # Otherwise the kernel would grant pages until it has to kill processes of any user.
        return -1, f"{nbytes} bytes are not available (free: {available})"
    descriptor = os.memfd_create("distnb-variables")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # a limit raises an error now, not a signal at the memory's use
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            return -1, f"{nbytes} bytes are not available ({error.strerror})"
        raise
    return descriptor, ""


def _opened(first: _Card) -> tuple[int, str]:
    """Return a descriptor of the memory that replica 0 made, or -1 and the reason."""
    if first.problem:
        return -1, ""
    if first.host != host.identity():
        return -1, "they are on different machines, or run in different containers or as different users"
    try:
        return os.open(f"/proc/{first.pid}/fd/{first.descriptor}", os.O_RDWR), ""
    except OSError as error:
        return -1, f"replica 0's memory cannot be opened ({error.strerror})"
