"""The authenticated channel between the notebook and its engines: ZeroMQ over TCP with CURVE.

The notebook binds two ROUTER sockets, one for programs and one for control; every engine connects a DEALER to
each, to that for programs by a UNIX address where it is on the notebook's host. CURVE encrypts both, and a client whose
public key is not the cluster's gets no byte through. On one host the large frames of programs and replies go around it,
through shared memory (`wire.freight`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from distnb.wire import freight
from distnb.wire.codec import Frame, decode, encode
from distnb.wire.freight import Harbour, Passage

__all__ = ["Link", "OneClientKey", "Switchboard", "beside", "receive_from", "send_to"]

# As plain numbers: combining members of an enumeration costs as much as sending.
_POLLIN, _SNDMORE = int(zmq.POLLIN), int(zmq.SNDMORE)


class OneClientKey:
    """Lets exactly one CURVE key in.

    Args:
        public: The public key that clients must prove to own (Z85).
    """

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator with each client's public key (Z85)."""
        return bool(key == self._public)


class Switchboard:
    """The notebook's end: two ROUTER sockets that reach every engine by its id.

    The program socket belongs to whoever holds the session's turn, the control socket to the supervisor's thread.

    Args:
        server_secret, server_public: The notebook's CURVE key pair (Z85).
        client_public: The public key that engines prove to own.
        host: The address to listen on; loopback unless engines live on other machines.

    Attributes:
        harbour: Where engines of this host come for shared memory.
    """

    def __init__(
        self, *, server_secret: bytes, server_public: bytes, client_public: bytes, host: str = "127.0.0.1"
    ) -> None:
        # A context of its own: the authenticator serves all sockets of its context, and users have theirs.
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", OneClientKey(client_public))
        self._keys = (server_secret, server_public)
        self.program = self._bind_socket()
        self.control = self._bind_socket()
        self.program_url = _bind(self.program, host)
        self.control_url = _bind(self.control, host)
        self.harbour = Harbour()
        self.program.bind(beside(self.harbour.name))

    def _bind_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_secretkey, socket.curve_publickey = self._keys
        socket.curve_server = True
        # Without these a ROUTER drops silently: past the high-water mark, and to peers that it does not know.
        socket.sndhwm = socket.rcvhwm = 0
        socket.router_mandatory = True
        socket.router_handover = True
        socket.linger = 0
        return socket

    def close(self) -> None:
        """Close both sockets and stop the authenticator. Waiting messages are dropped."""
        self.program.close()
        self.control.close()
        self.harbour.close()
        self._authenticator.stop()
        self._context.destroy(linger=0)


def beside(harbour_name: str) -> str:
    """Where processes of the notebook's host reach its program socket: a third quicker than by TCP, by the same keys.

    An abstract address of the kernel: no file is left. Who takes the name of a notebook that is gone lacks its key.
    """
    return f"ipc://@{harbour_name}-programs"


def _bind(socket: zmq.Socket[bytes], host: str) -> str:
    socket.ipv6 = ":" in host
    address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    return f"{address}:{socket.bind_to_random_port(address)}"


def send_to(
    socket: zmq.Socket[bytes], engines: Iterable[int], message: Any, harbour: Harbour | None = None
) -> list[int]:
    """Send a message to engines, copied: what it refers to may change when this returns.

    Args:
        socket: One of the switchboard's.
        engines: Their ids.
        message: What `decode` gives there.
        harbour: For large messages on the program socket: engines of this host get them through shared memory.

    Returns:
        The engines that are not connected.

    Raises:
        zmq.ZMQError: The socket is closed.
    """
    frames = rest = encode(message)
    engines = tuple(engines)
    reached: Collection[int] = ()
    if harbour is not None and freight.is_large(frames):
        rest, reached = freight.ship(frames, harbour.passages(engines))
    unreached = []
    for engine in engines:
        try:
            _send(socket, [b"%d" % engine, *(rest if engine in reached else frames)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            unreached.append(engine)
    return unreached


def receive_from(socket: zmq.Socket[bytes], harbour: Harbour | None = None) -> Iterator[tuple[int, Any]]:
    """All messages that have arrived, each with the id of its engine. Never blocks."""
    while _has_message(socket):
        engine = int(socket.recv())
        frames = _receive(socket)
        if freight.is_manifest(frames[0]):
            frames = freight.unload(frames, harbour.passages((engine,)).get(engine) if harbour is not None else None)
        yield engine, decode(frames)


def _send(socket: zmq.Socket[bytes], frames: list[Frame]) -> None:
    for frame in frames[:-1]:
        socket.send(frame, _SNDMORE)
    socket.send(frames[-1])


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    # Trying to receive would do, but the exception that says "nothing" costs as much as a message.
    return bool(zmq.zmq_poll([(socket, _POLLIN)], 0))


def _receive(socket: zmq.Socket[bytes]) -> list[Frame]:
    """The rest of a message: its header, and its buffers without a copy."""
    frame = socket.recv(copy=False)
    frames: list[Frame] = [frame.bytes]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
    return frames


class Link:
    """An engine's end: one DEALER socket that reaches the notebook.

    Args:
        context: The engine's ZeroMQ context.
        engine: The engine's id, its identity on the channel.
        url: Where the notebook listens.
        server_public, client_public, client_secret: CURVE keys (Z85).
        passage: The way of large frames, if the notebook is on this host.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        engine: int,
        url: str,
        *,
        server_public: bytes,
        client_public: bytes,
        client_secret: bytes,
        passage: Passage | None = None,
    ) -> None:
        self._passage = passage
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.identity = b"%d" % engine
        self.socket.curve_serverkey = server_public
        self.socket.curve_publickey = client_public
        self.socket.curve_secretkey = client_secret
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.linger = 1000
        self.socket.ipv6 = "[" in url
        self.socket.connect(url)

    def send(self, message: Any) -> None:
        """Send a message, copied: a replica goes on to change its tensors in place."""
        frames = encode(message)
        if self._passage is not None and freight.is_large(frames):
            frames, _ = freight.ship(frames, {0: self._passage})
        _send(self.socket, frames)

    def receive(self) -> Any:
        """The next message, or None when there is none yet.

        Raises:
            MessageError: It cannot be read.
        """
        if not _has_message(self.socket):
            return None
        frames = _receive(self.socket)
        return decode(freight.unload(frames, self._passage) if freight.is_manifest(frames[0]) else frames)

    def close(self) -> None:
        """Close the socket, giving messages on their way one second."""
        self.socket.close()
        if self._passage is not None:
            self._passage.close()
