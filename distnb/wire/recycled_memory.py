"""Shared memory that one connection writes to again and again: for large messages that the receiver soon has done with.

New memory costs several times as much as copying into it: the kernel finds each page, and both processes map it. Here
the sender writes into memory that both have mapped since an earlier message. A flag in it says that the receiver still
uses what is there; it is cleared when the last object built on it is gone. Who keeps such objects makes the sender take
other memory, of which there is a little, and then new memory each time (`wire.shared_memory_buffer`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import weakref
from collections.abc import Iterator, Sequence
from typing import Final

from distnb.errors import MessageError
from distnb.wire.codec import Frame
from distnb.wire.shared_memory_buffer import LARGE_NBYTES

__all__ = ["RecycledReceiver", "RecycledSender"]

_FLAG_NBYTES: Final = mmap.PAGESIZE  # what follows is aligned to pages
_ALIGNMENT: Final = 64
_MOST_BLOCKS: Final = 2
_MOST_NBYTES: Final = 128 << 20


class _Block:
    """Memory of the sender; its descriptor goes to the receiver once."""

    def __init__(self, nbytes: int) -> None:
        self.descriptor = os.memfd_create("distnb-recycled", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, _FLAG_NBYTES + nbytes)
            self.memory = mmap.mmap(self.descriptor, _FLAG_NBYTES + nbytes)
        except OSError:
            os.close(self.descriptor)
            raise
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def in_use(self) -> bool:
        return self.memory[0] != 0


class RecycledSender:
    """The sender's memory of one connection: as much as its largest messages, up to 128 MB each, for one or two."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def write(self, frames: Sequence[Frame]) -> tuple[bytes, _Block | None] | None:
        """Write a message. Return the notice for the receiver, and the memory whose descriptor goes with it.

        None: it is small, or too large, or there is no memory for it.
        """
        views = [memoryview(frame).cast("B") for frame in frames]
        sizes = [view.nbytes for view in views]
        if not LARGE_NBYTES <= sum(sizes) <= _MOST_NBYTES:
            return None
        table = pickle.dumps(sizes)
        places = list(_places([len(table), *sizes]))
        with contextlib.suppress(OSError):
            slot, block, is_new = self._block(places[-1] + sizes[-1])
            block.memory[0] = 1
            with memoryview(block.memory) as memory:
                for place, view in zip(places, (memoryview(table), *views), strict=True):
                    start = _FLAG_NBYTES + place
                    memory[start : start + view.nbytes] = view
            return pickle.dumps((slot, is_new, len(table))), block if is_new else None
        return None

    def _block(self, nbytes: int) -> tuple[int, _Block, bool]:
        """Return a free block of this size: its number, the block, and whether it is new to the receiver."""
        free = [slot for slot, block in enumerate(self._blocks) if not block.in_use]
        for slot in free:
            if len(self._blocks[slot].memory) >= _FLAG_NBYTES + nbytes:
                return slot, self._blocks[slot], False
        if not free and len(self._blocks) == _MOST_BLOCKS:
            raise BlockingIOError
        block = _Block(1 << (nbytes - 1).bit_length())  # pages that nothing is written to are none
        if free:
            self._blocks[free[0]] = block
            return free[0], block, True
        self._blocks.append(block)
        return len(self._blocks) - 1, block, True


class RecycledReceiver:
    """The receiver's end of the same."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap] = {}

    def read(self, description: bytes, descriptor: int | None) -> list[Frame]:
        """Return a message. Its frames can be written to, and their memory is the sender's again when they are gone.

        Raises:
            MessageError: There is no room for it.
        """
        slot, is_new, table_nbytes = pickle.loads(description)
        try:
            if is_new:
                self._blocks.pop(slot, None)
                if descriptor is None:
                    raise OSError("its descriptor was lost, since too many files are open")
                self._blocks[slot] = mmap.mmap(descriptor, 0)
            block = self._blocks[slot]
        except (OSError, KeyError) as error:
            raise MessageError(f"The shared memory of a message could not be had: {error!r}.") from error
        whole = (ctypes.c_ubyte * (len(block) - _FLAG_NBYTES)).from_buffer(block, _FLAG_NBYTES)
        weakref.finalize(whole, _release, block, os.getpid()).atexit = False
        view = memoryview(whole).cast("B")
        sizes = pickle.loads(view[:table_nbytes])
        _, *places = _places([table_nbytes, *sizes])
        return [view[place : place + size] for place, size in zip(places, sizes, strict=True)]


def _release(block: mmap.mmap, process: int) -> None:
    if os.getpid() == process:  # else a forked child is done with it, and the receiver perhaps not
        block[0] = 0


def _places(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the offsets of frames of these sizes, one after the other."""
    at = 0
    for size in sizes:
        yield at
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
