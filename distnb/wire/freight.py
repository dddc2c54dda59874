"""Large frames between processes of one host: written once into memory, of which the receivers get a descriptor.

A frame that goes through the channel's socket is encrypted and copied for each receiver. Here it is copied once, into
memory without a name, and the kernel hands a descriptor of it to every receiver over a UNIX socket. The sender lets
go of it at once; a receiver maps it, privately, so that what is built on it can be written to and nobody else sees
that. The kernel counts who has the memory: it is gone with the last array that is built on it, or with the processes,
however they end. There is nothing to sweep up.

Only who can reach the notebook's UNIX socket shares memory with it; for all others frames stay in the channel.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hmac
import itertools
import mmap
import os
import pickle
import secrets
import socket
import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from distnb.errors import MessageError
from distnb.wire.codec import Frame

__all__ = ["FREIGHT_NBYTES", "Harbour", "Passage", "connect", "is_large", "is_manifest", "ship", "unload"]

FREIGHT_NBYTES: Final = 128 << 10
"""Smaller frames stay in the channel: for them memory of their own costs more than it saves."""

_OWN_NBYTES: Final = 4 << 20  # smaller frames share memory, and are copied out of it
_MOST_OWN: Final = 64  # of a message; the queue of a UNIX socket holds a few hundred descriptors
_MANIFEST: Final = b"F"  # no pickle begins with it
_TAG: Final = struct.Struct("<QI")  # number of the shipment, of the crate in it
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_SEALS: Final = fcntl.F_ADD_SEALS, (fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)

_shipments = itertools.count(1)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

Crate = tuple[tuple[int, int], ...]
"""What lies in one memory, in order: (place in the message, size in bytes) of each frame."""


# -- a message ------------------------------------------------------------------------------------------------------


def ship(frames: Sequence[Frame], passages: Mapping[int, Passage]) -> tuple[list[Frame], set[int]]:
    """Hand a message's large frames to receivers, copied: the sender's own may change when this returns.

    Args:
        frames: The message.
        passages: The receivers' by id.

    Returns:
        What is left to be sent, for those receivers whose ids are returned; the others must be sent the whole.
    """
    crates = _stow(frames)
    reached = set(passages) if crates else set()
    number = next(_shipments)
    for index, crate in enumerate(crates):
        if not reached:
            break
        try:
            descriptor = _fill([frames[place] for place, _ in crate])
        except OSError:  # no memory, or no descriptor, is to be had
            return list(frames), set()
        try:
            tag = _TAG.pack(number, index)
            reached = {receiver for receiver in reached if passages[receiver].offer(tag, descriptor)}
        finally:
            os.close(descriptor)
    if not reached:
        return list(frames), reached
    stowed = {place for crate in crates for place, _ in crate}
    manifest = _MANIFEST + pickle.dumps((number, crates, len(frames)))
    return [manifest, *(frame for place, frame in enumerate(frames) if place not in stowed)], reached


def is_large(frames: Iterable[Frame]) -> bool:
    """Whether a message has frames for which `ship` is worth its while."""
    return max(map(len, frames)) >= FREIGHT_NBYTES


def is_manifest(frame: Frame) -> bool:
    """Whether a message begins so whose large frames were shipped."""
    return frame[:1] == _MANIFEST


def unload(frames: Sequence[Frame], passage: Passage | None) -> list[Frame]:
    """The message of which `ship` left these frames; what is in memory of its own can be written to.

    Raises:
        MessageError: The rest of it cannot be had.
    """
    if passage is None:
        raise MessageError("A message came whose large frames are in shared memory, and there is no way to that.")
    number, crates, count = pickle.loads(frames[0][len(_MANIFEST) :])
    found: dict[int, Frame] = {}
    for index, crate in enumerate(crates):
        descriptor = passage.take(_TAG.pack(number, index))
        try:
            found.update(_open(descriptor, crate))
        finally:
            os.close(descriptor)
            passage.renew_spare()
    others = iter(frames[1:])
    return [found[place] if place in found else next(others) for place in range(count)]


def _stow(frames: Iterable[Frame]) -> list[Crate]:
    """Large frames lie alone, so that each is free as soon as it is not used any more; the others lie together."""
    sizes = [(place, memoryview(frame).nbytes) for place, frame in enumerate(frames)]
    alone = [one for one in sizes if one[1] >= _OWN_NBYTES][:_MOST_OWN]
    together = tuple(one for one in sizes if one[1] >= FREIGHT_NBYTES and one not in alone)
    return [*((one,) for one in alone), *([together] if together else [])]


# -- memory ---------------------------------------------------------------------------------------------------------


def _fill(frames: Iterable[Frame]) -> int:
    """A descriptor of memory that holds frames, one after the other, and never changes.

    Raises:
        OSError: There is none.
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
    return descriptor


def _open(descriptor: int, crate: Crate) -> Iterable[tuple[int, Frame]]:
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


# -- the way ---------------------------------------------------------------------------------------------------------


class Passage:
    """One end of a UNIX socket over which descriptors go. Nothing here ever blocks.

    Args:
        connected: The socket, of type SOCK_SEQPACKET; the passage closes it.
        welcome: Whether the other end is known to listen; else its first message tells so.
    """

    def __init__(self, connected: socket.socket, *, welcome: bool) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._welcome = welcome
        # Descriptors that arrive in a process that can have no more are lost: one place is kept free for them.
        self._spare: int | None = os.dup(connected.fileno())

    def offer(self, tag: bytes, descriptor: int) -> bool:
        """Send a descriptor. False if it cannot be sent now, or the other end is gone."""
        try:
            self._welcome = self._welcome or bool(self._socket.recv(_TAG.size))
            if self._welcome:
                socket.send_fds(self._socket, [tag], [descriptor], socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return self._welcome

    def take(self, tag: bytes) -> int:
        """The descriptor that was sent with a tag. Those before it belong to messages that were not sent after all.

        `renew_spare` is to be called when it has been closed.

        Raises:
            MessageError: It is not there.
        """
        self._free_spare()
        while True:
            try:
                found, descriptors, _, _ = socket.recv_fds(self._socket, _TAG.size, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                raise MessageError(f"The shared memory of a message did not arrive: {error}.") from error
            self._welcome = True
            if found == tag and descriptors:
                return descriptors[0]
            for descriptor in descriptors:
                os.close(descriptor)
            if not found:
                raise MessageError("The shared memory of a message did not arrive: the other process has ended.")
            if found == tag:
                raise MessageError(
                    "The shared memory of a message was lost, since this process has as many files open as it may "
                    "(ulimit -n). Close some."
                )

    def renew_spare(self) -> None:
        """Keep a place free again for the next descriptor."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.dup(self._socket.fileno())

    def _free_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def close(self) -> None:
        """Close it; what was sent and not taken is freed."""
        self._free_spare()
        self._socket.close()


class Harbour:
    """The notebook's end of the passages to its engines.

    Attributes:
        name: Where it listens (an abstract address of the kernel: no file is left, however this process ends).
        token: What an engine must know. To be told to engines in secret.
    """

    def __init__(self) -> None:
        self.name = f"distnb-{secrets.token_hex(16)}"
        self.token = secrets.token_hex(32)
        self._passages: dict[int, Passage] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()

    def let_in(self) -> None:
        """Look who has come, and tell those who are let in. To be called after engines have said hello.

        An engine comes here before it says hello elsewhere. A new process takes the place of an old one.
        """
        while True:
            try:
                comer = self._listener.accept()[0]
            except OSError:
                return  # nobody else, or no descriptor for them
            engine = self._recognise(comer)
            if engine is None:
                comer.close()
                continue
            replaced = self._passages.pop(engine, None)
            if replaced is not None:
                replaced.close()
            self._passages[engine] = Passage(comer, welcome=True)

    def _recognise(self, comer: socket.socket) -> int | None:
        """The engine that has come, welcomed; None if it is none of ours."""
        comer.setblocking(False)
        try:
            token, _, engine = comer.recv(256).decode(errors="replace").partition(" ")
            if _is_ours(comer) and hmac.compare_digest(token.encode(), self.token.encode()) and engine.isdigit():
                comer.send(b"welcome", socket.MSG_NOSIGNAL)
                return int(engine)
        except OSError:
            pass  # it says nothing, or is gone again
        return None

    def passages(self, engines: Iterable[int]) -> dict[int, Passage]:
        """The passages to those of some engines that share memory with this process."""
        return {engine: self._passages[engine] for engine in engines if engine in self._passages}

    def close(self) -> None:
        """Close all. What is on its way is freed, except what engines already have."""
        self._listener.close()
        for passage in self._passages.values():
            passage.close()
        self._passages.clear()


def connect(name: str, token: str, engine: int) -> Passage | None:
    """An engine's passage to the notebook; None if they share no memory (another machine, or a container).

    Args:
        name, token: Of the notebook's harbour; empty if it has none.
        engine: The engine's id.
    """
    if not name:
        return None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.setblocking(False)
        connected.connect(f"\0{name}")
        if _is_ours(connected):  # else another user took the name of a notebook that is gone, to learn the token
            connected.send(f"{token} {engine}".encode(), socket.MSG_NOSIGNAL)
            return Passage(connected, welcome=False)
    except OSError:
        pass
    connected.close()
    return None


def _is_ours(connected: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
