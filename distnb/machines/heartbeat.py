"""The connection by which a machine with engines detects the loss of the notebook's machine.

The connection belongs to a process that never computes. Its other end is the notebook's control channel, or a socket
of a detached cluster's daemon, so it is authenticated and encrypted. No messages are sent on it. The kernel's
keep-alive probes detect that the other machine can no longer be reached. The other machine's kernel answers them, so a
busy or suspended notebook is not mistaken for a lost one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from distnb.cluster.connection import Connection, Keys
from distnb.errors import StartError
from distnb.wire.channel import OneClientKey, bind_router

__all__ = ["LOST", "LOST_AFTER_S", "HeartbeatListener", "heartbeat"]

LOST = 255
"""The exit status of a local process whose node agent was not reached or was lost. It is ssh's own status for that."""

_PROBE_S = 2
_PROBES = 3
LOST_AFTER_S = _PROBE_S * (_PROBES + 1)
"""The seconds without a sign of the other machine after which the connection counts as lost."""

_CONNECT_S = 30
_POLL_MS = 200


class HeartbeatListener:
    """The other end of these connections, if it is not the notebook's control channel.

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


@contextmanager
def heartbeat(connection: Connection, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Watch the notebook from a thread, which calls `on_lost` once with the reason.

    Raises:
        StartError: On entering, if the notebook cannot be reached.
    """
    url = connection.heartbeat_url or connection.control_url
    closing = threading.Event()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.curve_serverkey = connection.server_public.encode()
        socket.curve_publickey = connection.client_public.encode()
        socket.curve_secretkey = connection.client_secret.encode()
        socket.linger = 0
        socket.ipv6 = True
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = _PROBE_S
        socket.tcp_keepalive_cnt = _PROBES
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        monitor = socket.get_monitor_socket(events)

        def watch() -> None:
            while not closing.is_set():
                if monitor.poll(_POLL_MS):
                    on_lost(f"the connection to the notebook ({url}) was lost; the engine here is ended.")
                    return

        thread = threading.Thread(target=watch, name="distnb-heartbeat", daemon=True)
        try:
            socket.connect(url)
            if not monitor.poll(1000 * _CONNECT_S):
                raise StartError(
                    f"The notebook cannot be reached from here: {url} did not answer within {_CONNECT_S} s. "
                    "Check for a firewall, or name the right network of the notebook's machine by interface=."
                )
            if recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                raise StartError(
                    f"The notebook at {url} refused this machine's keys, so it is another notebook. Start the cluster "
                    "again."
                )
            thread.start()
            yield
        finally:
            closing.set()
            if thread.ident is not None:
                thread.join()
            socket.disable_monitor()
            monitor.close()
