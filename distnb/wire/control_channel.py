"""The channel for control between the notebook and its engines: orders one way, events the other.

The notebook binds a ROUTER of ZeroMQ, and every engine connects a DEALER. An engine that stays when its notebook ends
makes a new DEALER, so that the next notebook does not get what the last one did not read. ZeroMQ closes the old one
later, and may connect it once more before:

    engine 3, old DEALER "3.51ab" ── connects again, and ends ──▶ ROUTER of the next notebook
              new DEALER "3.e07c" ── Hello, events ─────────────▶

If both had one name, the ROUTER would give it to the one that arrives last, and lose the other. So each has a name of
its own, which begins with the engine's number. The latest that has sent a `Hello` is the engine's connection, and
messages of others are dropped.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import zmq

from distnb.wire.channel import Link, arrived, send_frames
from distnb.wire.codec import decode, encode
from distnb.wire.messages import Hello

__all__ = ["ControlChannel", "ControlLink"]


class ControlChannel:
    """The notebook's end. Only the supervisor's thread uses it.

    Args:
        socket: The bound ROUTER.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._names: dict[int, bytes] = {}  # of each engine's connection

    def receive(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the batches of events that have arrived, each with the engine's number, without blocking.

        Raises:
            MessageError: A message cannot be read.
        """
        for name, frames in arrived(self.socket):
            number = name.partition(b".")[0]
            if not number.isdigit():
                continue  # a machine agent connects to see when the notebook ends, and sends nothing
            engine, batch = int(number), decode(frames)
            if self._names.get(engine) != name:
                if not any(isinstance(event, Hello) for event in batch):
                    continue
                self._names[engine] = name
            yield engine, batch

    def send(self, engine: int, order: Any) -> bool:
        """Send an order to an engine. Return False if it is not connected."""
        name = self._names.get(engine)
        return name is not None and send_frames(self.socket, name, encode(order))


class ControlLink(Link):
    """An engine's end. Its first message contains a `Hello`. The arguments are those of `Link`."""

    def __init__(self, context: zmq.Context[Any], engine: int, url: str, **options: Any) -> None:
        name = b"%d.%s" % (engine, secrets.token_hex(4).encode())
        super().__init__(context, engine, url, name=name, **options)
