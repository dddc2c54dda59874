"""The connection by which a machine with engines knows that the notebook's machine is there.

It belongs to a process that never computes, and its other end is the notebook's control channel: authenticated, and
encrypted like everything there. Nothing is said on it. The kernel's probes find out when the other machine cannot be
reached any more; no program has to answer them, so neither a busy notebook nor one that is suspended is taken for lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq
from zmq.utils.monitor import recv_monitor_message

from distnb.cluster.connection import Connection
from distnb.errors import StartError

__all__ = ["LOST", "LOST_AFTER_S", "heartbeat"]

LOST = 255
"""The exit status of a process here whose node agent is not reached, or not any more; ssh's own choice."""

_PROBE_S = 2
_PROBES = 3
LOST_AFTER_S = _PROBE_S * (_PROBES + 1)
"""After so long without a sign of the other machine the connection is given up."""

_CONNECT_S = 30
_LOOK_MS = 200


@contextmanager
def heartbeat(connection: Connection, on_lost: Callable[[str], None]) -> Iterator[None]:
    """Watch the notebook from a thread, which calls `on_lost` once, with the reason.

    Raises:
        StartError: On entering, when the notebook cannot be reached.
    """
    url = connection.control_url
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
                if monitor.poll(_LOOK_MS):
                    on_lost(f"the connection to the notebook ({url}) was lost; the engine here is ended.")
                    return

        thread = threading.Thread(target=watch, name="distnb-heartbeat", daemon=True)
        try:
            socket.connect(url)
            if not monitor.poll(1000 * _CONNECT_S):
                raise StartError(
                    f"The notebook cannot be reached from here: nobody answered at {url} within {_CONNECT_S} s. "
                    "Is there a firewall between, or is it the wrong network? interface= names the notebook's."
                )
            if recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                raise StartError(f"The notebook at {url} did not let this machine in: it is another one.")
            thread.start()
            yield
        finally:
            closing.set()
            if thread.ident is not None:
                thread.join()
            socket.disable_monitor()
            monitor.close()
