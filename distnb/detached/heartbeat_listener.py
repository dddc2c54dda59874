"""The daemon's end of the connections by which other machines with engines detect the loss of the daemon's machine.

In a cluster that ends with its notebook, the notebook's control channel is this end.
"""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from distnb.cluster.connection import Keys
from distnb.wire.channel import OneClientKey, bind_router

__all__ = ["HeartbeatListener"]


class HeartbeatListener:
    """The socket to which the agents of other machines connect, to detect the loss of this one.

    Args:
        host: The address to listen at.
        keys: The cluster's keys.

    Attributes:
        url: The address for `Connection.heartbeat_url`.
    """

    def __init__(self, host: str, keys: Keys) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", OneClientKey(keys.client_public.encode()))
        try:
            self._socket, self.url = bind_router(
                self._context, host, secret=keys.server_secret.encode(), public=keys.server_public.encode()
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening, which ends the engines on other machines."""
        self._authenticator.stop()
        self._context.destroy(linger=0)
