"""`python -m distnb.cluster.remote.server_client ADDRESS SECRET_FILE TASK`: has a server run a node agent.

It takes the place of ssh, as the server takes that of sshd. What comes on standard input goes to the node agent, what
that writes comes back, and the exit status is the node agent's; 255 when the server is not reached, or not any more.
Everything is encrypted by keys that both ends make of their secret. Neither end ever computes, so when ZeroMQ's
heartbeats get no answer, the other machine is lost.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from distnb.cluster.remote.heartbeat import LOST, LOST_AFTER_S
from distnb.cluster.remote.secret import read_secret
from distnb.errors import StartError

__all__ = ["ALIVE", "END", "ERROR", "INPUT", "OUTPUT", "START", "STATUS", "main"]

START: Final = b"start"
INPUT: Final = b"input"
END: Final = b"end"
OUTPUT: Final = b"output"
ERROR: Final = b"error"
STATUS: Final = b"status"
ALIVE: Final = b"alive"
"""Asks for nothing: that it cannot be sent tells the server that its client is gone."""

_CONNECT_S = 10.0
_PING_MS = 1000
_CHUNK = 1 << 16


class _Client:
    """The connection with one node agent.

    Args:
        address: The server's, host:port.
        secret: The secret file.
        task: What the node agent does.
    """

    def __init__(self, address: str, secret: Path, task: str) -> None:
        keys = read_secret(secret)
        self._address = address
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.ipv6 = True
        self._socket.curve_serverkey = keys.server_public.encode()
        self._socket.curve_publickey = keys.client_public.encode()
        self._socket.curve_secretkey = keys.client_secret.encode()
        self._socket.heartbeat_ivl = _PING_MS
        self._socket.heartbeat_timeout = self._socket.heartbeat_ttl = int(1000 * LOST_AFTER_S)  # here, and there
        self._socket.linger = 500
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._connected = False
        self._socket.connect(f"tcp://{address}")
        self._socket.send_multipart([START, task.encode()])

    def run(self) -> int:
        """Until the node agent has ended, or the server is lost. Returns the exit status."""
        poller = zmq.Poller()
        for source in (self._socket, 0, self._monitor):
            poller.register(source, zmq.POLLIN)
        deadline = time.monotonic() + _CONNECT_S
        while True:
            ready = dict(poller.poll(None if self._connected else max(0, int(1000 * (deadline - time.monotonic())))))
            if 0 in ready:
                data = os.read(0, _CHUNK)
                self._socket.send_multipart([INPUT, data] if data else [END])
                if not data:
                    poller.unregister(0)
            # Before what came last is read: a server that ends in order says the node agent's status first.
            ended = self._monitor in ready and self._connection_ended()
            while self._socket.poll(0):
                status = _take(self._socket.recv_multipart())
                if status is not None:
                    return status
            if ended:
                return self._lost("ended the connection, or is not reached any more")
            if not self._connected and time.monotonic() > deadline:
                return self._lost(f"did not answer within {_CONNECT_S:.0f} s. Does it run there, with the same secret?")

    def _connection_ended(self) -> bool:
        """Whether the connection that was there is no more. One that never was is tried again."""
        was_connected = self._connected
        if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected = True
            return False
        return was_connected

    def _lost(self, how: str) -> int:
        print(f"The server at {self._address} {how}", file=sys.stderr, flush=True)
        return LOST


def _take(frames: list[bytes]) -> int | None:
    """Write on what the node agent has written; its exit status if it has ended."""
    kind, *rest = frames
    if kind in (OUTPUT, ERROR):
        left = memoryview(rest[0])
        while left:
            left = left[os.write(1 if kind == OUTPUT else 2, left) :]
    return int(rest[0]) if kind == STATUS else None


def main(address: str, secret: str, task: str) -> int:
    """Do it; returns the exit status."""
    try:
        return _Client(address, Path(secret), task).run()
    except (StartError, zmq.ZMQError) as error:
        print(error, file=sys.stderr, flush=True)
        return LOST


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
