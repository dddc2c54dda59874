"""The connection by which a machine with engines detects the loss of the notebook's machine.

The connection belongs to a process that never computes. Its other end is a `HeartbeatListener` of the notebook or of a
detached cluster's daemon, so it is authenticated and encrypted. No messages are sent on it. The kernel's keep-alive
probes detect that the other machine can no longer be reached. The other machine's kernel answers them, so a busy or
suspended notebook is not mistaken for a lost one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq
from zmq.utils.monitor import recv_monitor_message

from distnb.cluster.connection import Connection, Keys, make_client
from distnb.cluster.local.launcher import LOST_AFTER_S
from distnb.errors import StartError

__all__ = ["heartbeat"]

_PROBE_S = 2
_PROBES = int(LOST_AFTER_S / _PROBE_S) - 1

_CONNECT_S = 30
_POLL_MS = 200


@contextmanager
def heartbeat(url: str, keys: Keys | Connection, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Watch the notebook from a thread, which calls `on_lost` once with the reason.

    Raises:
        StartError: On entering, if the notebook cannot be reached.
    """
    closing = threading.Event()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        make_client(socket, keys)
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
                    on_lost(f"the connection to the notebook ({url}) was lost; its engines here are ended.")
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
