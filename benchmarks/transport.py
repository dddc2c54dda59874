"""Messages to 2 processes of one host and back: our UNIX sockets and shared memory against ZeroMQ, in one run.

    python -m benchmarks.transport [--rounds 15] [--calls 64] [--megabytes 64]

Both send the frames of `codec.encode` for one message of 1 KB, and wait for other descriptors as well (as the notebook
does). Processes echo it that read it as an engine's agent does: from tornado's loop, and for a millisecond after each
message without the loop. Large: an array goes to both, which touch each page and answer with a number. "no copy" lets
ZeroMQ send the sender's own memory, which must not change meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import zmq
from tornado.ioloop import IOLoop

from benchmarks.guard import TARGETS
from benchmarks.harness import Measure, compare, report, timed
from distnb.wire.channel import Link, ProgramLink, Programs
from distnb.wire.codec import Frame, decode, encode
from distnb.wire.messages import Hello
from distnb.wire.unix_socket import Listener, connect

OURS, IPC = "UNIX socket", "ZMQ ipc"
SHARED, COPIED, UNCOPIED = "shared memory", "ZMQ ipc, copied", "ZMQ ipc, no copy"
ENGINES = (0, 1)
LINGER_MS = 1
POLLIN = int(zmq.POLLIN)


# -- an engine ---------------------------------------------------------------------------------------------------------


class IpcLink(Link):
    """A DEALER that also lingers.

    Args:
        url: The address of the notebook.
        engine: The engine's id.
    """

    def __init__(self, url: str, engine: int) -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        self.socket = context.socket(zmq.DEALER)
        self.socket.identity = b"%d" % engine
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.connect(url)

    def receive(self, linger_ms: int = 0) -> Any:
        """Return the next message, or None if there is none within `linger_ms`."""
        if zmq.zmq_poll([(self.socket, POLLIN)], linger_ms):
            return decode(frames_of(self.socket))
        return None

    def send(self, message: Any) -> None:
        """Send a message, copied."""
        self.socket.send_multipart(encode(message))


def frames_of(socket: zmq.Socket[bytes]) -> list[Frame]:
    """Receive frames as `receive` does. A frame object for the header alone would cost more than its copy."""
    frames: list[Frame] = [socket.recv()]
    while socket.get(zmq.RCVMORE):
        frames.append(socket.recv(copy=False).buffer)
    return frames


async def echo(link: ProgramLink) -> None:
    """Answer messages as the agent does, until None comes."""
    end = asyncio.Event()

    def serve(*event: Any) -> None:
        served = False
        while (message := link.receive(LINGER_MS if served else 0)) is not None:
            served = True
            if isinstance(message, np.ndarray):
                message = int(message[::4096].sum())
            elif message == "end":
                end.set()
                return
            link.send(message)

    loop = IOLoop.current()
    loop.add_handler(link.fileno(), serve, loop.READ)
    link.send("hello")
    print("connected", flush=True)
    loop.add_callback(serve)
    await end.wait()


def act_as_engine() -> None:
    """Run an engine's process. Its settings come by standard input."""
    settings = json.loads(sys.stdin.readline())
    if settings["kind"] == OURS:
        asyncio.run(echo(connect(settings["path"], settings["engine"])))
    else:
        asyncio.run(echo(IpcLink(settings["url"], settings["engine"])))


@contextlib.contextmanager
def engines(**settings: Any) -> Iterator[None]:
    """Start two engines, which end by themselves."""
    command = [sys.executable, "-m", "benchmarks.transport", "--engine"]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in ENGINES]
    for engine, process in zip(ENGINES, processes, strict=True):
        assert process.stdin is not None
        process.stdin.write(json.dumps({**settings, "engine": engine}) + "\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    yield
    for process in processes:
        process.wait(10)


# -- the notebook ------------------------------------------------------------------------------------------------------


class Ways:
    """A contender, by its ways to send and receive.

    Args:
        send: Sends a message to both engines.
        collect: Waits for a number of messages.
    """

    def __init__(self, send: Callable[[Any], object], collect: Callable[[int], None]) -> None:
        self.send = send
        self.collect = collect

    def call(self, message: Any) -> None:
        """Send a message to the engines, and wait for the answers."""
        self.send(message)
        self.collect(len(ENGINES))

    def pipelined(self, message: Any, calls: int) -> Measure:
        """Return a measure of one of several messages, which are all sent before the first answer is read."""

        def run() -> None:
            for _ in range(calls):
                self.send(message)
            self.collect(calls * len(ENGINES))

        measure = timed(run)
        return lambda: measure() / calls


def collector(programs: Programs) -> Callable[[int], None]:
    """Return a function that waits for messages as the session does."""

    def collect(count: int) -> None:
        while count > 0:
            count -= sum(1 for _ in programs.receive(programs.wait()))

    return collect


def hellos() -> list[Hello]:
    """Return the first messages of the engines."""
    return [Hello(engine, 0, "") for engine in ENGINES]


@contextlib.contextmanager
def ours(directory: str) -> Iterator[Ways]:
    """Provide our own sockets, unchanged."""
    listener = Listener(directory)
    programs = Programs(listener=listener)
    with engines(kind=OURS, path=listener.path):
        programs.meet(hellos())
        ways = Ways(lambda message: programs.send(ENGINES, message), collector(programs))
        ways.collect(len(ENGINES))
        yield ways
        programs.send(ENGINES, "end")
    programs.close()


@contextlib.contextmanager
def ipc(directory: str, *, copy: bool = True) -> Iterator[Ways]:
    """Provide ZeroMQ's ipc in a private directory."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 0
    socket.router_mandatory = True
    url = f"ipc://{directory}/programs-{copy}"
    socket.bind(url)
    also = [os.eventfd(0), os.eventfd(0)]  # for lost engines and interrupts, on which the session waits, too
    waited = [(socket, POLLIN), *((descriptor, POLLIN) for descriptor in also)]

    def send(message: Any) -> None:
        frames = encode(message)
        for engine in ENGINES:
            socket.send_multipart([b"%d" % engine, *frames], copy=copy)

    def collect(count: int) -> None:
        while count > 0:
            zmq.zmq_poll(waited, -1)
            while zmq.zmq_poll(waited[:1], 0):
                socket.recv()
                decode(frames_of(socket))
                count -= 1

    with engines(kind=IPC, url=url):
        ways = Ways(send, collect)
        ways.collect(len(ENGINES))
        yield ways
        send("end")
    for descriptor in also:
        os.close(descriptor)
    socket.close()
    context.term()


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        act_as_engine()
        return 0

    message = {"program": 1, "text": "x" * 500, "args": tuple(range(100)), "data": os.urandom(250)}
    array = np.ones(options.megabytes << 20, np.uint8)
    rounds, calls = options.rounds, options.calls
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        makers = {
            OURS: ours(directory),
            IPC: ipc(directory),
        }
        ways = {name: stack.enter_context(maker) for name, maker in makers.items()}
        there_and_back = {name: timed(partial(way.call, message), calls) for name, way in ways.items()}
        round_trip = compare(there_and_back, rounds=rounds)
        pipelined = compare({name: way.pipelined(message, calls) for name, way in ways.items()}, rounds=rounds)
        large = {
            SHARED: ways[OURS],
            COPIED: ways[IPC],
            UNCOPIED: stack.enter_context(ipc(directory, copy=False)),
        }
        sent = compare({name: timed(partial(way.call, array)) for name, way in large.items()}, rounds=rounds)
    title = f"{len(pickle.dumps(message))} bytes to 2 processes"
    targets = TARGETS["transport"]
    met = report(f"{title} and back", round_trip, baseline=OURS, targets=targets["small"])
    in_flight = f"{title}, {calls} in flight, per call"
    met &= report(in_flight, pipelined, baseline=OURS, targets=targets["in flight"])
    met &= report(f"{options.megabytes} MB to 2 processes", sent, baseline=SHARED, targets=targets["large"])
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
