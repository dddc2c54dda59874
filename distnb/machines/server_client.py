"""`python -m distnb.machines.server_client ADDRESS SECRET_FILE`: asks a server to run a machine agent.

This program corresponds to ssh, and the server to sshd. It forwards its standard input to the machine agent, and the
agent's output to its own. The exit status is the agent's, or 255 if the server cannot be reached or is lost. All
messages are encrypted with keys that both ends derive from their secret.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from distnb.cluster.connection import Keys, make_client
from distnb.errors import OptionError, StartError
from distnb.machines.secret import read_secret
from distnb.machines.transport import LOST

__all__ = ["ALIVE", "ERROR", "INPUT", "OUTPUT", "START", "STATUS", "connect_patience_s", "main"]

START: Final = b"start"
INPUT: Final = b"input"
"""What the agent reads; an empty message is its end."""

OUTPUT: Final = b"output"
ERROR: Final = b"error"
STATUS: Final = b"status"
ALIVE: Final = b"alive"
"""An empty message to the client. If the server cannot send it, the client has ended."""

_VARIABLE = "DISTNB_START_TIMEOUT"
"""The environment variable with the seconds to wait for a server that does not listen yet."""

_USUAL_PATIENCE_S = 60.0
_HANDSHAKE_S = 10.0
_CHUNK = 1 << 16


def connect_patience_s() -> float:
    """Return the seconds to wait for a server that does not listen yet. Raises OptionError if they are invalid."""
    text = os.environ.get(_VARIABLE, "")
    try:
        patience_s = float(text or _USUAL_PATIENCE_S)
    except ValueError:
        patience_s = -1.0
    if not 0 < patience_s < float("inf"):
        raise OptionError(f"{_VARIABLE}={text!r} is not a time. Give the seconds to wait for a server, such as 60.")
    return patience_s


def _connect(socket: zmq.Socket[bytes], address: str, keys: Keys) -> zmq.Socket[bytes]:
    """Connect to a server. Return the monitor, which reports the beginning and the end of the connection."""
    socket.ipv6 = True
    make_client(socket, keys)
    socket.linger = 500
    monitor: zmq.Socket[bytes] = socket.get_monitor_socket(
        zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    )
    socket.connect(f"tcp://{address}")
    return monitor


def _forward(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> int | str:
    """Forward input and output. Return the machine agent's exit status, or the reason why the server is lost."""
    poller = zmq.Poller()
    for source in (socket, 0, monitor):
        poller.register(source, zmq.POLLIN)
    connected = ended = False
    patience_s = connect_patience_s()
    deadline = time.monotonic() + patience_s
    while not ended:
        ready = dict(poller.poll(None if connected else max(0, int(1000 * (deadline - time.monotonic())))))
        if 0 in ready:
            data = os.read(0, _CHUNK)
            socket.send_multipart([INPUT, data])
            if not data:
                poller.unregister(0)
        # Read the monitor before the messages: a server that stops sends the machine agent's status, then disconnects.
        if monitor in ready:
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                if patience_s > _HANDSHAKE_S:  # the right server answers a handshake at once
                    patience_s, deadline = _HANDSHAKE_S, min(deadline, time.monotonic() + _HANDSHAKE_S)
            else:
                begins = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                ended, connected = connected and not begins, connected or begins  # ZeroMQ repeats a failed attempt
        while socket.poll(0):
            kind, *rest = socket.recv_multipart()
            if kind == STATUS:
                return int(rest[0])
            if kind in (OUTPUT, ERROR):
                unwritten = memoryview(rest[0])
                while unwritten:
                    unwritten = unwritten[os.write(1 if kind == OUTPUT else 2, unwritten) :]
        if not connected and time.monotonic() > deadline:
            return f"did not answer within {patience_s:.0f} s. Does it run there, with the same secret?"
    return "ended the connection, or can no longer be reached"


def main(address: str, secret: str) -> int:
    """Have the server run a machine agent, and return the machine agent's exit status."""
    try:
        keys = read_secret(Path(secret))
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket, _connect(socket, address, keys) as monitor:
            socket.send(START)
            how = _forward(socket, monitor)
    except (StartError, zmq.ZMQError) as error:
        print(error, file=sys.stderr, flush=True)
        return LOST
    if isinstance(how, int):
        return how
    print(f"The server at {address} {how}", file=sys.stderr, flush=True)
    return LOST


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
