"""What the notebook sends to its engines' main threads: repeated calls that nobody waits for leave together.

A message to each engine, and a reply from it, cost several times what a small call costs. So calls that are repeated
while others are under way wait for those that follow, a moment at most, and are one message, which stands for them all.
Whatever else is sent goes after them.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import zmq

from distnb.wire.bindings import Repeat
from distnb.wire.messages import CallFunction
from distnb.wire.programs import Programs
from distnb.wire.shorthand import CallWriter

__all__ = ["Outgoing"]

_MOST_TOGETHER = 16
_PATIENCE_S = 0.002
_QUIET_PERIODS = 50


class Outgoing:
    """The way to the engines. Its methods are called by whoever has the turn, with SIGINT held back.

    A thread sends what has waited for long enough. It uses the way only while a call waits, and under the lock;
    who has called `flush` can use it, to receive too.

    Args:
        programs: The way to the engines.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._writer = CallWriter()
        self._lock = threading.Lock()
        self._engines: tuple[int, ...] = ()
        self._count = 0
        self._waiting: CallFunction | None = None  # the first of so many calls
        self._some = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def send(self, engines: tuple[int, ...], message: Any) -> None:
        """Send a message now, after what waits."""
        self.flush()
        self._programs.send(engines, self._writer.write(message))

    def keep(self, engines: tuple[int, ...], message: CallFunction) -> bool:
        """Let a call wait for those that follow. False if it cannot: it is to be sent."""
        delivery = message.delivery
        if type(delivery) is not Repeat:
            return False
        with self._lock:
            first = self._waiting
            if first is None:
                self._engines, self._count, self._waiting = engines, 1, message
            elif self._count < _MOST_TOGETHER and _follows(first, self._count, message) and engines == self._engines:
                self._count += 1
            else:
                return False
        if not self._some.is_set():  # on most calls it is
            self._watch()
        return True

    def flush(self) -> None:
        """Send what waits."""
        if self._waiting is None:
            return  # and nobody is about to send it: it is forgotten only then
        with self._lock:
            self._send_waiting()

    def forget(self) -> None:
        """What the engines keep of earlier messages is not certain any more."""
        self._writer = CallWriter()

    def close(self) -> None:
        """End the thread. Nothing is sent any more."""
        with self._lock:
            self._closed, self._waiting = True, None
        if self._thread is not None:
            self._some.set()
            self._thread.join(5)

    def _send_waiting(self) -> None:
        message = self._waiting
        if message is not None:
            message = replace(message, delivery=message.delivery._replace(calls=self._count))
            self._programs.send(self._engines, self._writer.write(message))
            self._waiting = None

    # -- the thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_late, name="distnb-outgoing", daemon=True)
            self._thread.start()
        self._some.set()

    def _send_late(self) -> None:
        quiet = 0
        while not self._closed:
            self._some.wait()
            time.sleep(_PATIENCE_S)
            with self._lock:
                quiet = 0 if self._waiting is not None else quiet + 1
                with suppress(zmq.ZMQError):  # what it is, is raised where somebody waits for the calls
                    self._send_waiting()
                if quiet > _QUIET_PERIODS:
                    # Not after each: to be woken costs the other thread as much as a call.
                    quiet = 0
                    self._some.clear()


def _follows(first: CallFunction, count: int, message: CallFunction) -> bool:
    """Whether a call is the one again that `count` calls began with, and the next."""
    before, this = first.delivery, message.delivery
    return (
        message.program == first.program + count
        and this.serial == before.serial + count
        and (this.place, this.of, this.space) == (before.place, before.of, before.space)
        and message.team is first.team
        and message.strategy == first.strategy
        and message.method == first.method
    )
