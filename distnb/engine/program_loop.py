"""The loop on the engine's main thread that receives programs, has them run one at a time and in order, and replies."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from tornado.ioloop import IOLoop

from distnb.engine.debugging import error_reports
from distnb.objects.memory.freed_memory import return_freed_memory
from distnb.runtime.randomness import streams
from distnb.wire import unix_socket
from distnb.wire.channel import ProgramLink
from distnb.wire.messages import Hello, Unreadable

__all__ = ["ProgramLoop"]

_logger = logging.getLogger("distnb.engine")

# The next small call often follows at once, and a pass through the event loop costs as much as the call. Messages on
# other links wait meanwhile.
_LINGER_MS, _LONG_LINGER_MS = 1, 10
# The time after which other links come first. To find one of them empty takes as long as a tenth of a short program.
_TURN_S = 0.001


class ProgramLoop:
    """The loop, which runs on the thread's event loop.

    Args:
        engine: This engine's id.
        listener: The path of the notebook's listener; "" if `link` connects again by itself.
        link: The link to the notebook.
        handle: Runs a message that has arrived from a link, and sends the reply.
        returning: Returns this engine's introduction to a later notebook.
    """

    def __init__(
        self,
        engine: int,
        listener: str,
        link: ProgramLink,
        handle: Callable[[ProgramLink, Any], None],
        returning: Callable[[], Hello],
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._programs = link
        self._links = [link]
        self._handle = handle
        self._returning = returning
        self._loop = IOLoop.current()
        self._has_returned = False  # whether a notebook is there to which this thread has not sent its hello
        self._serving = self._listening = False
        self._turn_ends = 0.0

    def begin(self, hello: Hello) -> None:
        """Send this engine's introduction, and receive programs from now on."""
        self._leave = signal.signal(signal.SIGTERM, self._terminate)
        self._programs.send(hello)
        self._listen()
        self._loop.add_callback(self._serve)

    def receive_from(self, link: ProgramLink) -> None:
        """Receive programs from one more link."""
        self._ignore()  # all links are watched again after the running program
        self._links = [*self._links, link]

    def stop_receiving(self, link: ProgramLink) -> None:
        """Stop receiving programs from a link that is about to be closed."""
        self._ignore()
        self._links = [each for each in self._links if each is not link]

    def await_notebook(self) -> None:
        """Connect to another notebook as soon as the programs of the last one have ended. Any thread may call this."""
        self._loop.add_callback(self._reconnect)

    def _reconnect(self) -> None:
        self._has_returned = True
        if self._serving:
            return  # the program's end calls this again
        self._has_returned = False
        if self._listener:
            self._ignore()
            self._programs.close()
            try:
                connected = unix_socket.connect(self._listener, self._engine)
            except OSError:  # that notebook has ended, too
                _logger.info("the notebook cannot be reached for programs")
                return
            self._links = [connected, *(link for link in self._links if link is not self._programs)]
            self._programs = connected
            self._listen()
        self._programs.send(self._returning())

    def _listen(self) -> None:
        # The event loop watches the descriptor itself. A ZMQStream's bookkeeping costs as much as a small program.
        for link in self._links:
            self._loop.add_handler(link.fileno(), self._serve, self._loop.READ)
        self._listening = True

    def _ignore(self) -> None:
        if self._listening:
            for link in self._links:
                self._loop.remove_handler(link.fileno())
            self._listening = False

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM, which a scheduler (Slurm's scancel) may send in the middle of a program.

        While a program runs, the process dies of the signal. If the handler left the program as `exit()` does, this
        replica's part would count as finished, and the other replicas would report collectives that do not match.
        """
        if self._serving:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif callable(self._leave):
            self._leave(number, frame)

    def _serve(self, *event: Any) -> None:
        """Run every program that has arrived.

        A descriptor of ZeroMQ signals only messages that arrive after the socket was last found empty. The loop
        therefore ends with an attempt to receive that finds it empty.
        """
        if self._serving:  # the user's code runs the event loop; the loop below reads the message after that program
            self._ignore()
            return
        self._serving = True
        latest, began = None, time.monotonic()
        try:
            while (latest := self._serve_one(latest)) is not None:
                pass
        except BaseException:
            self._loop.add_callback(self._serve)  # more may wait, and no event announces them
            raise
        finally:
            self._serving = False
            streams.reset()  # a planned call leaves the replica's own stream in use
            if any(link.ended for link in self._links):
                _logger.info("a connection for programs has ended")
                self._ignore()
                self._links = [link for link in self._links if not link.ended]
            if not self._listening and not self._programs.ended:
                self._listen()
            if self._has_returned:
                self._reconnect()
        return_freed_memory(began)

    def _serve_one(self, latest: ProgramLink | None) -> ProgramLink | None:
        """Run one program, now and then of another link than the latest. Return its link; None if none arrived."""
        if len(self._links) == 1 and latest is self._links[0]:
            tries = [(latest, _LONG_LINGER_MS)]
        else:
            tries = [(link, 0) for link in self._links if link is not latest]
            if latest in self._links:
                tries.append((latest, _LINGER_MS))
                if (now := time.monotonic()) < self._turn_ends:
                    tries.insert(0, (latest, 0))
                else:
                    self._turn_ends = now + _TURN_S
        for link, linger_ms in tries:
            try:
                message = link.receive(linger_ms)
            except Exception as error:  # noqa: BLE001  # the notebook waits for a reply, whatever the error
                link.send(Unreadable(error_reports.report(error)))
                return link
            if message is not None:
                self._handle(link, message)
                return link
        return None
