"""How this process spends its time beside computing: what its threads wait in, and the latest waits, each as measured.

To record one costs about a microsecond, and so it is always done. Any thread may read. Moments are of a steady clock
that all processes of one machine share.
"""

from __future__ import annotations

import itertools
from collections import deque
from threading import get_ident, main_thread
from time import monotonic as clock
from typing import Any, Final, Literal, NamedTuple

__all__ = [
    "MOST_EVENTS",
    "Arrival",
    "Event",
    "Kind",
    "Wait",
    "begin",
    "begun",
    "clock",
    "end",
    "latest",
    "machine",
    "note_step",
    "program_began",
    "program_ended",
    "waiting",
]

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
    """A wait that is over, or a moment. As they are kept and sent, these are plain tuples: that costs less.

    Attributes:
        serial: Counts the events of this process.
        begin, end: What the process spent on it.
        at, group, number, what, where: See `Arrival`.
    """

    serial: int
    kind: Kind
    begin: float
    end: float
    at: float = 0.0
    group: str = ""
    number: int = 0
    what: str = ""
    where: str = ""


class Wait(NamedTuple):
    """What a thread waits in now, since when, and what that is a part of."""

    kind: Kind
    begin: float
    arrival: Arrival
    outer: tuple[Any, ...] | None = None


_AT_ONCE_S: Final = 50e-6
_NOTHING: Final = Arrival(0.0)
_events: deque[tuple[Any, ...]] = deque(maxlen=MOST_EVENTS)
_serials = itertools.count(1)
_waits: dict[int, tuple[Any, ...]] = {}  # by thread, or by whatever else waits: what `Wait` has
_program: float | None = None  # when the one began that runs
_data_end: int | None = None


def begin(kind: Kind, arrival: Arrival = _NOTHING, *, key: int | None = None) -> None:
    """The calling thread begins to wait; or what the key stands for.

    Who waits at once for what was just begun has waited since then.
    """
    key = get_ident() if key is None else key
    now = clock()
    _waits[key] = kind, arrival.at if now - arrival.at < _AT_ONCE_S else now, arrival, _waits.get(key)


def end(*, key: int | None = None) -> None:
    """The wait that was begun last is over."""
    key = get_ident() if key is None else key
    wait = _waits.pop(key, None)
    if wait is None:
        return  # another program has begun
    kind, begun, arrival, outer = wait
    if outer is not None:
        _waits[key] = outer
    _events.append((next(_serials), kind, begun, clock(), *arrival))


def begun(arrival: Arrival) -> None:
    """A collective was begun: what that took counts as waiting in it, if it was long."""
    now = clock()
    if now - arrival.at >= _AT_ONCE_S:
        _events.append((next(_serials), "collective", arrival.at, now, *arrival))


def waiting() -> Wait | None:
    """What the main thread waits in; if in nothing, what some other has waited in for longest."""
    here = _waits.get(main_thread().ident or 0)
    found = here or min(list(_waits.values()), key=lambda wait: float(wait[1]), default=None)
    return Wait._make(found) if found is not None else None


def note_step(number: int) -> None:
    """A training step ended, the one of that number."""
    now = clock()
    _events.append((next(_serials), "step", now, now, now, "", number, "", ""))


def data_ended(batches: int) -> None:
    """Note that a loop over data has ended, after so many batches: another replica may go on with its own."""
    global _data_end
    _data_end = batches


def data_goes_on() -> None:
    """Note that a loop over data was given a batch."""
    global _data_end
    _data_end = None


def take_data_end() -> int | None:
    """Return how many batches a loop over data gave that has ended since the last call; None if none has."""
    global _data_end
    batches, _data_end = _data_end, None
    return batches


def program_began() -> None:
    """A program of the notebook's began."""
    global _program
    data_goes_on()
    _waits.clear()  # a signal may have come between the two ends of one
    _program = clock()


def program_ended() -> None:
    """It ended."""
    global _program
    began, _program = _program, None
    if began is not None:
        _events.append((next(_serials), "program", began, clock(), *_NOTHING))


def latest(count: int = MOST_EVENTS, after: int = 0) -> tuple[tuple[Any, ...], ...]:
    """The latest events, oldest first: so many at most, of those whose serials are greater than `after`.

    A program that runs stands at the end, with the serial 0, as if it ended now.
    """
    newest = list(itertools.islice(reversed(_events), count))  # in C at one go: no other thread adds meanwhile
    found = [event for event in reversed(newest) if event[0] > after]
    if (began := _program) is not None:
        found.append((0, "program", began, clock(), *_NOTHING))
    return tuple(found)


def machine() -> str:
    """Names the machine, as it runs since it was started: those with one name have one clock. "" if it is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
