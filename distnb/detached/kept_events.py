"""The events that an engine keeps for the next notebook, if it stays when its notebook ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from distnb.wire.messages import Display, Live, Output, ProgramEnded

__all__ = ["KeptEvents"]

_MOST_NBYTES = 4 << 20
_POINT_NBYTES = 100


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
