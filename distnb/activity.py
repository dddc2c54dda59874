"""How this process spends its time beside computing: what its threads wait in, and the latest waits, each as measured.

To record one costs about a microsecond, and so it is always done. Any thread may read. Moments are of a steady clock
that all processes of one machine share.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from time import monotonic as clock
from typing import Final, Literal, NamedTuple

__all__ = ["MOST_EVENTS", "Arrival", "Event", "Kind", "Wait", "begin", "clock", "end", "latest", "machine", "waiting"]

MOST_EVENTS: Final = 4096
"""So many of the latest are kept."""

Kind = Literal["collective", "background", "input", "servers", "program", "step"]
"""A collective that a thread waits in; one that nobody here waits for (torch's C++ may); a batch that is asked for; an
exchange with parameter servers; a program of the notebook's; the end of a training step."""


class Arrival(NamedTuple):
    """What is begun or waited in.

    Attributes:
        at: When this process came to it.
        group, number: Names a collective on all replicas; "" if nobody else has it.
        what: The operation, for people; where: the user's line, if it is known.
    """

    at: float
    group: str = ""
    number: int = 0
    what: str = ""
    where: str = ""


class Event(NamedTuple):
    """A wait that is over, or a moment.

    Attributes:
        serial: Counts the events of this process.
        begin, end: What the process spent on it.
    """

    serial: int
    kind: Kind
    begin: float
    end: float
    arrival: Arrival


class Wait(NamedTuple):
    """What a thread waits in now, since when, and what that is a part of."""

    kind: Kind
    begin: float
    arrival: Arrival
    outer: Wait | None = None


_NOTHING: Final = Arrival(0.0)
_events: deque[Event] = deque(maxlen=MOST_EVENTS)
_serials = itertools.count(1)
_waits: dict[int, Wait] = {}  # by thread, or by whatever else waits
_program: float | None = None  # when the one began that runs


def begin(kind: Kind, arrival: Arrival | None = None, *, key: int | None = None) -> None:
    """The calling thread begins to wait; or what the key stands for."""
    key = threading.get_ident() if key is None else key
    now = clock()
    _waits[key] = Wait(kind, now, arrival or Arrival(now), _waits.get(key))


def end(arrival: Arrival | None = None, *, key: int | None = None) -> None:
    """The wait that was begun last is over; `arrival` says now what it was."""
    key = threading.get_ident() if key is None else key
    wait = _waits.pop(key, None)
    if wait is None:
        return  # another program has begun
    if wait.outer is not None:
        _waits[key] = wait.outer
    _events.append(Event(next(_serials), wait.kind, wait.begin, clock(), arrival or wait.arrival))


def waiting() -> Wait | None:
    """What the main thread waits in; if in nothing, what some other has waited in for longest."""
    here = _waits.get(threading.main_thread().ident or 0)
    return here or min(list(_waits.values()), key=lambda wait: wait.begin, default=None)


def note_step(number: int) -> None:
    """A training step ended, the one of that number."""
    now = clock()
    _events.append(Event(next(_serials), "step", now, now, Arrival(now, number=number)))


def program_began() -> None:
    """A program of the notebook's began."""
    global _program
    _waits.clear()  # a signal may have come between the two ends of one
    _program = clock()


def program_ended() -> None:
    """It ended."""
    global _program
    began, _program = _program, None
    if began is not None:
        _events.append(Event(next(_serials), "program", began, clock(), _NOTHING))


def latest(count: int = MOST_EVENTS, after: int = 0) -> tuple[Event, ...]:
    """The latest events, oldest first: so many at most, of those whose serials are greater than `after`.

    A program that runs stands at the end, with the serial 0, as if it ended now.
    """
    newest = list(itertools.islice(reversed(_events), count))  # in C at one go: no other thread adds meanwhile
    found = [event for event in reversed(newest) if event.serial > after]
    if (began := _program) is not None:
        found.append(Event(0, "program", began, clock(), _NOTHING))
    return tuple(found)


def machine() -> str:
    """Names the machine, as it runs since it was started: those with one name have one clock. "" if it is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
