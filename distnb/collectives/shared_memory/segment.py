"""Memory that the replicas of one machine have in common, and that each of them sees in two ways.

The *common* view is the memory itself: what is written to it, everyone sees. The *own* view shows the same pages, until
the replica writes to one of them: then the kernel gives it a copy of that page, which nobody else sees. Programs hold
tensors in the own view, so a change in place that every replica makes is made once on each, as if each had a copy of
everything; yet only pages that were changed take memory. `changed` tells which they are, and `forget` gives them up, so
that the common memory shows again.

The memory has no name: nothing of it is left behind when the processes end, however they end.
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
# The uppermost bits of a pagemap entry: in memory, swapped out, and of a file or shared (a page's own copy is neither).
_FLAGS_AT, _PRESENT, _SWAPPED, _OF_FILE = 61, 4, 2, 1


@dataclass(frozen=True)
class _Card:
    """What replica 0 tells of the memory that it made; the others tell who they are."""

    host: str
    pid: int
    descriptor: int
    problem: str


class SharedMemory:
    """One piece of common memory. All replicas make it together, or raise CollectiveError alike."""

    def __init__(self, group: Group, nbytes: int) -> None:
        self.nbytes = -(-nbytes // _PAGE) * _PAGE
        descriptor, problem = -1, ""
        if group.rank == 0:
            descriptor, problem = _made(self.nbytes)
        try:
            told = group.all_gather_object(
                _Card(host=host.identity(), pid=os.getpid(), descriptor=descriptor, problem=problem)
            )
            if group.rank != 0:
                descriptor, problem = _opened(told[0])
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
        """Bytes of it, as everyone sees them."""
        return torch.frombuffer(self._common, dtype=torch.uint8, count=nbytes, offset=begin)

    def own(self, begin: int, nbytes: int) -> torch.Tensor:
        """The same bytes, as this replica sees them."""
        return torch.frombuffer(self._own, dtype=torch.uint8, count=nbytes, offset=begin)

    def changed(self) -> list[int]:
        """The numbers of the pages of which this replica has a copy, since it wrote to them."""
        count = self.nbytes // _PAGE
        with open(_PAGEMAP, "rb", buffering=0) as file:
            entries = bytearray(os.pread(file.fileno(), 8 * count, 8 * (self._address // _PAGE)))
        flags = torch.frombuffer(entries, dtype=torch.int64) >> _FLAGS_AT
        copied = ((flags & (_PRESENT | _SWAPPED)) != 0) & ((flags & _OF_FILE) == 0)
        pages: list[int] = copied.nonzero().flatten().tolist()
        return pages

    @staticmethod
    def pages(begin: int, nbytes: int) -> range:
        """The numbers of the pages on which some bytes lie."""
        return range(begin // _PAGE, (begin + nbytes - 1) // _PAGE + 1)

    def forget(self, pages: Sequence[int]) -> None:
        """Give up this replica's copies of pages: the own view shows there what is common."""
        begin = 0
        while begin < len(pages):
            end = begin + 1
            while end < len(pages) and pages[end] == pages[end - 1] + 1:
                end += 1
            self._own.madvise(mmap.MADV_DONTNEED, pages[begin] * _PAGE, (end - begin) * _PAGE)
            begin = end


def _made(nbytes: int) -> tuple[int, str]:
    """A descriptor of new memory; or -1, and what went wrong."""
    if sys.platform != "linux" or not os.access(_PAGEMAP, os.R_OK):
        return -1, f"this system does not tell which pages of memory were written to ({_PAGEMAP})"
    available = psutil.virtual_memory().available
    if nbytes > available:
        # The kernel would give pages until it ends processes, whosever they are.
        return -1, f"{nbytes} bytes are not to be had ({available} are available)"
    descriptor = os.memfd_create("distnb-variables")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # what a limit forbids is told now, not by a signal when it is used
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            return -1, f"{nbytes} bytes are not to be had ({error.strerror})"
        raise
    return descriptor, ""


def _opened(first: _Card) -> tuple[int, str]:
    """A descriptor of the memory that replica 0 made; or -1, and what went wrong."""
    if first.problem:
        return -1, ""
    if first.host != host.identity():
        return -1, "they are on different machines, or run in different containers or as different users"
    try:
        return os.open(f"/proc/{first.pid}/fd/{first.descriptor}", os.O_RDWR), ""
    except OSError as error:
        return -1, f"replica 0's memory cannot be opened ({error.strerror})"
