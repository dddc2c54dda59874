"""The notebook's end of the way of programs: a passage to each engine of its host, ZeroMQ to all others."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import zmq

from distnb.errors import StartError
from distnb.wire.codec import decode, encode
from distnb.wire.listener import Listener
from distnb.wire.messages import Hello
from distnb.wire.unix_socket import Packet, UnixSocket, pack
from distnb.wire.zmq_sockets import has_message, receive_from, send_frames_to

__all__ = ["Programs"]


class Programs:
    """Sends programs, and receives replies. Not for several threads at once.

    Args:
        far: A bound ROUTER for engines of other hosts; closed with this.

    Attributes:
        harbour: Where engines of this host come for a passage.
    """

    def __init__(self, far: zmq.Socket[bytes]) -> None:
        self.harbour = Listener()
        self._far = far
        self._has_far = False
        self._passages: dict[int, UnixSocket] = {}
        self._engine_at: dict[int, int] = {}  # by the passage's descriptor
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def watch(self, descriptor: int) -> None:
        """Let `wait` return when this descriptor is readable, too."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def meet(self, hellos: Iterable[Hello]) -> None:
        """Engines have come up, and said hello on the other channel.

        Raises:
            StartError: There is no passage to one of this host.
        """
        try:
            newcomers = self.harbour.let_in()
        except OSError as error:
            raise StartError(
                f"The notebook cannot open a connection to its engines ({os.strerror(error.errno or 0)}). Close files, "
                "or allow it more (ulimit -n), and start them again."
            ) from error
        for engine, passage in newcomers.items():
            self._lose(engine)
            self._passages[engine] = passage
            self._engine_at[passage.fileno()] = engine
            passage.hand_over(self._bell)
            self._epoll.register(passage.fileno(), select.EPOLLIN)
        for hello in hellos:
            if hello.near and hello.engine not in self._passages:
                raise StartError(f"Engine {hello.engine} came to the notebook by a UNIX socket and was not recognised.")
            if not hello.near and not self._has_far:
                self._has_far = True
                self.watch(int(self._far.fileno()))

    def _lose(self, engine: int) -> None:
        passage = self._passages.pop(engine, None)
        if passage is not None:
            del self._engine_at[passage.fileno()]
            self._epoll.unregister(passage.fileno())
            passage.close()

    def send(self, engines: Iterable[int], message: Any) -> list[int]:
        """Send a message to engines, copied: what it refers to may change when this returns.

        Args:
            engines: Their ids.
            message: What an engine's `receive` gives.

        Returns:
            The engines that are not connected.

        Raises:
            zmq.ZMQError: This was closed.
        """
        frames = encode(message)
        packets: Sequence[Packet] = ()
        unreached = []
        try:
            for engine in engines:
                passage = self._passages.get(engine)
                if passage is None:
                    reached = send_frames_to(self._far, engine, frames)
                else:
                    packets = packets or pack(frames)
                    reached = passage.send(packets)
                if not reached:
                    unreached.append(engine)
        finally:  # whoever was sent something must wake up, whatever became of the others
            if packets:
                os.eventfd_write(self._bell, 1)
        return unreached

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Wait until something has come. For so long at most, if a time is given.

        Returns:
            The descriptors that are readable, for `receive`, those that are watched among them.
        """
        if self._has_far and has_message(self._far):
            return []  # its descriptor tells of what comes after it was last found empty
        return [descriptor for descriptor, _ in self._epoll.poll(timeout_s)]

    def receive(self, readable: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """What has come: of each engine of this host one message, the next, and all of others. Never blocks.

        Args:
            readable: What `wait` returned.

        Raises:
            MessageError: One cannot be read.
        """
        for descriptor in readable:
            engine = self._engine_at.get(descriptor)
            if engine is None:
                continue
            passage = self._passages[engine]
            frames = passage.receive()
            if frames is not None:
                yield engine, decode(frames)
            elif passage.ended:
                self._lose(engine)  # the process has ended, and those who follow processes tell so
        if self._has_far:
            yield from receive_from(self._far)

    def close(self) -> None:
        """Close all. What waits is dropped."""
        self.harbour.close()
        for engine in list(self._passages):
            self._lose(engine)
        self._epoll.close()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1  # the number is somebody else's from now on
        self._far.close()
