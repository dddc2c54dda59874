"""Times that this process spends waiting: the current waits of its threads, and the latest finished ones, as measured.

Recording a wait costs about a microsecond, so it is always on. Any thread may read. Times are of a steady clock that
all processes of one machine share.
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
    "clock",
    "collective_started",
    "end",
    "latest",
    "machine",
    "note_step",
    "of_steps",
    "output_period_s",
    "program_began",
    "program_ended",
    "sample_period_s",
    "waiting",
]

MOST_EVENTS: Final = 4096
"""The number of latest events that are kept."""

_SHORTEST_PERIOD_S: Final = 0.2
_SAMPLES_PER_S: Final = 500
_OUTPUT_PERIOD_S: Final = 0.05
_OUTPUTS_PER_S: Final = 4_000

Kind = Literal["collective", "background", "input", "servers", "program", "step"]
""""collective": a thread waits in a collective. "background": a collective that no Python thread waits for (torch's C++
may). "input": a batch was requested. "servers": an exchange with parameter servers. "program": a program of the
notebook. "step": the end of a training step.
"""


class Arrival(NamedTuple):
    """The start of a wait.

    Attributes:
        at: The time at which this process arrived.
        group, number: The name of a collective on all replicas; "" if the other replicas do not take part.
        what: The operation, in words.
        where: The user's line, if it is known.
    """

    at: float
    group: str = ""
    number: int = 0
    what: str = ""
    where: str = ""


class Event(NamedTuple):
    """A finished wait, or a moment. Stored and sent as a plain tuple, which is cheaper.

    Attributes:
        serial: The number of the event in this process.
        begin, end: The time that the process spent on it.
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
    """A wait in progress, with the wait that contains it."""

    kind: Kind
    begin: float
    arrival: Arrival
    outer: tuple[Any, ...] | None = None


_AT_ONCE_S: Final = 50e-6
_NOTHING: Final = Arrival(at=0.0)
_events: deque[tuple[Any, ...]] = deque(maxlen=MOST_EVENTS)
_serials = itertools.count(1)
_waits: dict[int, tuple[Any, ...]] = {}  # by thread, or by another key: the fields of `Wait`
_program: float | None = None  # start of the running program
_data_end: int | None = None


def begin(kind: Kind, arrival: Arrival = _NOTHING, *, key: int | None = None) -> None:
    """Record that the calling thread, or the activity named by the key, starts to wait.

    A wait that follows its arrival immediately counts from the arrival.
    """
    key = get_ident() if key is None else key
    now = clock()
    _waits[key] = kind, arrival.at if now - arrival.at < _AT_ONCE_S else now, arrival, _waits.get(key)


def end(*, key: int | None = None) -> None:
    """Record that the wait that began last has ended."""
    key = get_ident() if key is None else key
    wait = _waits.pop(key, None)
    if wait is None:
        return  # another program has started
    kind, begun, arrival, outer = wait
    if outer is not None:
        _waits[key] = outer
    _events.append((next(_serials), kind, begun, clock(), *arrival))


def collective_started(arrival: Arrival) -> None:
    """Record that a collective was started. The time that the start took counts as waiting in it, if it was long."""
    now = clock()
    if now - arrival.at >= _AT_ONCE_S:
        _events.append((next(_serials), "collective", arrival.at, now, *arrival))


def waiting() -> Wait | None:
    """Return the main thread's current wait, or else the longest wait of another thread."""
    here = _waits.get(main_thread().ident or 0)
    found = here or min(list(_waits.values()), key=lambda wait: float(wait[1]), default=None)
    return Wait._make(found) if found is not None else None


def note_step(number: int) -> None:
    """Record the end of the training step of that number."""
    now = clock()
    _events.append((next(_serials), "step", now, now, now, "", number, "", ""))


def data_ended(batches: int) -> None:
    """Record that a loop over data ended after this number of batches. Other replicas may continue theirs."""
    global _data_end
    _data_end = batches


def data_goes_on() -> None:
    """Record that a loop over data received a batch."""
    global _data_end
    _data_end = None


def pop_data_end() -> int | None:
    """Return the number of batches of the loop over data that ended since the last call, or None if none has ended."""
    global _data_end
    batches, _data_end = _data_end, None
    return batches


def program_began() -> None:
    """Record that a program of the notebook started."""
    global _program, _data_end
    _data_end = None
    _waits.clear()  # a signal may have interrupted the code between `begin` and `end`
    _program = clock()


def program_ended() -> None:
    """Record that the program ended."""
    global _program
    began, _program = _program, None
    if began is not None:
        _events.append((next(_serials), "program", began, clock(), *_NOTHING))


def latest(count: int = MOST_EVENTS, after: int = 0) -> tuple[tuple[Any, ...], ...]:
    """Return the latest events, oldest first: at most `count`, with serials greater than `after`.

    A running program comes last, with the serial 0, as if it ended now.
    """
    # in one call of C code: no other thread appends meanwhile
    newest = list(itertools.islice(reversed(_events), count))
    found = [event for event in reversed(newest) if event[0] > after]
    if (began := _program) is not None:
        found.append((0, "program", began, clock(), *_NOTHING))
    return tuple(found)


def sample_period_s(replicas: int) -> float:
    """Return the time between two samples that a replica sends to the notebook.

    The notebook reads the samples of all replicas on one thread. With more than a hundred replicas, each sends less
    often, so that the samples of any number of replicas cost the notebook the same.
    """
    return max(_SHORTEST_PERIOD_S, replicas / _SAMPLES_PER_S)


def output_period_s(replicas: int) -> float:
    """Return the time between two messages with a replica's output. Replicas of large teams send fewer, longer ones."""
    return max(_OUTPUT_PERIOD_S, replicas / _OUTPUTS_PER_S)


def of_steps(events: tuple[tuple[Any, ...], ...], steps: int) -> tuple[tuple[Any, ...], ...]:
    """Return the events since the end of the step before the latest `steps`; all events if there were fewer steps."""
    ends = [place for place, event in enumerate(events) if event[1] == "step"]
    return events[ends[-steps - 1] :] if len(ends) > steps else events


def machine() -> str:
    """Return an id of the machine since its last boot, or "" if it is unknown. Processes with the same id share one
    clock.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
