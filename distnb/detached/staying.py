"""The time in which no notebook is connected to an engine that stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from distnb.detached.kept_events import KeptEvents
from distnb.detached.protocol import Restore, ShowKept
from distnb.engine.absence import Absence
from distnb.engine.programs.program_kinds import ProgramKind
from distnb.runtime.randomness import streams
from distnb.wire.messages import Reply

if TYPE_CHECKING:
    from distnb.engine.agent import Agent

__all__ = ["Staying"]

_logger = logging.getLogger("distnb.engine")


class Staying(Absence):
    """The absence of a notebook: whether it lasts, and what the next notebook must learn.

    It lasts until a notebook has connected *and* asked for what was kept, since before that it could not place the
    events. Programs that arrived before the absence are run to their ends, also those that had not begun.

    Args:
        policy: What happens to a program that runs when the notebook ends: "continue" or "end".
        hello: Returns the message that introduces this engine to the next notebook.
        reconnect: Connects to that notebook for programs, once it has connected for control.
    """

    is_followed = True

    def __init__(self, policy: str, hello: Callable[[], Any], reconnect: Callable[[], None]) -> None:
        self.ends_programs = policy == "end"
        self._hello = hello
        self._reconnect = reconnect
        self._kept = KeptEvents()

    def begin(self, running: tuple[int, int] | None) -> None:
        _logger.info("the notebook has gone")
        if not self.lasts:
            self.lasts = True
            self.unseen = running[0] if running is not None else 0

    def program_began(self, program: int) -> None:
        """Note that a program begins, which has arrived before the absence if there is one."""
        if self.lasts:
            self.unseen = self.unseen or program

    def keep(self, events: Sequence[Any]) -> None:
        self._kept.add(events, alone=not self.lasts)
        self.kept = self._kept.program

    def meet(self, send: Callable[[list[Any]], None]) -> None:
        if self.lasts:
            send([self._hello()])
            self._reconnect()

    def follow(self, order: Any, engine: int) -> Sequence[Any]:
        """End the absence, if the order is `ShowKept`. Return the events that the next notebook has not seen."""
        if not isinstance(order, ShowKept):
            return ()
        _logger.info("another notebook is connected")
        self.lasts, self.unseen = False, 0
        return self._kept.since(order.since, engine) if order.since else ()

    def add_programs(self, agent: Agent) -> None:
        agent.kinds[Restore] = ProgramKind(run=partial(_restore, agent), replica=agent.replica_in, measured=False)


def _restore(agent: Agent, message: Restore, replica: int) -> Reply:
    """Describe all that this engine has."""

    def body() -> Any:
        if agent.engine in message.undone:
            streams.undo_run()
        return agent.namespace.restore(message.snapshot, replica, message.names, message.skipped)

    return agent.programs.run_together(message.program, message.team, replica, body)
