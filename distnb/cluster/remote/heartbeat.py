"""The connection by which a machine with engines knows that the notebook's machine is there.

It belongs to a process that never computes, and its other end is the notebook's control channel: authenticated, and
encrypted like everything there. Nothing is said on it. The kernel's probes find out when the other machine cannot be
reached any more; no program has to answer them, so neither a busy notebook nor one that is suspended is taken for lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from distnb.cluster.connection import Connection
from distnb.errors import StartError

__all__ = ["LOST", "LOST_AFTER_S", "Heartbeat"]

LOST = 255
"""The exit status of a process here whose node agent is not reached, or not any more; ssh's own choice."""

_PROBE_S = 2
_PROBES = 3
LOST_AFTER_S = _PROBE_S * (_PROBES + 1)
"""After so long without a sign of the other machine the connection is given up."""

_CONNECT_S = 30.0
_LOOK_MS = 200


class Heartbeat:
    """A context in which the notebook is watched from a thread of its own.

    Args:
        connection: Where the notebook listens, and the keys.
        on_lost: Called once, with the reason, in that thread.

    Raises:
        StartError: On entering, when the notebook cannot be reached.
    """

    def __init__(self, connection: Connection, on_lost: Callable[[str], None]) -> None:
        self._url = connection.control_url
        self._on_lost = on_lost
        self._closing = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = connection.server_public.encode()
        self._socket.curve_publickey = connection.client_public.encode()
        self._socket.curve_secretkey = connection.client_secret.encode()
        self._socket.linger = 0
        self._socket.ipv6 = True
        self._socket.tcp_keepalive = 1
        self._socket.tcp_keepalive_idle = self._socket.tcp_keepalive_intvl = _PROBE_S
        self._socket.tcp_keepalive_cnt = _PROBES
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        self._thread = threading.Thread(target=self._watch, name="distnb-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._socket.connect(self._url)
        event = self._next_event(_CONNECT_S)
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._close()
            if event is not None:
                raise StartError(f"The notebook at {self._url} did not let this machine in: it is another one.")
            raise StartError(
                f"The notebook cannot be reached from here: nobody answered at {self._url} within {_CONNECT_S:.0f} s. "
                "Is there a firewall between, or is it the wrong network? interface= names the notebook's."
            )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._thread.join()
        self._close()

    def _next_event(self, timeout_s: float) -> int | None:
        if not self._monitor.poll(int(1000 * timeout_s)):
            return None
        return int(recv_monitor_message(self._monitor)["event"])

    def _watch(self) -> None:
        while not self._closing:
            if self._next_event(_LOOK_MS / 1000) is not None:
                self._on_lost(f"the connection to the notebook ({self._url}) was lost; the engine here is ended.")
                return

    def _close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()
        self._context.destroy(linger=0)
