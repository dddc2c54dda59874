"""The end, on the machine of a cluster's owner, of the connections by which other machines detect its loss."""

from __future__ import annotations

from distnb.cluster.connection import Keys
from distnb.wire.channel import ServerContext

__all__ = ["HeartbeatListener"]

_MOST_NBYTES = 1024  # enough for CURVE's handshake


class HeartbeatListener:
    """A socket to which other machines connect for as long as they are needed. It carries no messages.

    Args:
        host: The address to listen at.
        keys: The keys of both ends. Without a public key for clients, a process that has this end's public key may
            connect, and no more.

    Attributes:
        url: The address for `Connection.heartbeat_url`.
    """

    def __init__(self, host: str, keys: Keys) -> None:
        given = keys.server_secret.encode(), keys.server_public.encode(), keys.client_public.encode()
        self._context = ServerContext(*given)
        self._context.context.maxmsgsize = _MOST_NBYTES
        try:
            self._socket, self.url = self._context.bind(host, most_waiting=1)  # it is closed with its last reference
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening, which ends the engines on other machines."""
        self._context.close()
