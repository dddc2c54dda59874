"""Large frames between processes of one host: written once into memory, of which each receiver gets a descriptor.

A frame that goes through a socket is copied for each receiver. Here it is copied once, into memory without a name, and
the kernel hands a descriptor of it to every receiver (`wire.unix_socket`). A receiver maps it privately: what is built
on it can be written to, and nobody else sees that. The kernel counts who has the memory: there is nothing to sweep up.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Final

from distnb.errors import MessageError
from distnb.wire.codec import Frame

__all__ = ["LARGE_NBYTES", "SharedMemoryBuffer", "read_frame"]

LARGE_NBYTES: Final = 128 << 10
"""Smaller frames stay in the message: for them memory of their own costs more than it saves."""

_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class SharedMemoryBuffer:
    """Memory that holds a copy of a frame and never changes; its descriptor is closed with this object.

    Raises:
        OSError: No memory, or no descriptor, is to be had.
    """

    __slots__ = ("descriptor",)

    def __init__(self, frame: Frame) -> None:
        self.descriptor = os.memfd_create("distnb-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        left = memoryview(frame).cast("B")
        while left.nbytes:
            left = left[os.write(self.descriptor, left) :]
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)  # whoever gets it can rely on it

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def read_frame(descriptor: int, nbytes: int) -> Frame:
    """Return the frame in some shared memory. It belongs to the caller, who can write to it.

    Raises:
        MessageError: The memory holds less.
    """
    return _map(descriptor, nbytes) or _read(descriptor, nbytes)


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


def _read(descriptor: int, nbytes: int) -> Frame:
    frame, at = bytearray(nbytes), 0
    while at < nbytes:
        count = os.preadv(descriptor, [memoryview(frame)[at:]], at)
        if not count:
            raise MessageError(f"Shared memory ends after {at} bytes, where a message has a frame of {nbytes}.")
        at += count
    return frame
