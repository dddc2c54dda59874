"""The time in which no notebook is connected to an engine that stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from distnb.detached.kept_events import KeptEvents

__all__ = ["Absence"]

_logger = logging.getLogger("distnb.engine")


class Absence:
    """The absence of a notebook: whether it lasts, and what the next notebook must learn.

    It lasts until a notebook has connected *and* asked for what was kept, since before that it could not place the
    events. Programs that arrived before the absence are run to their ends, also those that had not begun.

    Args:
        policy: What happens to a program that runs when the notebook ends: "continue" or "end".
        hello: Returns the message that introduces this engine to the next notebook.
        reconnect: Called when a notebook has connected for control, to connect for programs too.

    Attributes:
        lasts: Whether no notebook is there.
        unseen: The first program that ran when the notebook had gone; 0 if there is none.
    """

    def __init__(self, policy: str, hello: Callable[[], Any], reconnect: Callable[[], None]) -> None:
        self.ends_programs = policy == "end"
        self.hello = hello
        self.reconnect = reconnect
        self.lasts = False
        self.unseen = 0
        self._kept = KeptEvents()

    def begin(self, running: tuple[int, int] | None) -> None:
        """Begin the absence, in which this (program, replica) may run."""
        _logger.info("the notebook has gone")
        if not self.lasts:
            self.lasts = True
            self.unseen = running[0] if running is not None else 0

    def program_began(self, program: int) -> None:
        """Note that a program that had arrived before begins."""
        if self.lasts:
            self.unseen = self.unseen or program

    def keep(self, events: Sequence[Any]) -> None:
        """Keep events, which are also sent unless the absence lasts."""
        self._kept.add(events, alone=not self.lasts)

    @property
    def kept(self) -> int:
        """The latest program of which events are kept; 0 if there is none."""
        return self._kept.program

    def end(self, engine: int, since: int) -> Sequence[Any]:
        """End the absence. Return the events since the first program that the next notebook has not seen, if not 0."""
        _logger.info("another notebook is connected")
        self.lasts, self.unseen = False, 0
        return self._kept.since(since, engine) if since else ()
