"""The thread of a parameter server: it takes requests from its sockets, one at a time, and answers them."""

from __future__ import annotations

import os
import pickle
import threading
import time
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from distnb.errors import MessageError, RemoteError
from distnb.runtime.servers.server_messages import Address, ServerReply, ServerRequest
from distnb.runtime.servers.store import ShardStore
from distnb.wire.channel import OneClientKey, Peers, bind_router
from distnb.wire.tensors import encode_tensors
from distnb.wire.unix_socket import Listener

__all__ = ["Service"]

_PATIENCE_S = 0.05


class Service:
    """Serves a store of shards to workers and to the coordinator, from a thread of its own, until it is closed.

    Clients come and go at any time. Those of this host can enter the private directory; others have the cluster's key.

    Args:
        directory: The private directory.
        client_public: The CURVE key (Z85) of those whom it serves.
        host: Where it listens for clients of other hosts: a name or an address of this machine. None: on no port.

    Attributes:
        address: Where clients reach it.
    """

    def __init__(self, directory: str, *, client_public: str, host: str | None) -> None:
        self._context: zmq.Context[Any] | None = None
        remote, url, public = None, "", b""
        if host is not None:
            self._context = zmq.Context()
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", OneClientKey(client_public.encode()))
            public, secret = zmq.curve_keypair()
            remote, url = bind_router(self._context, host, secret=secret, public=public)
        self._listener = Listener(directory)
        self._peers = Peers(remote, self._listener, recycles=True)
        self.address = Address(self._listener.path, url, public.decode())
        # Clients keep copies by version: what they know of an earlier server is never taken for this one's.
        self._store = ShardStore(first_version=time.time_ns())
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="distnb-parameter-server", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Answer the request that is under way, and end. What clients wait for beyond that, they do not get."""
        os.eventfd_write(self._end, 1)
        if self._thread.is_alive():
            self._thread.join()
        self._peers.close()
        if self._context is not None:
            self._authenticator.stop()
            self._context.destroy(linger=0)
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
                    self._peers.let_in()
                except OSError:  # too many open files: until some are closed, it is readable again and again
                    time.sleep(_PATIENCE_S)
            for client, message in self._peers.receive(readable):
                self._answer(client, message)
                del message  # its memory is the client's again

    def _answer(self, client: int, message: ServerRequest | MessageError) -> None:
        if isinstance(message, MessageError):
            answer = ServerReply(-1, (), message)
        else:
            answer = self._store.handle(message)
        if answer.error is not None:
            answer = answer._replace(error=_that_travels(answer.error))
        # Encoded, and so copied, before the next request changes what the answer shows.
        self._peers.send_frames([client], encode_tensors(answer))


def _that_travels(error: BaseException) -> BaseException:
    """Return an error in a form that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever hinders it
        return RemoteError(f"{type(error).__name__}: {error}")
    return error
