"""The least that a round trip to 2 processes can cost here: ROUTER and DEALER on loopback, pickle, nothing else."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import zmq

__all__ = ["BareZmq", "nothing"]


def nothing() -> None:
    """What is called: the way there and back is what is measured."""


def _serve(url: str) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(url)
    socket.send(b"hello")
    while request := socket.recv():
        function, args = pickle.loads(request)
        socket.send(pickle.dumps(function(*args)))


class BareZmq:
    """Two workers that call what they are sent.

    Args:
        n: How many workers.
    """

    def __init__(self, n: int = 2) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        command = [sys.executable, "-m", "benchmarks.bare_zmq", f"tcp://127.0.0.1:{port}"]
        self._processes = [subprocess.Popen(command) for _ in range(n)]
        self._peers: list[bytes] = [self._socket.recv_multipart()[0] for _ in range(n)]

    def __enter__(self) -> BareZmq:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self._peers:
            self._socket.send_multipart([peer, b""])
        for process in self._processes:
            process.wait(10)
        self._socket.close(0)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call it on each worker and wait for all answers."""
        self.send(function, *args)
        return self.collect(1)

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Call it on each worker, not waiting."""
        request = pickle.dumps((function, args))
        for peer in self._peers:
            self._socket.send_multipart([peer, request])

    def collect(self, calls: int) -> list[Any]:
        """The answers to so many calls."""
        return [pickle.loads(self._socket.recv_multipart()[1]) for _ in range(calls * len(self._peers))]


if __name__ == "__main__":
    _serve(sys.argv[1])
