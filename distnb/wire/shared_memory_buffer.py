"""Large frames between processes of one host: written once into memory, of which the receivers get a descriptor.

A frame that goes through a socket is copied for each receiver. Here it is copied once, into memory without a name, and
the kernel hands a descriptor of it to every receiver (`wire.passage`). The sender lets go of it at once; a receiver
maps it, privately, so that what is built on it can be written to and nobody else sees that. The kernel counts who has
the memory: it is gone with the last array that is built on it, or with the processes, however they end. There is
nothing to sweep up.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Final

from distnb.errors import MessageError
from distnb.wire.codec import Frame

__all__ = ["FREIGHT_NBYTES", "Crate", "SharedMemoryBuffer", "load", "stow", "unload"]

FREIGHT_NBYTES: Final = 128 << 10
"""Smaller frames stay in the message: for them memory of their own costs more than it saves."""

_OWN_NBYTES: Final = 4 << 20  # smaller frames share memory, and are copied out of it
_MOST_OWN: Final = 64  # of a message: only so many descriptors can be on their way
_SEALS: Final = fcntl.F_ADD_SEALS, (fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

Crate = tuple[tuple[int, int], ...]
"""What lies in one memory, in order: (place in the message, size in bytes) of each frame."""


class SharedMemoryBuffer:
    """A descriptor of memory on its way: closed when nobody who is to send it is left."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def stow(frames: Sequence[Frame]) -> list[Crate]:
    """How a message's large frames are to be laid into memory; empty if it has none.

    The largest lie alone, so that each is free as soon as it is not used any more; the others lie together.
    """
    if max(map(len, frames)) < FREIGHT_NBYTES:  # of bytes; `encode` makes no other frames
        return []
    sizes = [(place, memoryview(frame).nbytes) for place, frame in enumerate(frames)]
    alone = [one for one in sizes if one[1] >= _OWN_NBYTES][:_MOST_OWN]
    together = tuple(one for one in sizes if one[1] >= FREIGHT_NBYTES and one not in alone)
    return [*((one,) for one in alone), *([together] if together else [])]


def load(frames: Iterable[Frame]) -> SharedMemoryBuffer:
    """Memory that holds copies of frames, one after the other, and never changes.

    Raises:
        OSError: No memory, or no descriptor, is to be had.
    """
    descriptor = os.memfd_create("distnb-freight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for frame in frames:
            left = memoryview(frame).cast("B")
            while left.nbytes:
                left = left[os.write(descriptor, left) :]
        fcntl.fcntl(descriptor, *_SEALS)  # whoever gets it can rely on it
    except BaseException:
        os.close(descriptor)
        raise
    return SharedMemoryBuffer(descriptor)


def unload(descriptor: int, crate: Crate) -> Iterable[tuple[int, Frame]]:
    """What memory holds: each frame, with its place in the message. It belongs to the caller, who can write to it.

    Raises:
        MessageError: It holds less.
    """
    place, nbytes = crate[0]
    if len(crate) == 1 and nbytes >= _OWN_NBYTES:
        return [(place, _map(descriptor, nbytes) or _read(descriptor, nbytes, 0))]
    # Copies: they cost no more than mapping, and a frame that is kept would keep all that lies in memory with it.
    ends = itertools.accumulate(nbytes for _, nbytes in crate)
    return [(place, _read(descriptor, nbytes, end - nbytes)) for (place, nbytes), end in zip(crate, ends, strict=True)]


def _map(descriptor: int, nbytes: int) -> Frame | None:
    """Memory mapped so that writing makes copies of pages; None if there is no room for it.

    Not by `mmap.mmap`: before Python 3.13 that keeps a descriptor for as long as the mapping.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    if address == _MAP_FAILED:
        return None
    mapped = (ctypes.c_ubyte * nbytes).from_address(address)
    # At exit others may still look at it, and the process takes its memory with it anyway.
    weakref.finalize(mapped, _libc.munmap, address, nbytes).atexit = False
    return memoryview(mapped).cast("B")


def _read(descriptor: int, nbytes: int, at: int) -> Frame:
    import numpy

    frame = numpy.empty(nbytes, numpy.uint8).data  # a bytearray would be filled with zeros before
    left = frame
    while left.nbytes:
        count = os.preadv(descriptor, [left], at)
        if not count:
            raise MessageError(f"Shared memory ends after {at} bytes, where a message has frames of {nbytes} more.")
        left, at = left[count:], at + count
    return frame
