"""`python -m distnb.cluster.remote.calling ADDRESS SECRET_FILE TASK`: has a server run a keeper, as ssh would.

What comes on standard input goes to the keeper, what the keeper writes comes back, and the exit status is the
keeper's; 255 when the server is not reached, or not any more. Everything is encrypted by keys that both ends make of
their secret. Both ends say now and then that they are there: neither ever computes, so silence means a lost machine.
A server that ends is known at once, by the end of the connection.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from distnb.cluster.remote.heartbeat import LOST_AFTER_S
from distnb.cluster.remote.secret import read_secret
from distnb.errors import StartError

__all__ = [
    "BEAT",
    "BEAT_S",
    "END",
    "ERROR",
    "INPUT",
    "LOST",
    "OUTPUT",
    "START",
    "SILENCE_S",
    "STATUS",
    "Silence",
    "main",
]

START: Final = b"start"
INPUT: Final = b"input"
END: Final = b"end"
BEAT: Final = b"beat"
OUTPUT: Final = b"output"
ERROR: Final = b"error"
STATUS: Final = b"status"
LOST: Final = 255
"""The exit status when it is the connection that failed, or the server; ssh's own choice."""

BEAT_S = 1.0
SILENCE_S = LOST_AFTER_S
_CONNECT_S = 10.0
_CHUNK = 1 << 16


class Silence:
    """How long nothing was heard from the other end, by somebody who listens at least once in `BEAT_S`.

    Args:
        clock: Gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.over()

    def over(self) -> None:
        """Something was heard."""
        self._seconds, self._looked = 0.0, self._clock()

    def seconds(self) -> float:
        """To be asked each time that was listened. Time in which this process stood still itself tells nothing."""
        now = self._clock()
        self._seconds += min(now - self._looked, BEAT_S)
        self._looked = now
        return self._seconds


class _Call:
    """One call.

    Args:
        address: The server's, host:port.
        secret: The secret file.
        task: What the keeper does.
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
        self._socket.linger = 500
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"tcp://{address}")
        self._socket.send_multipart([START, task.encode()])
        self._silence = Silence()
        self._answered = False

    def run(self) -> int:
        """Until the keeper has ended, or the server is lost. Returns the exit status."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(0, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        next_beat = 0.0
        while True:
            ready = dict(poller.poll(int(1000 * BEAT_S / 2)))
            if 0 in ready:
                data = os.read(0, _CHUNK)
                self._socket.send_multipart([INPUT, data] if data else [END])
                if not data:
                    poller.unregister(0)
            # Before what came last is read: a server that ends in order says the keeper's status first.
            ended = self._monitor in ready and self._connection_ended()
            while self._socket.poll(0):
                status = self._take(self._socket.recv_multipart())
                if status is not None:
                    return status
            if ended:
                print(f"The server at {self._address} has ended the connection.", file=sys.stderr, flush=True)
                return LOST
            now = time.monotonic()
            if now >= next_beat:
                self._socket.send_multipart([BEAT])
                next_beat = now + BEAT_S
            if self._silence.seconds() > (SILENCE_S if self._answered else _CONNECT_S):
                return self._give_up()

    def _connection_ended(self) -> bool:
        """Whether the connection that was there is no more. One that never was is tried again."""
        recv_monitor_message(self._monitor)
        return self._answered

    def _take(self, frames: list[bytes]) -> int | None:
        self._silence.over()
        self._answered = True
        kind, rest = frames[0], frames[1:]
        if kind in (OUTPUT, ERROR):
            left = memoryview(rest[0])
            while left:
                left = left[os.write(1 if kind == OUTPUT else 2, left) :]
        return int(rest[0]) if kind == STATUS else None

    def _give_up(self) -> int:
        what = "has not been heard of for" if self._answered else "did not answer within"
        cause = "" if self._answered else " Does it run there, with the same secret?"
        limit = SILENCE_S if self._answered else _CONNECT_S
        print(f"The server at {self._address} {what} {limit:.0f} s.{cause}", file=sys.stderr, flush=True)
        return LOST


def main(address: str, secret: str, task: str) -> int:
    """Call; returns the exit status."""
    try:
        return _Call(address, Path(secret), task).run()
    except (StartError, zmq.ZMQError) as error:
        print(error, file=sys.stderr, flush=True)
        return LOST


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
