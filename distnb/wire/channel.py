"""The channel between the notebook and its engines: one way for programs, one for control.

The notebook binds a ROUTER socket of ZeroMQ, to which every engine connects a DEALER for control. Programs go to
engines of the notebook's host by UNIX sockets (`wire.unix_socket`), several times as fast as by ZeroMQ, and to those of
other hosts by a second ROUTER. A cluster of one host listens in its private directory only, one of several hosts over
TCP. CURVE encrypts in both cases: a client whose public key is not the cluster's gets no byte through.

A parameter server is reached by whoever has a number: `Peers` is what it and the notebook share.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator

from distnb.errors import MessageError, StartError
from distnb.wire.codec import Frame, decode, encode
from distnb.wire.messages import Hello
from distnb.wire.unix_socket import Listener, Packet, UnixSocket, pack

__all__ = [
    "Link",
    "OneClientKey",
    "Peers",
    "ProgramLink",
    "Programs",
    "Switchboard",
    "bind_router",
    "receive_from",
    "send_frames",
]

_logger = logging.getLogger("distnb.wire")

# As plain numbers: combining members of an enumeration costs as much as sending.
_POLLIN, _SNDMORE = int(zmq.POLLIN), int(zmq.SNDMORE)


# -- the notebook's end ------------------------------------------------------------------------------------------------


class OneClientKey:
    """Lets exactly one CURVE key in: clients must prove to own it (Z85)."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's public key is accepted. The authenticator calls this."""
        return bool(key == self._public)


class Switchboard:
    """The notebook's end: it reaches every engine by its id. CURVE keys are in Z85.

    Args:
        directory: The cluster's private directory.
        host: The address at which it listens for engines of other hosts; None if all are of this one.

    Attributes:
        programs: The way of programs; belongs to whoever holds the session's turn.
        control: The socket for control; belongs to the supervisor's thread.
        program_url, control_url: Where engines reach them by ZeroMQ; the first is "" if they use UNIX sockets.

    Raises:
        StartError: It cannot listen there.
    """

    def __init__(
        self, directory: Path, *, server_secret: bytes, server_public: bytes, client_public: bytes, host: str | None
    ) -> None:
        # A context of its own: the authenticator serves all sockets of its context, and users have theirs.
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", OneClientKey(client_public))
        self._keys = {"secret": server_secret, "public": server_public}
        self._directory, self._host = directory, host
        try:
            self.programs, self.program_url = self._open(Programs)
            at = directory / "control.socket" if host is None else host
            self.control, self.control_url = bind_router(self._context, at, **self._keys)
        except BaseException:
            self._end()
            raise

    def _open(self, kind: type[_P]) -> tuple[_P, str]:
        if self._host is None:
            return kind(listener=Listener(self._directory)), ""
        remote, url = bind_router(self._context, self._host, **self._keys)
        return kind(remote), url

    def open_peers(self) -> tuple[Peers, str]:
        """Open one more way to the engines. Returns it, and its address for engines of other hosts."""
        return self._open(Peers)

    def close(self) -> None:
        """Close both ways and stop the authenticator. Waiting messages are dropped."""
        self.programs.close()
        self.control.close()
        self._end()

    def _end(self) -> None:
        self._authenticator.stop()
        self._context.destroy(linger=0)


def bind_router(
    context: zmq.Context[Any], at: str | Path, *, secret: bytes, public: bytes
) -> tuple[zmq.Socket[bytes], str]:
    """Make a ROUTER with these CURVE keys that listens at a host, or at the path of a UNIX socket.

    Returns it and its address. StartError: It cannot listen there.
    """
    socket = context.socket(zmq.ROUTER)
    socket.curve_secretkey, socket.curve_publickey = secret, public
    socket.curve_server = True
    # Without these a ROUTER drops silently: past the high-water mark, and to peers that it does not know.
    socket.sndhwm = socket.rcvhwm = 0
    socket.router_mandatory = True
    socket.router_handover = True
    socket.linger = 0
    try:
        if isinstance(at, Path):
            address = f"ipc://{at}"
            socket.bind(address)
            _logger.info("listening at %s", address)
            return socket, address
        socket.ipv6 = ":" in at
        address = f"tcp://[{at}]" if ":" in at else f"tcp://{at}"
        address = f"{address}:{socket.bind_to_random_port(address)}"
        _logger.info("listening at %s", address)
        return socket, address
    except zmq.ZMQError as error:
        socket.close()
        raise StartError(f"This process cannot listen at {at}: {error}.") from error


class Peers:
    """Talks with processes that have numbers: by a UNIX socket with each of this host, by ZeroMQ with all others.

    Not for several threads at once. It closes what it is given.

    Args:
        remote: A bound ROUTER for those of other hosts, if there are any.
        listener: The place where those of this host connect, if they use UNIX sockets.
        recycles: What is sent to those of this host they do not keep; see `UnixSocket`.

    Attributes:
        listener: The same.
    """

    def __init__(
        self, remote: zmq.Socket[bytes] | None = None, listener: Listener | None = None, *, recycles: bool = False
    ) -> None:
        self.listener = listener
        self._recycles = recycles
        self._remote = remote
        self._sockets: dict[int, UnixSocket] = {}
        self._peer_at: dict[int, int] = {}  # by the socket's descriptor
        self._epoll = select.epoll()
        if remote is not None:
            self.watch(int(remote.fileno()))

    def watch(self, descriptor: int) -> None:
        """Let `wait` return when this descriptor is readable, too."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def let_in(self) -> None:
        """Accept the peers of this host that have connected. OSError: this process has too many open files."""
        if self.listener is None:
            return
        for peer, connected in self.listener.let_in().items():
            self._lose(peer)
            connected.recycles = self._recycles
            _logger.info("peer %d connected", peer)
            self._sockets[peer] = connected
            self._peer_at[connected.fileno()] = peer
            self.watch(connected.fileno())

    def _lose(self, peer: int) -> None:
        connected = self._sockets.pop(peer, None)
        if connected is not None:
            _logger.info("peer %d disconnected", peer)
            del self._peer_at[connected.fileno()]
            self._epoll.unregister(connected.fileno())
            connected.close()

    def send(self, peers: Iterable[int], message: Any) -> list[int]:
        """Send a message to peers, copied: what it refers to may change when this returns.

        Returns those that are not connected.
        """
        return self.send_frames(peers, encode(message))

    def send_frames(self, peers: Iterable[int], frames: Sequence[Frame]) -> list[int]:
        """Send an encoded message to several peers."""
        packets: Sequence[Packet] = ()
        unreached = []
        for peer in peers:
            connected = self._sockets.get(peer)
            if connected is None:
                reached = self._remote is not None and send_frames(self._remote, peer, frames)
            elif self._recycles:
                reached = connected.send_frames(frames)
            else:
                packets = packets or pack(frames)
                reached = connected.send_packets(packets)
            if not reached:
                _logger.info("peer %d cannot be reached", peer)
                unreached.append(peer)
        return unreached

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Wait until something has come. For so long at most, if a time is given.

        Returns:
            The descriptors that are readable, for `receive`, those that are watched among them.
        """
        if self._remote is not None and _has_message(self._remote):
            return []  # its descriptor reports only what arrives after it was last found empty
        return [descriptor for descriptor, _ in self._epoll.poll(timeout_s)]

    def receive(self, readable: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yield messages that have arrived: the next one of each peer of this host, and all of others. Never blocks.

        `readable` is what `wait` returned. In the place of a message that cannot be read there is a MessageError.
        """
        for descriptor in readable:
            peer = self._peer_at.get(descriptor)
            if peer is None:
                continue
            message = _or_error(self._sockets[peer].receive)
            if message is not None:
                yield peer, message
            elif self._sockets[peer].ended:
                self._lose(peer)  # the process has ended, and its watcher reports that
        if self._remote is not None:
            for peer, frames in _arrived(self._remote):
                yield peer, _or_error(partial(decode, frames))

    def is_near(self, peer: int) -> bool:
        """Return whether a peer is on this host and connected. Then any thread may send to it."""
        return peer in self._sockets

    def part(self, peer: int) -> Iterator[Any]:
        """Yield the last messages of a peer of this host that has ended, then close its connection."""
        while (connected := self._sockets.get(peer)) is not None:
            message = _or_error(connected.receive)
            if message is None:
                self._lose(peer)
            else:
                yield message

    def close(self) -> None:
        """Close all. What waits is dropped."""
        if self.listener is not None:
            self.listener.close()
        for peer in list(self._sockets):
            self._lose(peer)
        self._epoll.close()
        if self._remote is not None:
            self._remote.close()


class Programs(Peers):
    """The notebook's end of the program channel: it sends programs to engines and receives replies."""

    def meet(self, hellos: Iterable[Hello]) -> None:
        """Engines have come up, and said hello on the other channel. StartError: one of this host is not connected."""
        try:
            self.let_in()
        except OSError as error:
            raise StartError(
                f"The notebook cannot open a connection to its engines ({os.strerror(error.errno or 0)}). Close files, "
                "or allow it more (ulimit -n), and start them again."
            ) from error
        for hello in hellos:
            if self.listener is not None and hello.engine not in self._sockets:
                raise StartError(f"Engine {hello.engine} did not connect to the notebook for programs.")

    def receive(self, readable: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yield messages as `Peers.receive` does. MessageError: a message cannot be read."""
        for engine, message in super().receive(readable):
            if isinstance(message, MessageError):
                raise message
            yield engine, message


def send_frames(socket: zmq.Socket[bytes], peer: int, frames: Sequence[Frame]) -> bool:
    """Send a message by a ROUTER, copied. False if the peer is not connected."""
    try:
        _send(socket, [b"%d" % peer, *frames])
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


def receive_from(socket: zmq.Socket[bytes]) -> Iterator[tuple[int, Any]]:
    """Yield all messages that have arrived at a ROUTER, each with the number of its sender. Never blocks.

    Raises:
        MessageError: One cannot be read.
    """
    for peer, frames in _arrived(socket):
        yield peer, decode(frames)


def _arrived(socket: zmq.Socket[bytes]) -> Iterator[tuple[int, list[Frame]]]:
    while _has_message(socket):
        name = socket.recv()
        frames = _receive(socket)
        if name.isdigit():  # else it was said by a process whose place another has taken, and its name
            yield int(name), frames


def _or_error(receive: Callable[[], Any]) -> Any:
    try:
        return receive()
    except MessageError as error:
        return error


def _send(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    for frame in frames[:-1]:
        socket.send(frame, _SNDMORE)
    socket.send(frames[-1])


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    # Trying to receive would do, but the exception that says "nothing" costs as much as a message.
    return bool(zmq.zmq_poll([(socket, _POLLIN)], 0))


def _receive(socket: zmq.Socket[bytes]) -> list[Frame]:
    """Return the rest of a message: its header, and its buffers without a copy."""
    frame = socket.recv(copy=False)
    frames: list[Frame] = [frame.bytes]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
    return frames


# -- the other end -----------------------------------------------------------------------------------------------------


class Link:
    """An engine's end, or another peer's: one DEALER socket, whose identity is the peer's number."""

    ended = False

    def __init__(
        self,
        context: zmq.Context[Any],
        peer: int,
        url: str,
        *,
        server_public: bytes,
        client_public: bytes,
        client_secret: bytes,
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.identity = b"%d" % peer
        self.socket.curve_serverkey = server_public
        self.socket.curve_publickey = client_public
        self.socket.curve_secretkey = client_secret
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.linger = 1000
        self.socket.ipv6 = "[" in url
        self.socket.connect(url)

    def fileno(self) -> int:
        """Return a descriptor that reports messages which arrive after the socket was last found empty."""
        return int(self.socket.fileno())

    def send(self, message: Any) -> None:
        """Send a message, copied: a replica goes on to change its tensors in place."""
        self.send_frames(encode(message))

    def send_frames(self, frames: Sequence[Frame]) -> None:
        """Send a message that has been encoded, copied."""
        _send(self.socket, frames)

    def has_message(self) -> bool:
        """Return whether a message has arrived."""
        return _has_message(self.socket)

    def receive(self, linger_ms: int = 0) -> Any:
        """Return the next message, or None if there is none yet. The descriptor reports when one arrives."""
        return decode(_receive(self.socket)) if _has_message(self.socket) else None

    def close(self) -> None:
        """Close it. What was sent goes out within a second."""
        self.socket.close()


_P = TypeVar("_P", bound=Peers)

ProgramLink = UnixSocket | Link
"""An engine's end of the way of programs."""
