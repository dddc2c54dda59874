"""Messages between two processes of one host: packets over a UNIX socket, read by the thread that waits for them.

A message that ZeroMQ carries passes through a thread on either side, and on a busy machine each of them waits for the
processor. Here the sender writes into the kernel, and the receiver wakes up.

A small message is one packet. A larger one is several packets, and the socket (SOCK_SEQPACKET) keeps their order and
their boundaries. The first byte of a packet is its kind. Large frames travel as descriptors of memory
(`wire.shared_memory_buffer`); all other frames are joined and cut into pieces. An example: a header of 2 KB, an array
of 200 MB, and an array of 70 KB::

    kind       content                                                             descriptor
    _PIECE     the first 60 KB of header and small array, joined
    _PIECE     the other 12 KB
    _BUFFER    (1, 200 MB): frame 1, and its size                                  the memory of the large array
    _END       [2 KB, None, 70 KB]: the size of each frame, None for a buffer

At `_END` the receiver cuts the joined pieces at these sizes and puts the buffers between them. With `recycles`, a
message is one `_RECYCLED` packet instead, whose memory is written again later (`wire.recycled_memory`).

Sending never blocks. Packets for which the kernel has no room wait in a queue, and a thread sends them later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from distnb.errors import MessageError, StartError
from distnb.wire.codec import Frame, decode, encode
from distnb.wire.recycled_memory import RecycledReceiver, RecycledSender
from distnb.wire.shared_memory_buffer import LARGE_NBYTES, SharedMemoryBuffer, read_frame

__all__ = ["Listener", "Packet", "UnixSocket", "connect", "pack"]

_PACKET_NBYTES: Final = 60 << 10  # several fit into a socket's buffer
_MOST_BUFFERS: Final = 64  # of a message: only so many descriptors can be on their way
_WHOLE, _PIECE, _BUFFER, _END, _RECYCLED = range(5)  # kinds of packets: their first byte
_WHOLE_PREFIX: Final = bytes((_WHOLE,))
_ANCILLARY_NBYTES: Final = socket.CMSG_SPACE(struct.calcsize("i"))
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_BACKLOG: Final = 4096  # of processes that have connected, until they are let in
# The socket's buffer is full, the kernel's is, or too many descriptors are on their way.
_LATER: Final = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))
_PATIENCE_S: Final = 0.005


class HasDescriptor(Protocol):
    """Memory."""

    @property
    def descriptor(self) -> int: ...


Packet = tuple[bytes, HasDescriptor | None]
"""What is sent at once: bytes, and memory whose descriptor goes with them."""


def pack(frames: Sequence[Frame]) -> Sequence[Packet]:
    """Return a message as packets, copied: the sender's own frames may change when this returns."""
    if len(frames) == 1 and len(frames[0]) < _PACKET_NBYTES:
        return ((_WHOLE_PREFIX + frames[0], None),)
    sizes = [memoryview(frame).nbytes for frame in frames]
    largest = sorted(range(len(frames)), key=sizes.__getitem__, reverse=True)[:_MOST_BUFFERS]
    buffers: dict[int, SharedMemoryBuffer] = {}
    with contextlib.suppress(OSError):  # no memory, or no descriptor, is to be had: the rest goes in pieces
        for place in largest:
            if sizes[place] >= LARGE_NBYTES:
                buffers[place] = SharedMemoryBuffer(frames[place])
    loose = b"".join(frame for place, frame in enumerate(frames) if place not in buffers)
    return [
        *((_packet(_PIECE, loose[at : at + _PACKET_NBYTES]), None) for at in range(0, len(loose), _PACKET_NBYTES)),
        *((_packet(_BUFFER, pickle.dumps((place, sizes[place]))), buffer) for place, buffer in buffers.items()),
        (_packet(_END, pickle.dumps([None if place in buffers else size for place, size in enumerate(sizes)])), None),
    ]


def _packet(kind: int, data: bytes) -> bytes:
    return bytes((kind,)) + data


class _Incoming:
    """A message of which some packets have come."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.buffers: dict[int, Frame] = {}
        self.error: MessageError | None = None

    def add_buffer(self, data: bytes, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        if not ancillary:
            self.error = MessageError(
                "The shared memory of a message was lost, since this process has as many files open as it may "
                "(ulimit -n). Close some."
            )
            return
        (descriptor,) = struct.unpack_from("i", ancillary[0][2])
        try:
            place, nbytes = pickle.loads(data)
            self.buffers[place] = read_frame(descriptor, nbytes)
        except MessageError as error:
            self.error = error
        finally:
            os.close(descriptor)

    def end(self, data: bytes) -> list[Frame]:
        """Return all frames. MessageError: some are lost."""
        if self.error is not None:
            raise self.error
        loose, at = memoryview(b"".join(self.pieces)), 0
        frames: list[Frame] = []
        for place, size in enumerate(pickle.loads(data)):
            if size is None:
                frames.append(self.buffers[place])
            else:  # each its own, to be written to, and free when it is not used any more
                frames.append(bytearray(loose[at : at + size]))
                at += size
        return frames


class UnixSocket:
    """An end of a UNIX socket. One thread receives, any thread sends.

    Args:
        connected: The socket, of type SOCK_SEQPACKET; this object closes it.

    Attributes:
        recycles: Whether large messages are sent in memory that is written to again (`wire.recycled_memory`). To be set
            where the receiver does not keep what comes, or copies it.
        ended: Whether the other end is gone; nothing more will come.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.ended = self.recycles = False
        self._recycled = RecycledSender(), RecycledReceiver()
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._lock = threading.Lock()  # of what follows, and of the order of packets
        self._late: deque[Packet] = deque()
        self._sender: threading.Thread | None = None
        self._closed = False
        self._packet = bytearray(1 + _PACKET_NBYTES)
        self._incoming = _Incoming()

    def fileno(self) -> int:
        """Return the descriptor, which is readable when `receive` may have a message."""
        return self._socket.fileno()

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send a message, copied."""
        self.send_frames(encode(message))

    def send_frames(self, frames: Sequence[Frame]) -> bool:
        """Send a message that has been encoded, copied. False if the other end is gone."""
        written = self._recycled[0].write(frames) if self.recycles else None
        if written is None:
            return self.send_packets(pack(frames))
        told, block = written
        return self.send_packets(((_packet(_RECYCLED, told), block),))

    def send_packets(self, packets: Sequence[Packet]) -> bool:
        """Send a message, now or as soon as the kernel has room. False if the other end is gone."""
        with self._lock:
            late = packets if self._late else self._send_now(packets)
            if late and not self.ended:
                self._late.extend(late)
                if self._sender is None:
                    self._sender = threading.Thread(target=self._send_late, name="distnb-packets", daemon=True)
                    self._sender.start()
        return not self.ended

    def _send_now(self, packets: Sequence[Packet]) -> Sequence[Packet]:
        """Send packets; those for which there is no room are returned."""
        for place, (data, buffer) in enumerate(packets):
            try:
                if buffer is None:
                    self._socket.send(data, _NO_SIGNAL)
                else:
                    socket.send_fds(self._socket, [data], [buffer.descriptor], _NO_SIGNAL)
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

    def has_message(self) -> bool:
        """Return whether a message, or the end of the connection, has arrived."""
        return bool(self._poll.poll(0))

    def receive(self, linger_ms: int = 0) -> Any:
        """Return the next message, or None if none arrives within `linger_ms`. MessageError: it cannot be read."""
        frames = self.receive_frames()
        if frames is None and linger_ms and not self.ended and self._poll.poll(linger_ms):
            frames = self.receive_frames()
        return None if frames is None else decode(frames)

    def receive_frames(self) -> list[Frame] | None:
        """Return the frames of the next message, or None if it has not arrived, or never will (`ended`).

        Raises:
            MessageError: Some of it was lost.
        """
        packet = self._packet
        while True:
            try:
                nbytes, ancillary, _, _ = self._socket.recvmsg_into((packet,), _ANCILLARY_NBYTES, _CLOSE_ON_EXEC)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # it ended with messages unread; its own may still be there
            except OSError:
                nbytes = 0
            if not nbytes:
                self.ended = True
                return None
            kind, data = packet[0], bytes(memoryview(packet)[1:nbytes])
            if kind == _WHOLE:
                return [data]
            if kind == _PIECE:
                self._incoming.pieces.append(data)
            elif kind == _RECYCLED:
                return self._read_recycled(data, ancillary)
            elif kind == _BUFFER:
                self._incoming.add_buffer(data, ancillary)
            else:
                incoming, self._incoming = self._incoming, _Incoming()
                return incoming.end(data)

    def _read_recycled(self, data: bytes, ancillary: Sequence[tuple[int, int, bytes]]) -> list[Frame]:
        descriptor = struct.unpack_from("i", ancillary[0][2])[0] if ancillary else None
        try:
            return self._recycled[1].read(data, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def close(self) -> None:
        """Close it. What was sent and not received is freed, if this process is the last that has it."""
        with self._lock:
            self.ended = self._closed = True
            if self._sender is None:
                self._socket.close()
            else:  # it wakes up, and closes it: until then its number is not another's, for which it would wait
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


# -- meeting -----------------------------------------------------------------------------------------------------------


class Listener:
    """A socket in a private directory, where processes of this host connect.

    The kernel lets other users neither connect nor wait in the socket's queue, which they could fill where a socket has
    no file. So who connects is a process of this user.

    Args:
        directory: Its owner alone may enter it, and removes it in the end.

    Attributes:
        path: The socket's.

    Raises:
        StartError: The directory takes no sockets.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = os.path.join(directory, f"{secrets.token_hex(6)}.socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.bind(self.path)
        except OSError as error:
            self._socket.close()
            raise StartError(
                f"No socket could be made at {self.path}: {error}. Set TMPDIR to a directory of a local disk that you "
                "may write."
            ) from error
        self._socket.listen(_BACKLOG)
        self._silent: dict[int, socket.socket] = {}  # have connected, and did not say yet who they are
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when `let_in` may find somebody."""
        return self._epoll.fileno()

    def let_in(self) -> dict[int, UnixSocket]:
        """Return the peers that have connected since this was last called, by number.

        OSError: this process has as many files open as it may.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                connected = self._socket.accept()[0]
                connected.setblocking(False)
                self._silent[connected.fileno()] = connected
                self._epoll.register(connected, select.EPOLLIN)
        found: dict[int, UnixSocket] = {}
        for descriptor, connected in list(self._silent.items()):
            try:
                said = connected.recv(256)
            except BlockingIOError:
                continue
            except OSError:
                said = b""  # it is gone again
            del self._silent[descriptor]
            self._epoll.unregister(descriptor)
            if not said.isdigit():  # it is gone again
                connected.close()
                continue
            peer = int(said)
            if peer in found:
                found[peer].close()
            found[peer] = UnixSocket(connected)
        return found

    def close(self) -> None:
        """Let nobody else in."""
        for connected in self._silent.values():
            connected.close()
        self._epoll.close()
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def connect(path: str, peer: int) -> UnixSocket:
    """Connect with a listener of this host as the one of that number. OSError: nobody listens there."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.setblocking(False)
        connected.connect(path)
        connected.send(b"%d" % peer, _NO_SIGNAL)
    except OSError:
        connected.close()
        raise
    return UnixSocket(connected)
