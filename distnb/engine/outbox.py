"""Replies of calls that came together: those of quick calls leave together, too."""

from __future__ import annotations

import threading
import time

from distnb.wire.channel import ProgramLink
from distnb.wire.messages import Reply
from distnb.wire.shorthand import ReplyWriter

__all__ = ["Outbox"]

_PATIENCE_S = 0.005


class Outbox:
    """The way of replies to the notebook. The main thread leaves them here.

    While calls wait that came together, the control thread sends what stays for too long: the next of them may take
    its time. It uses the link only while a reply waits, and under the lock; the main thread reads only when none does.

    Args:
        link: The program channel.
    """

    def __init__(self, link: ProgramLink) -> None:
        self._link = link
        self._writer = ReplyWriter()
        self._lock = threading.Lock()
        self._waiting: list[object] = []
        self._since = 0.0

    def add(self, reply: Reply, *, more: bool) -> None:
        """Send a reply, or keep it for a moment if more will follow."""
        with self._lock:
            waiting = self._waiting
            waiting.append(self._writer.write(reply))
            if more and reply.status == "ok":
                now = time.monotonic()
                if len(waiting) == 1:
                    self._since = now
                if now < self._since + _PATIENCE_S:
                    return
            self._send()

    def send_late(self) -> None:
        """Send what has waited for long enough; from any thread."""
        if self._waiting and time.monotonic() - self._since >= _PATIENCE_S:
            with self._lock:
                self._send()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._link.send(waiting if len(waiting) > 1 else waiting[0])
