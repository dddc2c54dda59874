"""The connections of the workers and the coordinator to the parameter servers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import zmq

from distnb import activity
from distnb.errors import NoClusterError, ServerLost
from distnb.servers.closure_messages import NO_FENCE, Fence
from distnb.servers.server_messages import Address, ServerReply, ServerRequest
from distnb.wire.channel import Link, ProgramLink
from distnb.wire.tensors import encode_tensors
from distnb.wire.unix_socket import connect

__all__ = ["ClientKeys", "ServerConnections"]

_logger = logging.getLogger("distnb.servers.variables")


_CURE = (
    "Its variables are lost. Start a replacement (%distnb restart --missing), and restore the last checkpoint: "
    "coordinator.recover(checkpoint_manager)."
)


class ClientKeys(Protocol):
    """The CURVE keys (Z85) that a cluster's clients share."""

    @property
    def client_public(self) -> str: ...

    @property
    def client_secret(self) -> str: ...


class ServerConnections:
    """The connections of one client to the parameter servers. They are thread-safe: exchanges run one at a time.

    Args:
        addresses: The address of each server.
        number: This client's number, unique in the cluster.
        keys: The keys for servers on other hosts.
    """

    def __init__(self, addresses: Mapping[int, Address], number: int, keys: ClientKeys) -> None:
        self._number = number
        self._keys = keys
        self._context: zmq.Context[Any] | None = None
        self._lost: dict[int, str] = {}
        self._generations: dict[int, int] = {}
        self._lock = threading.Lock()
        self._requests = itertools.count(1)
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.EPOLLIN)
        self._connections = {server: self._connection(server, address) for server, address in addresses.items()}

    @property
    def count(self) -> int:
        """The number of servers, including lost ones."""
        return len(self._connections)

    def exchange(self, requests: Mapping[int, Sequence[Any]], fence: Fence = NO_FENCE) -> dict[int, tuple[Any, ...]]:
        """Send requests to several servers at once and wait for all answers.

        A signal handler may raise an exception during the wait. The exception propagates, later exchanges work, and it
        is unknown whether the servers ran the operations.

        Args:
            requests: The operations (see `server_messages`) for each server, which runs its own atomically.
            fence: The closures that have ended.

        Returns:
            The results of the operations, by server.

        Raises:
            ServerLost: One of the servers has ended.
            NoClusterError: The cluster was stopped.
        """
        with self._lock:
            waiting: dict[int, int] = {}
            if self._poll.closed:
                raise NoClusterError(
                    "The cluster was stopped, and the variables on its parameter servers are lost. Start a cluster, "
                    "create the strategy, the variables and the coordinator again, and restore a checkpoint."
                )
            for server, operations in requests.items():
                self._refuse_lost((server,))
                waiting[server] = number = next(self._requests)
                self._connections[server].send(ServerRequest(number, fence, tuple(operations)))
            what = f"parameter server {', '.join(map(str, waiting))}"
            activity.begin("servers", activity.Arrival(at=activity.clock(), what=what))
            try:
                answers = self._collect(waiting)
            finally:
                activity.end()
        failed: list[BaseException] = []
        for server in requests:
            error = answers[server].error
            if error is not None:
                error.add_note(f"It was raised by parameter server {server}.")
                failed.append(error)
        if failed:
            first, *others = failed
            for other in others:
                first.add_note(f"There was another error: {type(other).__name__}: {other}")
            raise first
        return {server: answers[server].results for server in requests}

    def _collect(self, waiting: dict[int, int]) -> dict[int, ServerReply]:
        """Wait for the replies and return them by server. `waiting` maps each server to its request's number."""
        answers: dict[int, ServerReply] = {}
        ready = list(waiting)
        while True:
            for server in ready:
                for answer in self._connections[server].receive():
                    # Other numbers belong to late answers to interrupted exchanges. -1: a request was unreadable.
                    if server in waiting and answer.number in (waiting[server], -1):
                        answers[server] = answer
                        del waiting[server]
                if server in waiting and self._connections[server].ended:
                    raise ServerLost(f"Parameter server {server} has ended. {_CURE}")
            if not waiting:
                return answers
            self._refuse_lost(waiting)
            ready = self._wait()

    def _wait(self) -> list[int]:
        """Wait until a message has arrived, and return the servers that may have sent it."""
        descriptors = [descriptor for descriptor, _ in self._poll.poll()]
        if self._wake in descriptors:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return [server for server, each in self._connections.items() if each.descriptor in descriptors]

    def _refuse_lost(self, servers: Iterable[int]) -> None:
        for server in servers:
            how = self._lost.get(server)
            if how is not None:
                raise ServerLost(f"Parameter server {server} is lost: {how}. {_CURE}")

    def lost(self, server: int, how: str) -> None:
        """Mark a server as lost, from any thread. Exchanges with it, including the current one, raise ServerLost."""
        self._lost[server] = how
        _logger.warning("parameter server %d is lost: %s", server, how)
        os.eventfd_write(self._wake, 1)

    def replace(self, server: int, address: Address) -> None:
        """Connect to the new, empty server that replaces another."""
        with self._lock:
            if server in self._connections:
                self._connections[server].close()
            self._connections[server] = self._connection(server, address)
            self._lost.pop(server, None)
            self._generations[server] = self.generation(server) + 1
            _logger.info("parameter server %d was replaced, generation %d", server, self._generations[server])

    def generation(self, server: int) -> int:
        """Return the number of times that this server has been replaced."""
        return self._generations.get(server, 0)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for each in self._connections.values():
                each.close()
            self._connections.clear()
            if self._poll.closed:
                return
            if self._context is not None:
                self._context.destroy(linger=0)
            self._poll.close()
            os.close(self._wake)

    def _connection(self, server: int, address: Address) -> _Connection:
        return _Connection(partial(self._open, server, address), self._poll)

    def _open(self, server: int, address: Address) -> ProgramLink:
        try:
            link = connect(address.path, self._number)
        except OSError as error:  # no process listens on the socket, or the server is on another host
            if not address.url:
                raise ServerLost(f"Parameter server {server} cannot be reached: {error}. {_CURE}") from error
        else:
            link.recycles = True
            _logger.debug("connected to parameter server %d at %s", server, address.path)
            return link
        if self._context is None:
            self._context = zmq.Context()
        _logger.debug("connected to parameter server %d at %s", server, address.url)
        return Link(
            self._context,
            self._number,
            address.url,
            server_public=address.public.encode(),
            client_public=self._keys.client_public.encode(),
            client_secret=self._keys.client_secret.encode(),
        )


class _Connection:
    """A connection to a server, opened on first use and reopened after an interrupt in the middle of a message.

    Args:
        make: Opens the connection.
        poll: The poll in which the connection is registered while messages can arrive.
    """

    def __init__(self, make: Callable[[], ProgramLink], poll: select.epoll) -> None:
        self._make = make
        self._poll = poll
        self._link: ProgramLink | None = None
        self._within = False  # True during a message; if it is True at the next call, that message was interrupted
        self.descriptor = -1

    @property
    def ended(self) -> bool:
        """True if no more messages can arrive."""
        return self._link is not None and self._link.ended

    def send(self, message: Any) -> None:
        """Send a copy of a message."""
        frames = encode_tensors(message)
        if self._within:
            self.close()
        self._within = True
        if self._link is None:
            self._link = self._make()
            self.descriptor = self._link.fileno()
            self._poll.register(self.descriptor, select.EPOLLIN)
        self._link.send_frames(frames)
        self._within = False

    def receive(self) -> Iterator[Any]:
        """Return the messages that have arrived, without blocking."""
        if self._within:
            self.close()
        link = self._link
        if link is None or self.ended:
            return
        while True:
            self._within = True
            message = link.receive()
            self._within = False
            if message is None:
                break
            yield message
        if link.ended:
            self._poll.unregister(self.descriptor)  # a closed connection stays readable, so `poll` would never block

    def close(self) -> None:
        """Close the connection and drop the messages that still arrive."""
        link, self._link, self._within = self._link, None, False
        if link is not None:
            if not link.ended:
                self._poll.unregister(self.descriptor)
            link.close()
