"""Shared memory that a connection reuses for large messages whose receiver needs them only for a short time.

Allocating new memory costs several times as much as copying into it, because the kernel allocates each page and both
processes map it. Here the sender writes into a block that both processes have mapped since an earlier message. The
first page of a block contains a flag, which the sender sets and the receiver clears when the last object built on the
block's content is gone. If the receiver keeps such objects, the sender uses its other block. If both blocks are in use,
the message is sent in new memory (`wire.shared_memory_buffer`).

    offset     content
    0          the flag: 1 while the receiver uses the block; the rest of the page is unused
    1 page     the pickled list of the sizes of the frames
    …          the frames, each aligned to 64 bytes
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

_FLAG_NBYTES: Final = mmap.PAGESIZE  # a whole page, so that the content is aligned to pages
_ALIGNMENT: Final = 64
_MOST_BLOCKS: Final = 2
_MOST_NBYTES: Final = 128 << 20


class _Block:
    """A block of the sender's memory. Its descriptor is sent to the receiver once."""

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
    """The sender's memory of one connection: up to two blocks, which it replaces by larger ones for larger messages.

    Messages of more than 128 MiB are not written.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def write(self, frames: Sequence[Frame]) -> tuple[bytes, _Block | None] | None:
        """Write a message. Return its description for the receiver, and the block if the receiver lacks its descriptor.

        Return None if the message is small or too large, or if there is no memory for it.
        """
        views = [memoryview(frame).cast("B") for frame in frames]
        sizes = [view.nbytes for view in views]
        if not LARGE_NBYTES <= sum(sizes) <= _MOST_NBYTES:
            return None
        table = pickle.dumps(sizes)
        offsets = list(_offsets([len(table), *sizes]))
        with contextlib.suppress(OSError):
            slot, block, is_new = self._block(offsets[-1] + sizes[-1])
            block.memory[0] = 1
            with memoryview(block.memory) as memory:
                for offset, view in zip(offsets, (memoryview(table), *views), strict=True):
                    start = _FLAG_NBYTES + offset
                    memory[start : start + view.nbytes] = view
            return pickle.dumps((slot, is_new, len(table))), block if is_new else None
        return None

    def _block(self, nbytes: int) -> tuple[int, _Block, bool]:
        """Return a free block of at least this size: its number, the block, and whether it is new to the receiver.

        Raises:
            BlockingIOError: All blocks are in use.
        """
        free = [slot for slot, block in enumerate(self._blocks) if not block.in_use]
        for slot in free:
            if len(self._blocks[slot].memory) >= _FLAG_NBYTES + nbytes:
                return slot, self._blocks[slot], False
        if not free and len(self._blocks) == _MOST_BLOCKS:
            raise BlockingIOError
        block = _Block(1 << (nbytes - 1).bit_length())  # the kernel allocates only the pages that are written to
        if free:
            self._blocks[free[0]] = block
            return free[0], block, True
        self._blocks.append(block)
        return len(self._blocks) - 1, block, True


class RecycledReceiver:
    """The receiver's mappings of the sender's blocks, for one connection."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap] = {}

    def read(self, description: bytes, descriptor: int | None) -> list[Frame]:
        """Return the frames of a message. They are writable. When all of them are gone, the sender can reuse the block.

        Raises:
            MessageError: The block cannot be mapped.
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
            raise MessageError(f"The shared memory of a message could not be mapped: {error!r}.") from error
        whole = (ctypes.c_ubyte * (len(block) - _FLAG_NBYTES)).from_buffer(block, _FLAG_NBYTES)
        weakref.finalize(whole, _release, block, os.getpid()).atexit = False
        view = memoryview(whole).cast("B")
        sizes = pickle.loads(view[:table_nbytes])
        _, *offsets = _offsets([table_nbytes, *sizes])
        return [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]


def _release(block: mmap.mmap, process: int) -> None:
    if os.getpid() == process:  # otherwise this is a forked child, and the receiver may still use the block
        block[0] = 0


def _offsets(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the offsets of consecutive frames of these sizes."""
    offset = 0
    for size in sizes:
        yield offset
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
