"""The channel between the notebook and its engines: one way for programs, one for control.

For control, the notebook binds a ROUTER socket of ZeroMQ, and every engine connects a DEALER to it. Programs are sent
to engines on the notebook's host through UNIX sockets (`wire.unix_socket`), which are several times as fast as ZeroMQ,
and to engines on other hosts through a second ROUTER. A cluster on one host listens in its private directory only; a
cluster on several hosts listens on TCP. CURVE encrypts both: a client without the cluster's key cannot send a byte.

Parameter servers use the same channel: `Peers` is the part that they share with the notebook.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from distnb.errors import MessageError, StartError
from distnb.wire.codec import Frame, decode, encode
from distnb.wire.messages import Hello
from distnb.wire.unix_socket import BACKLOG, Listener, Packet, UnixSocket, pack

__all__ = [
    "Addresses",
    "ConnectionMonitor",
    "Link",
    "Peers",
    "ProgramLink",
    "Programs",
    "ServerContext",
    "Switchboard",
    "arrived",
    "send_frames",
]

_logger = logging.getLogger("distnb.wire")

_PROGRAMS_NAME, _CONTROL_NAME = "programs.socket", "control.socket"
"""The names of the sockets in a cluster's private directory, if all engines are on the notebook's host."""

# As plain numbers: combining members of an enumeration costs as much as sending.
_LARGE_NBYTES = 64 << 10
_POLLIN, _SNDMORE = int(zmq.POLLIN), int(zmq.SNDMORE)


# -- the notebook's end ------------------------------------------------------------------------------------------------


class Addresses(NamedTuple):
    """The addresses at which a notebook listens for its engines.

    Attributes:
        program_url, control_url: The ZeroMQ addresses. The first is "" if there is a `listener`.
        listener: The path of the UNIX socket at which engines of the notebook's machine receive programs, or "".
    """

    program_url: str
    control_url: str
    listener: str = ""


class ServerContext:
    """A ZeroMQ context of sockets that listen, for clients that prove to own one CURVE key. Keys are in Z85.

    Its authenticator serves all of its sockets, so it is not the context of other libraries.

    Args:
        secret, public: The keys of the sockets.
        client_public: The key of all clients. If it is empty, a client needs the sockets' public key only.

    Attributes:
        context: The context, which has default options for sockets.
    """

    def __init__(self, secret: bytes, public: bytes, client_public: bytes) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._secret, self._public, self._client_public = secret, public, client_public
        self._authenticator = ThreadAuthenticator(self.context)
        if client_public:
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's public key is accepted. The authenticator calls this."""
        return bool(key == self._client_public)

    def bind(self, at: str | Path, port: int | None = None, *, most_waiting: int = 0) -> tuple[zmq.Socket[bytes], str]:
        """Bind a ROUTER to a host, or to the path of a UNIX socket. Return it and its address.

        Args:
            port: The port; None for a free one of the host.
            most_waiting: The number of messages of a client that wait in each direction; 0 for no limit.

        Raises:
            StartError: This process cannot listen there.
        """
        socket = self.context.socket(zmq.ROUTER)
        socket.curve_secretkey, socket.curve_publickey = self._secret, self._public
        socket.curve_server = True
        # By default a ROUTER drops messages silently, beyond the high-water mark and to unknown peers.
        socket.sndhwm = socket.rcvhwm = most_waiting
        socket.router_mandatory = True
        socket.router_handover = True
        socket.backlog = BACKLOG  # ZeroMQ's own is 100, and refused connections are tried again much later
        socket.linger = 0
        try:
            if isinstance(at, Path):
                address = f"ipc://{at}"
                socket.bind(address)
                _logger.info("listening at %s", address)
                return socket, address
            socket.ipv6 = ":" in at
            address = f"tcp://[{at}]" if ":" in at else f"tcp://{at}"
            if port is None:
                address = f"{address}:{socket.bind_to_random_port(address)}"
            else:
                address = f"{address}:{port}"
                socket.bind(address)
            _logger.info("listening at %s", address)
            return socket, address
        except zmq.ZMQError as error:
            socket.close()
            raise StartError(f"This process cannot listen at {at}: {error}.") from error

    def close(self) -> None:
        """Close all sockets, and stop the authenticator. Unsent messages are dropped."""
        if self._authenticator.is_alive():
            self._authenticator.stop()
        self.context.destroy(linger=0)


class Switchboard:
    """The notebook's end of the channel, which reaches every engine by its id. CURVE keys are in Z85.

    Args:
        directory: The cluster's private directory.
        host: The address to listen at for engines on other hosts; None if all engines are on this host.
        ports: The ports for programs and for control, if engines on other hosts know them already; None for free ones.

    Attributes:
        programs: The channel for programs. Only the thread that holds the session's turn uses it.
        control: The socket for control (see `wire.control_channel`). Only the supervisor's thread uses it.
        program_url, control_url: The addresses of both for engines that connect with ZeroMQ. The first is "" if the
            engines use UNIX sockets.

    Raises:
        StartError: This process cannot listen there.
    """

    def __init__(
        self,
        directory: Path,
        *,
        server_secret: bytes,
        server_public: bytes,
        client_public: bytes,
        host: str | None,
        ports: tuple[int, int] | None = None,
    ) -> None:
        self._context = ServerContext(server_secret, server_public, client_public)
        self._directory, self._host = directory, host
        try:
            # The names and ports are known to engines that stay when the notebook ends.
            program_port, control_port = ports or (None, None)
            self.programs, self.program_url = self._open(Programs, _PROGRAMS_NAME, program_port)
            at = directory / _CONTROL_NAME if host is None else host
            self.control, self.control_url = self._context.bind(at, control_port)
        except BaseException:
            self._context.close()
            raise

    @property
    def addresses(self) -> Addresses:
        """The addresses at which it listens."""
        listener = self.programs.listener
        return Addresses(self.program_url, self.control_url, listener.path if listener is not None else "")

    def _open(self, kind: type[_P], name: str = "", port: int | None = None) -> tuple[_P, str]:
        if self._host is None:
            return kind(listener=Listener(self._directory, name)), ""
        remote, url = self._context.bind(self._host, port)
        return kind(remote), url

    def open_peers(self) -> tuple[Peers, str]:
        """Open one more channel. Return it, and its address for peers on other hosts."""
        return self._open(Peers)

    def close(self) -> None:
        """Close both channels and stop the authenticator. Unsent messages are dropped."""
        self.programs.close()
        self.control.close()
        self._context.close()


class Peers:
    """Connections to numbered processes: a UNIX socket for each process on this host, and ZeroMQ for all others.

    Only one thread at a time may use it.

    Args:
        remote: A bound ROUTER for peers on other hosts, if there are any. `close` closes it.
        listener: The listener to which peers on this host connect, if they use UNIX sockets. `close` closes it.
        recycles: Whether peers on this host keep nothing of the messages that they receive; see `UnixSocket`.

    Attributes:
        listener: The listener for peers on this host, or None.
    """

    def __init__(
        self, remote: zmq.Socket[bytes] | None = None, listener: Listener | None = None, *, recycles: bool = False
    ) -> None:
        self.listener = listener
        self._recycles = recycles
        self._remote = remote
        self._sockets: dict[int, UnixSocket] = {}
        self._peer_at: dict[int, int] = {}  # by the socket's descriptor
        self._epoll, self._watched = select.epoll(), select.epoll()
        if remote is not None:
            self.watch(int(remote.fileno()))

    def watch(self, descriptor: int) -> None:
        """Make each wait also return when this descriptor is readable."""
        self._epoll.register(descriptor, select.EPOLLIN)
        self._watched.register(descriptor, select.EPOLLIN)

    def accept(self) -> None:
        """Accept the peers on this host that have connected.

        Raises:
            OSError: This process has too many open files.
        """
        if self.listener is None:
            return
        for peer, connected in self.listener.accept().items():
            self._lose(peer)
            connected.recycles = self._recycles
            _logger.info("peer %d connected", peer)
            self._sockets[peer] = connected
            self._peer_at[connected.fileno()] = peer
            self._epoll.register(connected.fileno(), select.EPOLLIN)

    def _lose(self, peer: int) -> None:
        connected = self._sockets.pop(peer, None)
        if connected is not None:
            _logger.info("peer %d disconnected", peer)
            del self._peer_at[connected.fileno()]
            self._epoll.unregister(connected.fileno())
            connected.close()

    def send(self, peers: Iterable[int], message: Any) -> list[int]:
        """Send a message to peers, and return those that are not connected.

        The message is copied: its tensors may change as soon as this function returns.
        """
        return self.send_frames(peers, encode(message))

    def send_frames(self, peers: Iterable[int], frames: Sequence[Frame]) -> list[int]:
        """Send an encoded message to peers, and return those that are not connected."""
        peers = tuple(peers)
        packets: Sequence[Packet] = ()
        shared: Sequence[Frame | zmq.Frame] = ()
        unreached = []
        for peer in peers:
            connected = self._sockets.get(peer)
            if connected is None:
                shared = shared or (_shared(frames) if len(peers) > 1 else frames)
                reached = self._remote is not None and send_frames(self._remote, _name(peer), shared)
            elif self._recycles:
                reached = connected.send_frames(frames)
            else:
                packets = packets or pack(frames)
                reached = connected.send_packets(packets)
            if not reached:
                _logger.info("peer %d cannot be reached", peer)
                unreached.append(peer)
        return unreached

    def wait(self, timeout_s: float | None = None) -> Collection[int]:
        """Wait until a message has arrived or a watched descriptor is readable, or until the timeout.

        Returns:
            The readable descriptors, for `receive`. They include the watched ones.
        """
        if self._remote is not None and _has_message(self._remote):
            return ()  # its descriptor reports only messages that arrive after the socket was last found empty
        return dict(self._epoll.poll(timeout_s))

    def await_one(self, peer: int, timeout_s: float) -> bool:
        """Wait until a message of a peer has arrived or a watched descriptor is readable. Return False after a timeout.

        Messages of other peers do not end the wait, since each wake-up costs two switches of processes. A peer on
        another host is not waited for.
        """
        connected = self._sockets.get(peer)
        return connected is not None and connected.wait(self._watched.fileno(), timeout_s)

    def receive(self, readable: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yield the next message of each peer on this host, and all messages of other peers, without blocking.

        A MessageError is yielded in place of a message that cannot be read.

        Args:
            readable: The result of `wait`.
        """
        for descriptor in readable:
            peer = self._peer_at.get(descriptor)
            if peer is None:
                continue
            message = self._received(self._sockets[peer].receive)
            if message is not None:
                yield peer, message
            elif self._sockets[peer].ended:
                self._lose(peer)  # the process has ended, and its watcher reports that
        if self._remote is not None:
            for name, frames in arrived(self._remote):
                # A process that was replaced, by another one of the same number, has no number as its name.
                if name.isdigit():
                    yield int(name), self._received(partial(decode, frames))

    def _received(self, receive: Callable[[], Any]) -> Any:
        """Return a message that arrives, or the error of one that cannot be read."""
        try:
            return receive()
        except MessageError as error:
            return error

    def is_near(self, peer: int) -> bool:
        """Return whether a peer is on this host and connected. Then any thread may send to it."""
        return peer in self._sockets

    def part(self, peer: int) -> Iterator[Any]:
        """Yield the last messages of a peer on this host that has ended, then close its connection."""
        while (connected := self._sockets.get(peer)) is not None:
            message = self._received(connected.receive)
            if message is None:
                self._lose(peer)
            else:
                yield message

    def close(self) -> None:
        """Close all connections. Unsent and unread messages are dropped."""
        if self.listener is not None:
            self.listener.close()
        for peer in list(self._sockets):
            self._lose(peer)
        self._epoll.close()
        self._watched.close()
        if self._remote is not None:
            self._remote.close()


class Programs(Peers):
    """The notebook's end of the program channel: it sends programs to engines and receives replies.

    `receive` raises the MessageError of a message that cannot be read.
    """

    def _received(self, receive: Callable[[], Any]) -> Any:
        return receive()

    def meet(self, hellos: Iterable[Hello]) -> None:
        """Accept the connections of engines that have sent their hellos on the control channel.

        Raises:
            StartError: An engine on this host is not connected.
        """
        try:
            self.accept()
        except OSError as error:
            raise StartError(
                f"The notebook cannot open a connection to its engines ({os.strerror(error.errno or 0)}). Close files, "
                "or raise the limit (ulimit -n), and start the engines again."
            ) from error
        for hello in hellos:
            if self.listener is not None and hello.engine not in self._sockets:
                raise StartError(f"Engine {hello.engine} did not connect to the notebook for programs.")


def send_frames(socket: zmq.Socket[bytes], name: bytes, frames: Sequence[Frame | zmq.Frame]) -> bool:
    """Send a copy of a message through a ROUTER. Return False if no peer of this name is connected."""
    try:
        _send(socket, [name, *frames])
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


def arrived(socket: zmq.Socket[bytes]) -> Iterator[tuple[bytes, list[Frame]]]:
    """Yield the messages that have arrived at a ROUTER, each with the name of its sender, without blocking."""
    while _has_message(socket):
        yield socket.recv(), _receive(socket)


def _name(peer: int) -> bytes:
    return b"%d" % peer


def _shared(frames: Sequence[Frame]) -> list[Frame | zmq.Frame]:
    """Copy the large frames of a message once for all of its peers. ZeroMQ would copy them for each."""
    large = (memoryview(frame).nbytes >= _LARGE_NBYTES for frame in frames)
    return [
        zmq.Frame(bytes(frame), copy=False) if is_large else frame
        for frame, is_large in zip(frames, large, strict=True)
    ]


def _send(socket: zmq.Socket[bytes], frames: Sequence[Frame | zmq.Frame]) -> None:
    for frame in frames[:-1]:
        socket.send(frame, _SNDMORE)
    socket.send(frames[-1])


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    # Not by an attempt to receive: the exception for an empty socket costs as much as a message.
    return bool(zmq.zmq_poll([(socket, _POLLIN)], 0))


def _receive(socket: zmq.Socket[bytes]) -> list[Frame]:
    """Return the remaining frames of a message: its header, and its buffers without a copy."""
    frame = socket.recv(copy=False)
    frames: list[Frame] = [frame.bytes]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
    return frames


# -- the other end -----------------------------------------------------------------------------------------------------


class Link:
    """The end of an engine or of another peer: one DEALER socket.

    Args:
        name: The name by which the other end knows it; None for the peer's number.

    Attributes:
        monitor: The monitor of the connection, which ZeroMQ makes again whenever it has ended; None unless `monitored`.
    """

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
        name: bytes | None = None,
        monitored: bool = False,
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        # Before it connects: a monitor does not report what has happened already.
        self.monitor = ConnectionMonitor(self.socket) if monitored else None
        self.socket.identity = _name(peer) if name is None else name
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
        """Send a copy of a message: the replica may change its tensors in place afterwards."""
        self.send_frames(encode(message))

    def send_frames(self, frames: Sequence[Frame]) -> None:
        """Send a copy of an encoded message."""
        _send(self.socket, frames)

    def has_message(self) -> bool:
        """Return whether a message has arrived."""
        return _has_message(self.socket)

    def receive(self, linger_ms: int = 0) -> Any:
        """Return the next message, or None if none has arrived. `linger_ms` is for `UnixSocket`s."""
        return decode(_receive(self.socket)) if _has_message(self.socket) else None

    def close(self) -> None:
        """Close the socket. Messages that were sent get one second to leave."""
        if self.monitor is not None:
            self.monitor.close()
        self.socket.close()


class ConnectionMonitor:
    """The monitor of a DEALER's connection to the notebook.

    Attributes:
        socket: The socket to poll. It is readable when the connection has been made or has ended.
    """

    def __init__(self, monitored: zmq.Socket[bytes]) -> None:
        self._monitored = monitored
        self.socket: zmq.Socket[bytes] = monitored.get_monitor_socket(
            int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        )

    def news(self) -> Iterator[bool]:
        """Yield True each time the connection was made since the last call, and False each time it ended."""
        while _has_message(self.socket):
            yield recv_monitor_message(self.socket)["event"] == zmq.Event.HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        """End the monitoring."""
        self._monitored.disable_monitor()


_P = TypeVar("_P", bound=Peers)

ProgramLink = UnixSocket | Link
"""An engine's end of the channel for programs."""
