"""The channel between the notebook and its engines: one way for programs, one for control.

The notebook binds two ROUTER sockets of ZeroMQ, over TCP with CURVE, which encrypts: a client whose public key is not
the cluster's gets no byte through. Every engine connects a DEALER for control. Programs go to engines of the notebook's
host by passages (`wire.passage`), several times as fast, and to all others by the second socket.
"""

from __future__ import annotations

import select
from typing import Any, Protocol

import zmq
from zmq.auth.thread import ThreadAuthenticator

from distnb.wire.codec import decode, encode
from distnb.wire.program_channels import Programs
from distnb.wire.unix_socket import UnixSocket, pack
from distnb.wire.zmq_sockets import has_message, receive, send

__all__ = ["Link", "OneClientKey", "UnixSocketLink", "ProgramLink", "Switchboard"]


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
    """The notebook's end: it reaches every engine by its id.

    Args:
        server_secret, server_public: The notebook's CURVE key pair (Z85).
        client_public: The public key that engines prove to own.
        host: The address to listen on; loopback unless engines live on other machines.

    Attributes:
        programs: The way of programs; belongs to whoever holds the session's turn.
        control: The socket for control; belongs to the supervisor's thread.
        program_url, control_url: Where engines of other machines, and all, reach them.
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
        far = self._bind_socket()
        self.program_url = _bind(far, host)
        self.programs = Programs(far)
        self.control = self._bind_socket()
        self.control_url = _bind(self.control, host)

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
        """Close both ways and stop the authenticator. Waiting messages are dropped."""
        self.programs.close()
        self.control.close()
        self._authenticator.stop()
        self._context.destroy(linger=0)


def _bind(socket: zmq.Socket[bytes], host: str) -> str:
    socket.ipv6 = ":" in host
    address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    return f"{address}:{socket.bind_to_random_port(address)}"


class ProgramLink(Protocol):
    """An engine's end of the way of programs."""

    @property
    def ended(self) -> bool:
        """Whether the notebook is known to be gone: nothing will come."""

    def fileno(self) -> int:
        """Readable when `receive` may have something."""

    def send(self, message: Any) -> None:
        """Send a message, copied: a replica goes on to change its tensors in place."""

    def receive(self, linger_ms: int = 0) -> Any:
        """The next message, or None when there is none yet.

        Args:
            linger_ms: How long to wait for one; not all do.

        Raises:
            MessageError: It cannot be read.
        """


class UnixSocketLink:
    """An engine's end where it is on the notebook's host.

    Args:
        passage: The way there.
    """

    def __init__(self, passage: UnixSocket) -> None:
        self._passage = passage
        self._epoll = select.epoll()
        self._epoll.register(passage, select.EPOLLIN)
        self._has_bell = False

    @property
    def ended(self) -> bool:
        """Whether the notebook is gone."""
        return self._passage.ended

    def fileno(self) -> int:
        """A descriptor that is readable when something has come since `receive` last gave nothing."""
        return self._epoll.fileno()

    def send(self, message: Any) -> None:
        """Send a message, copied."""
        self._passage.send(pack(encode(message)))

    def receive(self, linger_ms: int = 0) -> Any:
        """The next message, or None when there is none within so many milliseconds.

        Raises:
            MessageError: It cannot be read.
        """
        frames = self._passage.receive()
        if frames is None:
            self._listen_for_bell()
            self._epoll.poll(0)  # the rings until now, which would hide the next; what they tell of is there
            frames = self._passage.receive()
        if frames is None and linger_ms and not self.ended and self._epoll.poll(linger_ms / 1000):
            frames = self._passage.receive()
        return None if frames is None else decode(frames)

    def _listen_for_bell(self) -> None:
        """Once it was handed over: of the socket only the end is of interest, which needs no asking for."""
        if not self._has_bell and self._passage.bell is not None:
            self._has_bell = True
            self._epoll.register(self._passage.bell, select.EPOLLIN | select.EPOLLET)
            self._epoll.modify(self._passage, 0)


class Link:
    """An engine's end: one DEALER socket that reaches the notebook.

    Args:
        context: The engine's ZeroMQ context.
        engine: The engine's id, its identity on the channel.
        url: Where the notebook listens.
        server_public, client_public, client_secret: CURVE keys (Z85).
    """

    ended = False

    def __init__(
        self,
        context: zmq.Context[Any],
        engine: int,
        url: str,
        *,
        server_public: bytes,
        client_public: bytes,
        client_secret: bytes,
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.identity = b"%d" % engine
        self.socket.curve_serverkey = server_public
        self.socket.curve_publickey = client_public
        self.socket.curve_secretkey = client_secret
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.linger = 1000
        self.socket.ipv6 = "[" in url
        self.socket.connect(url)

    def fileno(self) -> int:
        """A descriptor that tells of what comes after the socket was last found empty."""
        return int(self.socket.fileno())

    def send(self, message: Any) -> None:
        """Send a message, copied."""
        send(self.socket, encode(message))

    def receive(self, linger_ms: int = 0) -> Any:
        """The next message, or None when there is none yet: what is waited for is told by the descriptor only.

        Raises:
            MessageError: It cannot be read.
        """
        return decode(receive(self.socket)) if has_message(self.socket) else None

    def close(self) -> None:
        """Close the socket, giving messages on their way one second."""
        self.socket.close()
