"""The model of the replicas' time: their activities, their waits, and the straggler. Events in, plain values out.

Replicas report events (`distnb.activity.Event`): programs, steps, collectives, waits for input and for servers. From
these, the time of the latest steps is divided into pieces of one kind each (`KINDS`). Example with two replicas:

    replica 0   |== compute ==|.. waiting ...|~ comm ~|== compute ==|
    replica 1   |========= compute ==========|~ comm ~|== compute ==|
                              |              |        |
             0 arrives at a collective  1 arrives  it ends on both

Replica 0 reports only that it was in the collective. The part until the last replica arrived is waiting; only the rest
is communication. Replica 1 is the straggler if the others wait for it most of the time.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from distnb.activity import MOST_EVENTS, Event
from distnb.views.wording import cell_place, short_duration
from distnb.wire.messages import TelemetrySample

__all__ = ["KINDS", "Piece", "Spent", "Straggler", "TimelineModel", "sentence"]

KINDS: Final = ("compute", "communication", "waiting", "input", "idle")
"""The kinds of activity of a replica's main thread.

"compute" is everything else: the program's own code, busy or asleep. "waiting" is the part of a collective until the
last replica has arrived. "communication" is the rest of a collective, and exchanges with parameter servers. "idle" is
the time between the notebook's programs.
"""

State = Literal["compute", "communication", "waiting", "input", "idle"]
_ABOVE: Final = ("waiting", "communication", "input", "compute")  # of several at once, the first of these counts

_STEPS = 10  # the number of latest steps
_MOST_OFFSETS = 200
_MOST_EVENTS = 32 * MOST_EVENTS  # of all replicas
_LEAST_EVENTS = 512  # of each replica, of however many
_HELD_UP = 0.1  # the least share of the time in which the others wait for a straggler
_FOR_ONE = 2 / 3  # the least share of all waiting that is for a straggler
_QUEUED = 0.1  # the least share of the time without a processor that is reported


class Piece(NamedTuple):
    """An interval of one replica's time, in seconds of the first replica's clock.

    Attributes:
        what: The operation.
        where: The user's line.
        number: The number of a collective.
    """

    replica: int
    kind: State
    begin: float
    end: float
    what: str = ""
    where: str = ""
    number: int = 0


@dataclass
class Straggler:
    """The replica that the others wait for.

    Attributes:
        held_s: The average time for which the others wait for it.
        longer: The activity that takes it longer than the others: "compute" or "input"; "" if neither explains it.
        longer_s: The difference to the others' average.
    """

    replica: int
    held_s: float
    longer: str
    longer_s: float


@dataclass
class Spent:
    """The breakdown of the time of the latest steps.

    Attributes:
        begin, end: The bounds of the time.
        steps: The number of steps in it; 0 if none was counted.
        seconds: The seconds by replica and by kind.
        straggler: The replica that the others wait for, if there is one.
        queued: The share of the time in which a replica was ready to run but had no processor, if that is known.
        processors: The number of processors of the fullest machine, and the number of replicas that share them.
    """

    begin: float
    end: float
    steps: int
    seconds: dict[int, dict[str, float]]
    straggler: Straggler | None
    queued: dict[int, float] = field(default_factory=dict)
    processors: tuple[int, int] = (0, 0)

    @property
    def step_s(self) -> float:
        """The duration of one step, or of the whole time without steps."""
        return (self.end - self.begin) / (self.steps or 1)

    def share(self, kind: str) -> float:
        """Return the share of a kind, averaged over the replicas."""
        return statistics.fmean(own[kind] for own in self.seconds.values()) / (self.end - self.begin)


class _Track:
    """The events of a replica, without gaps."""

    def __init__(self) -> None:
        self.machine = ""
        self.processors = 0
        self.events: deque[tuple[Any, ...]] = deque()
        self.newest = 0
        self.now = 0.0  # the time until which all events are known
        self.began: float | None = None  # the beginning of the running program
        self.steps_before = 0
        self.queued: deque[tuple[float, float]] = deque(maxlen=64)  # the sample's time, seconds queued so far

    def feed(self, sample: TelemetrySample, most: int) -> None:
        """Apply a sample, and keep at most so many events."""
        if not sample.events:
            return
        self.machine, self.processors = sample.machine, sample.processors
        latest = Event._make(sample.events[-1])
        self.began = latest.begin if latest.serial == 0 else None
        self.now = latest.end
        if sample.queued_s is not None:
            self.queued.append((self.now, sample.queued_s))
        events = sample.events if latest.serial else sample.events[:-1]
        serials = [event[0] for event in events]
        if serials and (serials[0] > self.newest + 1 or serials[-1] < self.newest):
            self.events.clear()  # after a gap, or if a new process has replaced the engine's
            self.newest = 0
        # As the plain tuples that arrived: most are never looked at.
        self.events.extend(
            events if serials and serials[0] > self.newest else (e for e in events if e[0] > self.newest)
        )
        self.newest = max(self.newest, *serials, 0)
        while len(self.events) > most:
            self.events.popleft()

    def latest(self, since: float, ahead_s: float) -> list[Event]:
        """Return the events that ended since a time, and the running program, with times of the first replica's clock.

        Args:
            since: The time, by the first replica's clock.
            ahead_s: The time by which this replica's clock is ahead of it.
        """
        newest_first = map(Event._make, reversed(self.events))
        # Events are recorded when they end.
        found = list(itertools.takewhile(lambda event: event.end >= since + ahead_s, newest_first))
        found.reverse()
        if self.began is not None:
            found.append(Event(serial=0, kind="program", begin=self.began, end=self.now))
        if not ahead_s:
            return found
        by = -ahead_s
        return [event._replace(begin=event.begin + by, end=event.end + by, at=event.at + by) for event in found]

    @property
    def since(self) -> float:
        """The time from which on all events are known."""
        if self.events:
            first = Event._make(self.events[0])
            return first.begin if first.serial == 1 else first.end
        return self.now if self.began is None else self.began

    def queued_share(self, begin: float, end: float) -> float | None:
        """Return the share of the time without a processor, between the samples around an interval."""
        before = next((each for each in reversed(self.queued) if each[0] <= begin), None)
        after = next((each for each in self.queued if each[0] >= end), None)
        if before is None or after is None or after[0] <= before[0]:
            return None
        return (after[1] - before[1]) / (after[0] - before[0])


class TimelineModel:
    """The time of a team's replicas.

    Attributes:
        in_detail: True if each wait is to be drawn, rather than the share of each kind.
    """

    in_detail = False

    def __init__(self) -> None:
        self._tracks: dict[int, _Track] = {}
        self._known: Spent | None = None
        self._samples = 0  # the number of samples
        self._computed_at = 0, 0.0  # the number of samples, and the time of the latest, when `known` last computed

    def feed(self, sample: TelemetrySample, steps_before: int = 0) -> None:
        """Apply a sample of a replica, and ignore its first `steps_before` steps."""
        track = self._tracks.setdefault(sample.replica, _Track())
        track.steps_before = steps_before
        track.feed(sample, max(_LEAST_EVENTS, min(MOST_EVENTS, _MOST_EVENTS // len(self._tracks))))
        self._samples += 1

    @property
    def replicas(self) -> list[int]:
        """The replicas with events."""
        return sorted(self._tracks)

    # -- derived data ------------------------------------------------------------------------------------------------

    def spent(self, steps: int = _STEPS) -> Spent | None:
        """Return the breakdown of the time of the latest steps, or None if too little is known."""
        latest = self._latest_steps(steps)
        if latest is None:
            return None
        events, begin, end, count = latest
        last = _last_arrivals(events)
        seconds = {replica: dict.fromkeys(KINDS, 0.0) for replica in self.replicas}
        for piece in _pieces(events, last, begin, end):
            seconds[piece.replica][piece.kind] += piece.end - piece.begin
        queued = {}
        for replica, offset in self._offsets().items():
            share = self._tracks[replica].queued_share(begin + offset, end + offset)
            if share is not None:
                queued[replica] = share
        straggler = _straggler(events, last, seconds, begin, end)
        return Spent(
            begin=begin,
            end=end,
            steps=count,
            seconds=seconds,
            straggler=straggler,
            queued=queued,
            processors=self._crowd(),
        )

    def known(self, least: int, *, every_s: float = 0.0) -> Spent | None:
        """Return the newest result of `spent` with at least `least` steps; None before the first.

        The newest samples may give fewer steps: if steps are short, a sample covers only a moment, and the samples of
        two replicas may have no step in common.

        Args:
            every_s: Return the last result if it was computed less than this before the latest sample.
        """
        latest = max((track.now for track in self._tracks.values()), default=0.0)
        samples, computed_at = self._computed_at
        if samples == self._samples or (self._known is not None and latest - computed_at < every_s):
            return self._known
        self._computed_at = self._samples, latest
        spent = self.spent() if self._tracks else None
        if spent is not None and spent.steps >= least:
            self._known = spent
        return self._known

    def pieces(self, steps: int = _STEPS) -> tuple[list[Piece], list[tuple[float, int]]]:
        """Return each replica's time in the latest steps piece by piece, and the ends of steps: (time, number)."""
        latest = self._latest_steps(steps)
        if latest is None:
            return [], []
        events, begin, end, _ = latest
        ends = [each for each in self._step_ends() if begin <= each[0] <= end]
        return list(_pieces(events, _last_arrivals(events), begin, end)), ends

    def _step_ends(self) -> list[tuple[float, int]]:
        """Return the ends of the first replica's steps: (time, number)."""
        first = self._tracks[self._first]
        events = map(Event._make, first.events)
        steps = [(each.end, each.number) for each in events if each.kind == "step"]
        return [(at, number - first.steps_before) for at, number in steps if number > first.steps_before]

    @property
    def _first(self) -> int:
        return min(self._tracks)

    def _crowd(self) -> tuple[int, int]:
        """Return the number of processors of the fullest machine, and the number of replicas that share them."""
        machines: defaultdict[str, list[_Track]] = defaultdict(list)
        for track in self._tracks.values():
            machines[track.machine].append(track)
        fullest = max(machines.values(), key=len)
        return min(track.processors for track in fullest), len(fullest)

    def _offsets(self) -> dict[int, float]:
        """Return the time by which each replica's clock is ahead of the first replica's, in seconds.

        All replicas of a machine share its clock. Monotonic clocks of two machines have nothing in common. A collective
        in which all replicas wait, however, ends on all of them at once, apart from the transfer, so the median
        difference of these ends is the offset.
        """
        first = self._tracks[self._first]
        offsets: dict[str, float | None] = {first.machine: 0.0}
        ends = {_name(event): event.end for event in map(Event._make, first.events) if _is_shared(event)}
        for track in self._tracks.values():
            if offsets.get(track.machine) is None:
                newest_first = map(Event._make, reversed(track.events))
                shared = (event for event in newest_first if _is_shared(event) and _name(event) in ends)
                ahead = [event.end - ends[_name(event)] for event in itertools.islice(shared, _MOST_OFFSETS)]
                offsets[track.machine] = statistics.median(ahead) if ahead else None
        found = {}
        for replica, track in sorted(self._tracks.items()):
            offset = offsets[track.machine]
            found[replica] = track.now - first.now if offset is None else offset
        return found

    def _latest_steps(self, steps: int) -> tuple[dict[int, list[Event]], float, float, int] | None:
        """Return the events of the latest steps, the steps' begin and end, and their number."""
        if not self._tracks:
            return None
        offsets = self._offsets()
        window = self._window(offsets, steps)
        if window is None:
            return None
        begin, end, count = window
        since = begin - (end - begin) / max(count, 1)  # one step more: a collective may have ended earlier elsewhere
        events = {replica: self._tracks[replica].latest(since, offset) for replica, offset in offsets.items()}
        return events, begin, end, count

    def _window(self, offsets: Mapping[int, float], steps: int) -> tuple[float, float, int] | None:
        """Return the latest steps that every replica has reported: begin, end and number."""
        begin = max(track.since - offsets[replica] for replica, track in self._tracks.items())
        end = min(track.now - offsets[replica] for replica, track in self._tracks.items())
        ends = [at for at, _ in self._step_ends() if begin <= at <= end][-steps - 1 :]
        if len(ends) > 1:
            return ends[0], ends[-1], len(ends) - 1
        return (begin, end, 0) if end > begin else None


def _pieces(
    events: Mapping[int, list[Event]], last: Mapping[tuple[str, int], tuple[float, int]], begin: float, end: float
) -> Iterator[Piece]:
    for replica, own in events.items():
        yield from _swept(replica, list(_spans(own, last)), begin, end)


def _name(event: Event) -> tuple[str, int]:
    return event.group, event.number


def _is_shared(event: Event) -> bool:
    """Return whether an event is a collective in which a thread waited and which other replicas have, too."""
    return event.kind == "collective" and bool(event.group)


def _last_arrivals(events: Mapping[int, list[Event]]) -> dict[tuple[str, int], tuple[float, int]]:
    """Return the last arrival at each collective that several replicas have reported: its time, and the replica."""
    arrived: dict[tuple[str, int], dict[int, float]] = {}
    for replica, own in events.items():
        for event in own:
            if _is_shared(event):
                arrived.setdefault(_name(event), {}).setdefault(replica, event.at)
    found = {}
    for name, there in arrived.items():
        if len(there) > 1:
            latest = max(there, key=there.__getitem__)
            found[name] = there[latest], latest
    return found


def _spans(
    events: Iterable[Event], last: Mapping[tuple[str, int], tuple[float, int]]
) -> Iterator[tuple[float, float, State, Event]]:
    """Yield a replica's activities with their times, which may overlap.

    Args:
        last: The last arrival at each collective, from `_last_arrivals`.
    """
    for event in events:
        if event.kind == "collective":
            arrived = last[_name(event)][0] if _name(event) in last else event.begin
            there = min(max(arrived, event.begin), event.end)
            yield event.begin, there, "waiting", event
            yield there, event.end, "communication", event
        elif event.kind == "servers":
            yield event.begin, event.end, "communication", event
        elif event.kind == "input":
            yield event.begin, event.end, "input", event
        elif event.kind == "program":
            yield event.begin, event.end, "compute", event


def _swept(replica: int, spans: list[tuple[float, float, State, Event]], begin: float, end: float) -> Iterator[Piece]:
    """Divide a replica's time into pieces without overlap: of several activities at once, the first in `_ABOVE` counts.

    The spans' edges are swept in order of time, with the set of open spans of each kind. For example, a "compute" span
    from 0 to 10 and an "input" span from 2 to 5 give compute 0–2, input 2–5, compute 5–10.
    """
    edges: list[tuple[float, bool, int]] = []
    for place, (first, last, _, _) in enumerate(spans):
        if first < last and last > begin and first < end:
            edges += [(max(first, begin), True, place), (min(last, end), False, place)]
    edges.sort()
    open_: dict[str, set[int]] = {kind: set() for kind in _ABOVE}
    at = begin
    for moment, opens, place in [*edges, (end, False, -1)]:
        if moment > at:
            kind = next((kind for kind in _ABOVE if open_[kind]), None)
            if kind is None:
                yield Piece(replica=replica, kind="idle", begin=at, end=moment)
            else:
                _, _, state, event = spans[max(open_[kind])]
                yield Piece(
                    replica=replica,
                    kind=state,
                    begin=at,
                    end=moment,
                    what=event.what,
                    where=cell_place(event.where),
                    number=event.number,
                )
            at = moment
        if place >= 0:
            (open_[spans[place][2]].add if opens else open_[spans[place][2]].discard)(place)


def _straggler(
    events: Mapping[int, list[Event]],
    last: Mapping[tuple[str, int], tuple[float, int]],
    seconds: Mapping[int, Mapping[str, float]],
    begin: float,
    end: float,
) -> Straggler | None:
    held: defaultdict[int, float] = defaultdict(float)
    others = len(events) - 1
    for own in events.values():
        for event in own:
            if begin < event.end <= end and _is_shared(event) and _name(event) in last:
                at, latest = last[_name(event)]
                held[latest] += max(0.0, min(at, event.end) - event.begin) / others
    if not held:
        return None
    slowest = max(held, key=lambda replica: held[replica])
    if held[slowest] < _HELD_UP * (end - begin) or held[slowest] < _FOR_ONE * sum(held.values()):
        return None
    longer = {
        kind: seconds[slowest][kind] - statistics.fmean(seconds[each][kind] for each in events if each != slowest)
        for kind in ("compute", "input")
    }
    most = max(longer, key=lambda kind: longer[kind])
    explained = longer[most] >= held[slowest] / 3
    return Straggler(
        replica=slowest,
        held_s=held[slowest],
        longer=most if explained else "",
        longer_s=longer[most] if explained else 0.0,
    )


# -- words -----------------------------------------------------------------------------------------------------------

_WORDS: Final = {
    "compute": "compute",
    "communication": "communication",
    "waiting": "waiting for others",
    "input": "waiting for input",
    "idle": "between the notebook's calls",
}


def sentence(spent: Spent) -> str:
    """Return the breakdown of the time and the straggler in words."""
    shares = sorted(((spent.share(kind), kind) for kind in KINDS), reverse=True)
    breakdown = ", ".join(f"{share:.0%} {_WORDS[kind]}" for share, kind in shares if share >= 0.005)
    what = "A step takes" if spent.steps else "Of the last"
    parts = [f"{what} {short_duration(spent.step_s)}: {breakdown}." if breakdown else ""]
    count, straggler, steps = len(spent.seconds), spent.straggler, spent.steps or 1
    per = " a step" if spent.steps else ""
    if straggler is not None:
        why = {
            "compute": f", since it computes {short_duration(straggler.longer_s / steps)} longer",
            "input": f", since its input takes {short_duration(straggler.longer_s / steps)} longer",
        }.get(straggler.longer, "")
        [*others] = (each for each in spent.seconds if each != straggler.replica)
        who = "the others wait" if len(others) > 1 else f"replica {others[0]} waits"
        held = short_duration(straggler.held_s / steps)
        parts.append(f"Replica {straggler.replica} is the straggler: {who} {held}{per} for it{why}.")
    elif count > 1 and spent.share("waiting") >= _HELD_UP:
        parts.append("They wait for each other by turns: no replica is the straggler.")
    crowded = [replica for replica, share in sorted(spent.queued.items()) if share >= _QUEUED]
    if crowded:
        share = statistics.fmean(spent.queued[replica] for replica in crowded)
        processors, sharing = spent.processors
        reason = "other threads or programs used the processors"
        if sharing > processors:
            reason = f"{sharing} replicas of a machine share {processors} processor{'s' if processors != 1 else ''}"
        parts.append(
            f"{len(crowded)} of {count} replicas were ready to compute, but had no processor, for {share:.0%} of their "
            f"time: {reason}."
        )
    return " ".join(filter(None, parts))
