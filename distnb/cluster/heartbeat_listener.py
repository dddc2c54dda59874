"""The end, on the machine of a cluster's owner, of the connections by which other machines detect its loss."""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from distnb.cluster.connection import Keys
from distnb.wire.channel import OneClientKey, bind_router

__all__ = ["HeartbeatListener"]

_MOST_NBYTES = 1024  # enough for CURVE's handshake


class HeartbeatListener:
    """A socket to which other machines connect for as long as they are needed. It carries no messages.

    Args:
        host: The address to listen at.
        keys: The keys of both ends. Without a public key for clients, a process needs this end's public key only. It
            may connect and keep the connection, and no more.

    Attributes:
        url: The address for `Connection.heartbeat_url`.
    """

    def __init__(self, host: str, keys: Keys) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.maxmsgsize = _MOST_NBYTES
        self._authenticator = ThreadAuthenticator(self._context)
        if keys.client_public:
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", OneClientKey(keys.client_public.encode()))
        try:
            self._socket, self.url = bind_router(
                self._context,
                host,
                secret=keys.server_secret.encode(),
                public=keys.server_public.encode(),
                most_waiting=1,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening, which ends the engines on other machines."""
        if self._authenticator.is_alive():
            self._authenticator.stop()
        self._context.destroy(linger=0)
