"""Messages as frames on ZeroMQ's sockets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import zmq

from distnb.wire.codec import Frame, decode, encode

__all__ = ["has_message", "receive", "receive_from", "send", "send_frames_to", "send_to"]

# As plain numbers: combining members of an enumeration costs as much as sending.
_POLLIN, _SNDMORE = int(zmq.POLLIN), int(zmq.SNDMORE)


def send(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send a message, copied: what it refers to may change when this returns."""
    for frame in frames[:-1]:
        socket.send(frame, _SNDMORE)
    socket.send(frames[-1])


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether `receive` will find one."""
    # Trying to receive would do, but the exception that says "nothing" costs as much as a message.
    return bool(zmq.zmq_poll([(socket, _POLLIN)], 0))


def receive(socket: zmq.Socket[bytes]) -> list[Frame]:
    """The rest of a message: its header, and its buffers without a copy."""
    frame = socket.recv(copy=False)
    frames: list[Frame] = [frame.bytes]
    while frame.more:
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
    return frames


# -- of the notebook: a ROUTER that knows engines by their ids -----------------------------------------------------


def send_to(socket: zmq.Socket[bytes], engines: Iterable[int], message: Any) -> list[int]:
    """Send a message to engines, copied.

    Returns:
        The engines that are not connected.

    Raises:
        zmq.ZMQError: The socket is closed.
    """
    frames = encode(message)
    return [engine for engine in engines if not send_frames_to(socket, engine, frames)]


def send_frames_to(socket: zmq.Socket[bytes], engine: int, frames: Sequence[Frame]) -> bool:
    """Send a message to an engine, copied. False if it is not connected.

    Raises:
        zmq.ZMQError: The socket is closed.
    """
    try:
        send(socket, [b"%d" % engine, *frames])
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


def receive_from(socket: zmq.Socket[bytes]) -> Iterator[tuple[int, Any]]:
    """All messages that have arrived, each with the id of its engine. Never blocks."""
    while has_message(socket):
        name = socket.recv()
        frames = receive(socket)
        if name.isdigit():  # else it was said by a process whose place another has taken, and its name
            yield int(name), decode(frames)
