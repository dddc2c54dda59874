"""Calls that were sent with `RunOptions(wait=False)`, and calls that are sent later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from distnb.values import Future
from distnb.wire.messages import ObjectId

__all__ = ["DeferredCall", "PendingCalls"]

# More calls under way would only fill queues. The oldest hundred are awaited at once, and the queues stay full.
_MOST_PENDING, _FEW_PENDING = 1000, 900


class DeferredCall:
    """A call that is sent after the next program. It runs while the notebook handles the result of that program.

    Args:
        send: Sends the call.
        changes: The ids of the engine objects that the call changes.

    Attributes:
        urgent: Whether to send the call after the next call. If False, it is sent only before a program that reads the
            objects that it changes.
    """

    def __init__(self, send: Callable[[], Future], changes: set[ObjectId]) -> None:
        self._send = send
        self.changes = changes
        self.urgent = True
        self._sent: Future | None = None
        self._error: Exception | None = None

    @property
    def is_sent(self) -> bool:
        """True if the call was sent, or if an error prevented that."""
        return self._sent is not None or self._error is not None

    def send(self) -> None:
        """Send the call if it was not sent before. If an error prevents this, `result` raises the error."""
        if not self.is_sent:
            try:
                self._sent = self._send()
            except Exception as error:  # noqa: BLE001
                self._error = error

    def result(self) -> Any:
        """Wait for the result and return it.

        Raises:
            BaseException: The error of the replicas, or an error that prevented the call from being sent.
        """
        self.send()
        if self._error is not None:
            raise self._error
        assert self._sent is not None, "it was sent"
        return self._sent.result()


class PendingCalls:
    """The calls that have been sent and not awaited, by their programs, in order."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Future, bool]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, program: int, call: Future, *, users: bool) -> None:
        """Add a call that was sent. The error of a `users` call is raised even if nothing asks for its result."""
        self._calls[program] = call, users

    def discard(self, program: int) -> None:
        """Remove a call that succeeded and whose result has arrived."""
        self._calls.pop(program, None)

    def keep_few(self) -> None:
        """Wait for the oldest calls if there are too many, and raise the error of one that failed."""
        if len(self._calls) > _MOST_PENDING:
            while len(self._calls) > _FEW_PENDING:
                self._calls.pop(next(iter(self._calls)))[0].result()

    def wait(self) -> None:
        """Wait for all calls. Their errors are raised by `Future.result` or by `finish`."""
        for call, _ in list(self._calls.values()):
            with contextlib.suppress(Exception):
                call.result()

    def finish(self) -> None:
        """Wait for all calls. Raise the error of the first that failed, unless its future has raised it."""
        calls, self._calls = self._calls, {}
        for call, users in calls.values():
            if not call.has_raised:
                with contextlib.nullcontext() if users else contextlib.suppress(Exception):
                    call.result()
