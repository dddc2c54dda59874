"""Messages between two processes of one host: packets over a UNIX socket, read by the thread that waits for them.

ZeroMQ passes each message through a thread on either side, and on a busy machine each of these threads waits for the
processor. Here the sender writes into the kernel, and the receiver wakes up.

A small message is one packet. A larger one is several packets, and the socket (SOCK_SEQPACKET) keeps their order and
their boundaries. The first byte of a packet is its kind. Large frames are sent as descriptors of memory
(`wire.shared_memory_buffer`). All other frames are joined and cut into pieces. An example: a header of 2 KB, an array
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

__all__ = ["BACKLOG", "Listener", "Packet", "UnixSocket", "connect", "pack"]

_PACKET_NBYTES: Final = 60 << 10  # several fit into a socket's buffer
_MOST_BUFFERS: Final = 64  # per message: the kernel limits the number of descriptors that are not yet received
_WHOLE, _PIECE, _BUFFER, _END, _RECYCLED = range(5)  # kinds of packets: their first byte
_WHOLE_PREFIX: Final = bytes((_WHOLE,))
_ANCILLARY_NBYTES: Final = socket.CMSG_SPACE(struct.calcsize("i"))
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
BACKLOG: Final = 4096
"""The number of processes that may have connected and are not accepted yet."""
# The buffer of the socket or of the kernel is full, or too many descriptors are not yet received.
_LATER: Final = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))
_PATIENCE_S: Final = 0.005


class HasDescriptor(Protocol):
    """Memory with a descriptor."""

    @property
    def descriptor(self) -> int: ...


Packet = tuple[bytes, HasDescriptor | None]
"""A unit of sending: bytes, and the memory whose descriptor is sent with them, or None."""


def pack(frames: Sequence[Frame]) -> Sequence[Packet]:
    """Return the packets of a message. They are a copy: the sender's frames may change afterwards."""
    if len(frames) == 1 and len(frames[0]) < _PACKET_NBYTES:
        return ((_WHOLE_PREFIX + frames[0], None),)
    sizes = [memoryview(frame).nbytes for frame in frames]
    largest = sorted(range(len(frames)), key=sizes.__getitem__, reverse=True)[:_MOST_BUFFERS]
    buffers: dict[int, SharedMemoryBuffer] = {}
    with contextlib.suppress(OSError):  # no memory or no descriptor is left: send the rest in pieces
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
    """A message of which some packets have arrived."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.buffers: dict[int, Frame] = {}
        self.error: MessageError | None = None

    def add_buffer(self, data: bytes, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        if not ancillary:
            self.error = MessageError(
                "The shared memory of a message was lost, since this process has reached its limit of open files "
                "(ulimit -n). Close some files, or raise the limit."
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
        """Return all frames.

        Raises:
            MessageError: Some frames are lost.
        """
        if self.error is not None:
            raise self.error
        loose, at = memoryview(b"".join(self.pieces)), 0
        frames: list[Frame] = []
        for place, size in enumerate(pickle.loads(data)):
            if size is None:
                frames.append(self.buffers[place])
            else:  # each a separate buffer, so it is writable, and freed with its last user
                frames.append(bytearray(loose[at : at + size]))
                at += size
        return frames


class UnixSocket:
    """An end of a UNIX socket. One thread receives, and any thread may send.

    Args:
        connected: The socket, of type SOCK_SEQPACKET. This object closes it.

    Attributes:
        recycles: Whether large messages are sent in memory that is written to again (`wire.recycled_memory`). Set it
            if the receiver copies the messages' content, or does not keep it.
        ended: Whether the other end is closed. No message will arrive any more.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.ended = self.recycles = False
        self._recycled = RecycledSender(), RecycledReceiver()
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._poll_of_two: Any = None  # made by `wait`
        self._lock = threading.Lock()  # guards the attributes below, and the order of packets
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
        """Send a copy of a message."""
        self.send_frames(encode(message))

    def send_frames(self, frames: Sequence[Frame]) -> bool:
        """Send a copy of an encoded message. Return False if the other end is closed."""
        written = self._recycled[0].write(frames) if self.recycles else None
        if written is None:
            return self.send_packets(pack(frames))
        description, block = written
        return self.send_packets(((_packet(_RECYCLED, description), block),))

    def send_packets(self, packets: Sequence[Packet]) -> bool:
        """Send a message, now or as soon as the kernel has room. Return False if the other end is closed."""
        with self._lock:
            late = packets if self._late else self._send_now(packets)
            if late and not self.ended:
                self._late.extend(late)
                if self._sender is None:
                    self._sender = threading.Thread(target=self._send_late, name="distnb-packets", daemon=True)
                    self._sender.start()
        return not self.ended

    def _send_now(self, packets: Sequence[Packet]) -> Sequence[Packet]:
        """Send packets. Return those for which the kernel has no room."""
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
            if stays:  # the socket has room, but the kernel has none
                time.sleep(_PATIENCE_S)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def has_message(self) -> bool:
        """Return whether a message, or the end of the connection, has arrived."""
        return bool(self._poll.poll(0))

    def wait(self, other: int, timeout_s: float) -> bool:
        """Wait until `receive` may have a message, or another descriptor is readable. Return False after the timeout.

        Args:
            other: The other descriptor, the same in each call.
        """
        if self._poll_of_two is None:
            self._poll_of_two = select.poll()
            self._poll_of_two.register(self._socket, select.POLLIN)
            self._poll_of_two.register(other, select.POLLIN)
        return bool(self._poll_of_two.poll(timeout_s * 1000))

    def receive(self, linger_ms: int = 0) -> Any:
        """Return the next message, or None if none arrives within `linger_ms`.

        Raises:
            MessageError: The message cannot be read.
        """
        frames = self.receive_frames()
        if frames is None and linger_ms and not self.ended and self._poll.poll(linger_ms):
            frames = self.receive_frames()
        return None if frames is None else decode(frames)

    def receive_frames(self) -> list[Frame] | None:
        """Return the frames of the next message, or None if none has arrived. After the last one, set `ended`.

        Raises:
            MessageError: A part of the message was lost.
        """
        packet = self._packet
        while True:
            try:
                nbytes, ancillary, _, _ = self._socket.recvmsg_into((packet,), _ANCILLARY_NBYTES, _CLOSE_ON_EXEC)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # the other end closed with unread messages; its own messages may still be here
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
        """Close the socket. Memory that was sent and not received is freed with its last user."""
        with self._lock:
            self.ended = self._closed = True
            if self._sender is None:
                self._socket.close()
            else:  # the sender wakes up and closes it: closed here, its descriptor could be reused while it waits
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


# -- connecting --------------------------------------------------------------------------------------------------------


class Listener:
    """A socket in a private directory, to which processes on this host connect.

    Only processes of this user can connect. The kernel keeps other users even out of the queue of waiting connections,
    which they could fill if the socket had no file.

    Args:
        directory: The directory, which only its owner can enter. The owner removes it.
        name: The name of the socket in it; "" for a new name. A socket of that name that an ended process left is
            replaced.

    Attributes:
        path: The path of the socket.

    Raises:
        StartError: No socket can be created in the directory.
    """

    def __init__(self, directory: str | os.PathLike[str], name: str = "") -> None:
        self.path = os.path.join(directory, name or f"{secrets.token_hex(6)}.socket")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.bind(self.path)
        except OSError as error:
            self._socket.close()
            raise StartError(
                f"No socket could be created at {self.path}: {error}. Set TMPDIR to a directory on a local disk that "
                "you may write to."
            ) from error
        self._socket.listen(BACKLOG)
        self._silent: dict[
            int, socket.socket
        ] = {}  # connected peers that have not sent their numbers yet, by descriptor
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `accept` may find a peer."""
        return self._epoll.fileno()

    def accept(self) -> dict[int, UnixSocket]:
        """Return the peers that have connected since the last call, by number.

        Raises:
            OSError: This process has reached its limit of open files.
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
                name = connected.recv(256)
            except BlockingIOError:
                continue
            except OSError:
                name = b""  # the peer has disconnected
            del self._silent[descriptor]
            self._epoll.unregister(descriptor)
            if not name.isdigit():  # the peer has disconnected
                connected.close()
                continue
            peer = int(name)
            if peer in found:
                found[peer].close()
            found[peer] = UnixSocket(connected)
        return found

    def close(self) -> None:
        """Accept no more peers, and remove the socket."""
        for connected in self._silent.values():
            connected.close()
        self._epoll.close()
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def connect(path: str, peer: int) -> UnixSocket:
    """Connect to a listener on this host as the peer of this number.

    Raises:
        OSError: No process listens there.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.setblocking(False)
        connected.connect(path)
        connected.send(b"%d" % peer, _NO_SIGNAL)
    except OSError:
        connected.close()
        raise
    return UnixSocket(connected)
