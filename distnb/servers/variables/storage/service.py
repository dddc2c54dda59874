"""The thread of a parameter server, which receives requests from sockets and answers them one at a time."""

from __future__ import annotations

import os
import pickle
import threading
import time

import zmq

from distnb.errors import MessageError, RemoteError
from distnb.servers.server_messages import Address, ServerReply, ServerRequest
from distnb.servers.variables.storage.store import ShardStore
from distnb.wire.channel import Peers, ServerContext
from distnb.wire.tensors import encode_tensors
from distnb.wire.unix_socket import Listener

__all__ = ["Service"]

_PATIENCE_S = 0.05


class Service:
    """A store of shards and a thread that serves it to the workers and the coordinator until `close`.

    Clients may connect and disconnect at any time. Clients on this host are authorised by their access to the private
    directory, and clients on other hosts by the cluster's key.

    Args:
        directory: The private directory.
        client_public: The public CURVE key (Z85) of the clients.
        host: The name or address of this machine on which to listen for clients on other hosts. None: no port.

    Attributes:
        address: The server's address for clients.
    """

    def __init__(self, directory: str, *, client_public: str, host: str | None) -> None:
        self._context: ServerContext | None = None
        remote, url, public = None, "", b""
        if host is not None:
            public, secret = zmq.curve_keypair()
            self._context = ServerContext(secret, public, client_public.encode())
            remote, url = self._context.bind(host)
        self._listener = Listener(directory)
        self._peers = Peers(remote, self._listener, recycles=True)
        self.address = Address(self._listener.path, url, public.decode())
        # Clients identify the content of their copies by version. Versions that start at the current time differ from
        # those of any earlier server, so clients never mistake a copy from an earlier server for one of this server.
        self._store = ShardStore(first_version=time.time_ns())
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="distnb-parameter-server", daemon=True)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def close(self) -> None:
        """Answer the current request and end. Other waiting requests get no answer."""
        os.eventfd_write(self._end, 1)
        if self._thread.is_alive():
            self._thread.join()
        self._peers.close()
        if self._context is not None:
            self._context.close()
        os.close(self._end)

    def _serve(self) -> None:
        listener = self._listener.fileno()
        self._peers.watch(listener)
        self._peers.watch(self._end)
        while True:
            readable = self._peers.wait()
            if self._end in readable:
                return
            if listener in readable:
                try:
                    self._peers.accept()
                except OSError:  # too many open files; the listener stays readable until some files are closed
                    time.sleep(_PATIENCE_S)
            for client, message in self._peers.receive(readable):
                self._answer(client, message)
                del message  # returns the message's memory to the client

    def _answer(self, client: int, message: ServerRequest | MessageError) -> None:
        if isinstance(message, MessageError):
            answer = ServerReply(-1, (), message)
        else:
            answer = self._store.handle(message)
        if answer.error is not None:
            answer = answer._replace(error=_sendable(answer.error))
        # The answer holds the store's own tensors. Encoding copies them before the next request changes them.
        self._peers.send_frames([client], encode_tensors(answer))


def _sendable(error: BaseException) -> BaseException:
    """Return an error, or a RemoteError with its text if the error cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs the error's own methods, which may raise anything
        return RemoteError(f"{type(error).__name__}: {error}")
    return error
