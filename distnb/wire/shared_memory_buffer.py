"""Shared memory for large frames between processes of one host. Each receiver gets a descriptor of the memory.

A frame that is sent through a socket is copied for each receiver. Here it is copied once, into anonymous memory, and
the kernel passes a descriptor of the memory to every receiver (`wire.unix_socket`). A receiver maps the memory
privately, so it can write to objects that it builds on the frame, and no other process sees the change. The kernel
frees the memory when no process has a descriptor or a mapping of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Final

from distnb.errors import MessageError
from distnb.objects.memory.received_memory import unwatch, watch
from distnb.wire.codec import Frame

__all__ = ["LARGE_NBYTES", "SharedMemoryBuffer", "read_frame"]

LARGE_NBYTES: Final = 128 << 10
"""The least size of a frame in shared memory. For a smaller frame, separate memory costs more than it saves."""

_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class SharedMemoryBuffer:
    """Immutable memory with a copy of a frame. Its descriptor is closed when this object is deleted.

    Raises:
        OSError: No memory or no descriptor is left.
    """

    __slots__ = ("descriptor",)

    def __init__(self, frame: Frame) -> None:
        self.descriptor = os.memfd_create("distnb-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        rest = memoryview(frame).cast("B")
        while rest.nbytes:
            rest = rest[os.write(self.descriptor, rest) :]
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)  # no process can change or shrink it any more

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def read_frame(descriptor: int, nbytes: int) -> Frame:
    """Return the frame in shared memory. The caller may write to it; other processes do not see the changes.

    Raises:
        MessageError: The memory is smaller than the frame.
    """
    return _map(descriptor, nbytes) or _read(descriptor, nbytes)


def _map(descriptor: int, nbytes: int) -> Frame | None:
    """Return shared memory mapped copy-on-write, or None if it cannot be mapped.

    `mmap.mmap` is not used, because before Python 3.13 it keeps a descriptor open as long as the mapping exists.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    if address == _MAP_FAILED:
        return None
    mapped = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit: other objects may still use the memory then, and the kernel frees it with the process.
    weakref.finalize(mapped, _unmap, address, nbytes).atexit = False
    watch(address, nbytes)
    return memoryview(mapped).cast("B")


def _unmap(address: int, nbytes: int) -> None:
    unwatch(address, nbytes)
    _libc.munmap(address, nbytes)


def _read(descriptor: int, nbytes: int) -> Frame:
    frame, offset = bytearray(nbytes), 0
    while offset < nbytes:
        count = os.preadv(descriptor, [memoryview(frame)[offset:]], offset)
        if not count:
            raise MessageError(f"The shared memory of a message has {offset} bytes, but its frame has {nbytes}.")
        offset += count
    return frame
