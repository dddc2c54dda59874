"""The time in which no notebook is connected to an engine that stays."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from distnb.detached.protocol import Restore, ShowKept
from distnb.engine.absence import Absence
from distnb.engine.programs.program_kinds import ProgramKind
from distnb.runtime.randomness import streams
from distnb.wire.messages import Display, Live, Output, ProgramEnded, Reply

if TYPE_CHECKING:
    from distnb.engine.agent import Agent

__all__ = ["Staying"]

_logger = logging.getLogger("distnb.engine")

_MOST_NBYTES = 4 << 20
_POINT_NBYTES = 100


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
        agent.kinds[Restore] = ProgramKind(
            run=partial(_restore, agent), replica=agent.replica_in, measured=lambda message: False
        )


class KeptEvents:
    """The output, the curves and the ends of the latest programs, of which the oldest are dropped beyond a size.

    While a notebook is connected, these are the events of one program: if the notebook ends in the middle of a cell,
    the next one shows the cell's output from its beginning. Only the control thread uses this object.

    Attributes:
        program: The latest program of which there are events; 0 before the first.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[Any, int]] = deque()
        self._nbytes = self._dropped = self.program = 0

    def add(self, events: Iterable[Any], *, alone: bool) -> None:
        """Keep events. With `alone` the events of a program replace those of earlier programs."""
        for event in events:
            nbytes = _nbytes(event)
            if not nbytes:
                continue
            if event.program > self.program:
                self.program = event.program
                if alone:
                    self._events.clear()
                    self._nbytes = self._dropped = 0
            self._events.append((event, nbytes))
            self._nbytes += nbytes
        while self._nbytes > _MOST_NBYTES and len(self._events) > 1:
            _, nbytes = self._events.popleft()
            self._nbytes -= nbytes
            self._dropped += nbytes

    def since(self, program: int, engine: int) -> Sequence[Any]:
        """Return the events of this program and of later ones."""
        found = [event for event, _ in self._events if event.program >= program]
        if found and self._dropped:
            first = found[0]
            text = f"[distnb: the earliest {self._dropped:,} bytes of this replica's output were not kept]\n"
            found.insert(
                0,
                Output(engine=engine, program=first.program, replica=_replica(found), stream="stderr", text=text),
            )
        return found


def _replica(events: Iterable[Any]) -> int:
    return next((event.replica for event in events if not isinstance(event, ProgramEnded)), 0)


def _nbytes(event: Any) -> int:
    """Return the size of an event in bytes, about; 0 for an event that is not kept."""
    match event:
        case Output():
            return len(event.text) + _POINT_NBYTES
        case Display():
            return sum(len(value) for value in event.data.values() if isinstance(value, str | bytes)) + _POINT_NBYTES
        case Live():
            return _POINT_NBYTES * (1 + len(event.points))
        case ProgramEnded():
            return _POINT_NBYTES
    return 0


def _restore(agent: Agent, message: Restore, replica: int) -> Reply:
    """Describe all that this engine has."""

    def body() -> Any:
        if agent.engine in message.undone:
            streams.undo_run()
        return agent.namespace.restore(message.snapshot, replica, message.names, message.skipped)

    return agent.programs.run_together(message.program, message.team, replica, body)
