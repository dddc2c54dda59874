"""Messages between two processes of one host: packets over a UNIX socket, each received by the thread that wants it.

A message that ZeroMQ carries passes a thread on either side, and on a busy machine each waits for its turn. Here the
sender writes into the kernel, and the receiver wakes up. A small message is one packet. A larger one is several: its
large frames are descriptors of memory (`wire.freight`), everything else is cut into pieces.

Nothing here blocks. What the kernel has no room for is kept, and a thread sends it later.

Who sends the same to several tells them by a bell, an eventfd that all of them have, once all have been sent to: they
wake up at the same time. Woken by its own packet, the first would often take the sender's core before the others were
sent theirs. Nobody reads the bell, which would silence it for the rest: it is watched for rings, not for its state.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from distnb.errors import MessageError
from distnb.wire import shared_memory_buffer
from distnb.wire.codec import Frame
from distnb.wire.shared_memory_buffer import SharedMemoryBuffer

__all__ = ["Packet", "UnixSocket", "connect", "is_ours", "pack"]

_PACKET_NBYTES: Final = 60 << 10  # several fit into a socket's buffer
_WHOLE, _PIECE, _CRATE, _END, _BELL = range(5)  # kinds of packets: their first byte
_WHOLE_PREFIX: Final = bytes((_WHOLE,))
_ANCILLARY_NBYTES: Final = socket.CMSG_SPACE(struct.calcsize("i"))
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
# The socket's buffer is full, the kernel's is, or too many descriptors are on their way.
_LATER: Final = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))
_PATIENCE_S: Final = 0.005

Packet = tuple[bytes, SharedMemoryBuffer | None]
"""What is sent at once: bytes, and memory whose descriptor goes with them."""


# -- a message ------------------------------------------------------------------------------------------------------


def pack(frames: Sequence[Frame]) -> Sequence[Packet]:
    """A message as packets, copied: the sender's own frames may change when this returns."""
    first = frames[0]
    if len(frames) == 1 and len(first) < _PACKET_NBYTES:
        return ((_WHOLE_PREFIX + first, None),)
    crates = shared_memory_buffer.stow(frames)
    try:
        memories = [shared_memory_buffer.load(frames[place] for place, _ in crate) for crate in crates]
    except OSError:  # no memory, or no descriptor, is to be had
        crates, memories = [], []
    stowed = {place for crate in crates for place, _ in crate}
    pieces = [frame for place, frame in enumerate(frames) if place not in stowed]
    loose = b"".join(pieces)
    # The header is never stowed, so the first packet is a piece: it tells the receiver that descriptors may follow.
    return [
        *((_packet(_PIECE, loose[at : at + _PACKET_NBYTES]), None) for at in range(0, len(loose), _PACKET_NBYTES)),
        *((_packet(_CRATE, pickle.dumps(crate)), memory) for crate, memory in zip(crates, memories, strict=True)),
        (_packet(_END, pickle.dumps((len(frames), [memoryview(piece).nbytes for piece in pieces]))), None),
    ]


def _packet(kind: int, data: bytes) -> bytes:
    return bytes((kind,)) + data


class _Incoming:
    """A message of which some packets have come."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._unloaded: dict[int, Frame] = {}
        self._error: MessageError | None = None

    def add_piece(self, data: bytes) -> None:
        self._pieces.append(data)

    def add_crate(self, data: bytes, descriptor: int | None) -> None:
        if descriptor is None:
            self._error = MessageError(
                "The shared memory of a message was lost, since this process has as many files open as it may "
                "(ulimit -n). Close some."
            )
            return
        try:
            self._unloaded.update(shared_memory_buffer.unload(descriptor, pickle.loads(data)))
        except MessageError as error:
            self._error = error
        finally:
            os.close(descriptor)

    def end(self, data: bytes) -> list[Frame]:
        """All frames. Raises MessageError if some are lost."""
        if self._error is not None:
            raise self._error
        count, sizes = pickle.loads(data)
        loose = memoryview(b"".join(self._pieces))
        ends = list(itertools.accumulate(sizes))
        # Each its own, to be written to, and free when it is not used any more.
        pieces = (bytearray(loose[end - size : end]) for end, size in zip(ends, sizes, strict=True))
        unloaded = self._unloaded
        return [unloaded[place] if place in unloaded else next(pieces) for place in range(count)]


# -- the way ---------------------------------------------------------------------------------------------------------


class UnixSocket:
    """One end of a UNIX socket. One thread receives, any thread sends.

    Args:
        connected: The socket, of type SOCK_SEQPACKET; the passage closes it.

    Attributes:
        ended: Whether the other end is gone; nothing more will come.
        bell: The eventfd that the other end rings after it has sent; None while it has handed over none.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.ended = False
        self.bell: int | None = None
        self._socket = connected
        self._lock = threading.Lock()  # of what follows, and of the order of packets
        self._late: deque[Packet] = deque()
        self._sender: threading.Thread | None = None
        self._closed = False
        self._rung: int | None = None  # the bell for what is late; whoever sends rings it for the rest
        self._buffer = bytearray(1 + _PACKET_NBYTES)
        self._incoming: _Incoming | None = None
        # Descriptors that arrive in a process that can have no more are lost: one place is kept free for them.
        self._spare: int | None = os.dup(connected.fileno())

    def fileno(self) -> int:
        """Readable when `receive` may have something."""
        return self._socket.fileno()

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, packets: Sequence[Packet]) -> bool:
        """Send a message, now or as soon as the kernel has room. False if the other end is gone."""
        with self._lock:
            late = packets if self._late else self._send_now(packets)
            if late and not self.ended:
                self._late.extend(late)
                if self._sender is None:
                    self._sender = threading.Thread(target=self._send_late, name="distnb-packets", daemon=True)
                    self._sender.start()
        return not self.ended

    def hand_over(self, bell: int) -> None:
        """Give the other end a bell. It must be rung whenever something has been sent, until the passage is closed."""
        with contextlib.suppress(OSError):  # it has no room for a descriptor: it wakes up without
            socket.send_fds(self._socket, [bytes((_BELL,))], [bell], _NO_SIGNAL)
            self._rung = bell

    def _send_now(self, packets: Sequence[Packet]) -> Sequence[Packet]:
        """Send packets; those for which there is no room are returned."""
        for place, (data, memory) in enumerate(packets):
            try:
                if memory is None:
                    self._socket.send(data, _NO_SIGNAL)
                else:
                    socket.send_fds(self._socket, [data], [memory.descriptor], _NO_SIGNAL)
            except OSError as error:
                if error.errno in _LATER:
                    return packets[place:]
                self.ended = True
                break
        return ()

    def _send_late(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while True:
            poll.poll()
            with self._lock:
                before = len(self._late)
                while self._late and not self._send_now((self._late[0],)):
                    self._late.popleft()
                if self._rung is not None and before != len(self._late):
                    os.eventfd_write(self._rung, 1)
                if not self._late or self.ended:
                    self._late.clear()
                    self._sender = None
                    if self._closed:
                        self._socket.close()
                    return
                stays = len(self._late) == before
            if stays:  # the socket has room, the kernel has not
                time.sleep(_PATIENCE_S)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def receive(self) -> list[Frame] | None:
        """The next message, or None when it is not there yet, or will never be (`ended`).

        Raises:
            MessageError: Some of it was lost.
        """
        buffers = (self._buffer,)
        while True:
            try:
                nbytes, ancillary, _, _ = self._socket.recvmsg_into(buffers, _ANCILLARY_NBYTES, _CLOSE_ON_EXEC)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # it ended with messages unread; its own may still be there
            except OSError:
                nbytes = 0
            if not nbytes:
                self.ended = True
                return None
            data = bytes(memoryview(self._buffer)[1:nbytes])
            if self._buffer[0] == _WHOLE:
                return [data]
            frames = self._take(self._buffer[0], data, ancillary)
            if frames is not None:
                return frames

    def _take(self, kind: int, data: bytes, ancillary: list[tuple[int, int, bytes]]) -> list[Frame] | None:
        """Take a packet of several; all frames if it is the last."""
        if kind == _BELL:
            self.bell = next(iter(_descriptors(ancillary)), None)
            return None
        if self._incoming is None:
            self._incoming = _Incoming()
            self._free_spare()
        if kind == _PIECE:
            self._incoming.add_piece(data)
        elif kind == _CRATE:
            self._incoming.add_crate(data, next(iter(_descriptors(ancillary)), None))
        else:
            incoming, self._incoming = self._incoming, None
            self._renew_spare()
            return incoming.end(data)
        return None

    def _renew_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._spare = os.dup(self._socket.fileno())

    def _free_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def close(self) -> None:
        """Close it. What was sent and not received is freed, if this process is the last that has it."""
        with self._lock:
            self.ended = self._closed = True
            if self._sender is None:
                self._socket.close()
            else:  # it wakes up, and closes it: until then its number is not another's, for which it would wait
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            self._free_spare()
            if self.bell is not None:
                os.close(self.bell)


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a packet."""
    return [
        descriptor
        for level, kind, data in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS and len(data) >= struct.calcsize("i")
        for descriptor in struct.unpack_from("i", data)
    ]


def connect(name: str, token: str, engine: int) -> UnixSocket | None:
    """An engine's passage to the notebook; None if they are not on one host (or in different containers).

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
        if is_ours(connected):  # else another user took the name of a notebook that is gone, to learn the token
            connected.send(f"{token} {engine}".encode(), _NO_SIGNAL)
            return UnixSocket(connected)
    except OSError:
        pass
    connected.close()
    return None


def is_ours(connected: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
