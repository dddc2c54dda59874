"""Curves as data: the replicas' values of one name, thinned for drawing, complete in the record, and their faults."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distnb.views.wording import ranges, short_number

__all__ = [
    "MOST_IN_MEAN",
    "MOST_KEPT",
    "MOST_LINES",
    "MOST_POINTS",
    "Curve",
    "Line",
    "Point",
    "ValueHistory",
    "apart",
    "mean_points",
]

MOST_POINTS = 1_000
"""The maximum number of points of a line. Beyond it, neighbours are joined, with their least and greatest value."""

MOST_KEPT = 100_000
"""The maximum number of values in a line's record. Beyond it, the record keeps every second value, and so on."""

MOST_LINES = 8
"""The maximum number of replicas' lines that a reader can distinguish. More are drawn as their mean, in a band."""

MOST_IN_MEAN = 64
"""The maximum number of replicas' lines in a drawn mean, all points of which are sent to the page."""

Point = tuple[float, float, float, float]
"""A step, its value, and the least and greatest finite value of all steps that the point represents."""

_MOST_OPEN = 5_000
_EXPLODED = 100.0  # times the earlier peak
_LEAST_LAG = 10
_SAMPLES = 25
_FAR = 4.0  # times the median distance


class ValueHistory:
    """The values of a line with their steps and times.

    If there are too many, it keeps every second value, then every fourth, and so on.

    Attributes:
        stride: The record has the values whose index, from 0, is a multiple of this.
        count: The number of values so far, including those that were not kept.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self.stride = 1
        self.count = 0
        self.steps, self.values, self.times = array("d"), array("d"), array("d")

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: float, value: float, seconds: float) -> None:
        """Add a value."""
        if self.count % self.stride == 0:
            self.steps.append(step)
            self.values.append(value)
            self.times.append(seconds)
            if len(self) > self._most:
                for each in (self.steps, self.values, self.times):
                    del each[1::2]
                self.stride *= 2
        self.count += 1

    def since(self, number: int) -> Iterator[tuple[float, float, float]]:
        """Yield step, value and time of the kept values from this index on."""
        first = -(-number // self.stride)
        yield from zip(self.steps[first:], self.values[first:], self.times[first:], strict=True)


class Extreme(NamedTuple):
    """A value, and the first step at which it was recorded."""

    value: float
    step: float


class Line:
    """The values that a replica recorded under one name. As the line grows, old points are joined; extremes are kept.

    Attributes:
        points: The points to draw.
        width: The number of values per point. The last point may have fewer.
        record: All values.
        least, greatest: The extremes of the finite values.
        is_bad: True if the latest value is nan or infinite.
        bad: The first value of the latest run of nan or infinite values.
        bad_count: The number of nan and infinite values in all.
        exploded: The first value above a hundred times the peak of some time before, and that peak.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._count = 0  # the number of values in the last point
        self.points: list[Point] = []
        self.width = 1
        self.record = ValueHistory()
        self.least: Extreme | None = None
        self.greatest: Extreme | None = None
        self.bad: Extreme | None = None
        self.bad_count = 0
        self.exploded: tuple[Extreme, float] | None = None
        self.is_bad = False
        # The greatest magnitude of all values, of those until the last shift, and of those until the shift before it.
        # Since the lag grows with the line, steady growth does not count as an explosion (see `_note`).
        self._peak = self._recent_peak = self._old_peak = 0.0
        self._next_shift = _LEAST_LAG  # the count of values at the next shift

    def add(self, step: float, value: float, seconds: float = 0.0) -> None:
        """Add a value; steps grow. `seconds` is its time since 1970."""
        self.record.add(step, value, seconds)
        if math.isfinite(value):
            self._note(step, value)
            self._put((step, value, value, value))
        else:
            if not self.is_bad:
                self.bad = Extreme(value, step)
            self.bad_count += 1
            self.is_bad = True
            self._put((step, value, math.inf, -math.inf))

    def _note(self, step: float, value: float) -> None:
        self.is_bad = False
        if self.least is None or value < self.least.value:
            self.least = Extreme(value, step)
        if self.greatest is None or value > self.greatest.value:
            self.greatest = Extreme(value, step)
        size = abs(value)
        if self.exploded is None and 0 < self._old_peak * _EXPLODED < size:
            self.exploded = Extreme(value, step), self._old_peak
        self._peak = max(self._peak, size)
        if self.record.count >= self._next_shift:
            # The lag is a quarter of the values so far. A counter or a rate during warm-up grows less than a
            # hundredfold in that time, so only growth by powers counts as an explosion.
            self._old_peak, self._recent_peak = self._recent_peak, self._peak
            self._next_shift = self.record.count + max(_LEAST_LAG, self.record.count // 4)

    def _put(self, point: Point) -> None:
        if self._count and self._count < self.width:
            self.points[-1] = _joined(self.points[-1], point)
            self._count += 1
            return
        if len(self.points) >= self._most:
            halves = itertools.zip_longest(self.points[::2], self.points[1::2])
            self.points = [first if second is None else _joined(first, second) for first, second in halves]
            self.width *= 2
        self.points.append(point)
        self._count = 1

    @property
    def last(self) -> float | None:
        """The latest value."""
        return self.points[-1][1] if self.points else None


def _joined(first: Point, second: Point) -> Point:
    """Return one point for two neighbours: the second's step and value, and the extremes of both.

    If the first value is nan or infinite, it is kept instead: its neighbours must not hide it.
    """
    value = second[1] if math.isfinite(first[1]) else first[1]
    return second[0], value, min(first[2], second[2]), max(first[3], second[3])


def mean_points(lines: Mapping[int, Line]) -> list[Point]:
    """Combine many replicas' lines into one: at the first line's steps, the mean of all lines and their extremes.

    Each line contributes its latest point at or before the step.
    """
    places = dict.fromkeys(lines, 0)
    drawn: list[Point] = []
    for step, *_ in lines[min(lines)].points:
        here: list[Point] = []
        for replica, line in lines.items():
            points, place = line.points, places[replica]
            while place + 1 < len(points) and points[place + 1][0] <= step:
                place += 1
            places[replica] = place
            if points[place][0] <= step:
                here.append(points[place])
        values = [point[1] for point in here]
        middle = next((value for value in values if not math.isfinite(value)), sum(values) / len(values))
        drawn.append((step, middle, min(point[2] for point in here), max(point[3] for point in here)))
    return drawn


def apart(lines: Mapping[int, Line]) -> list[int]:
    """Return up to two replicas whose lines are far further from the median than the others', in a sample of steps."""
    first = lines[min(lines)].points
    distance = dict.fromkeys(lines, 0.0)
    for step, *_ in first[:: -(-len(first) // _SAMPLES) or 1]:
        here = {}
        for replica, line in lines.items():
            place = bisect.bisect_right(line.record.steps, step)
            if place and math.isfinite(line.record.values[place - 1]):
                here[replica] = line.record.values[place - 1]
        middle = statistics.median(here.values()) if here else 0.0
        for replica, value in here.items():
            distance[replica] += abs(value - middle)
    far = [replica for replica in lines if distance[replica] > _FAR * statistics.median(distance.values())]
    return sorted(sorted(far, key=lambda replica: -distance[replica])[:2])


@dataclass
class Curve:
    """The lines of one name.

    Attributes:
        lines: The lines by replica.
        differs: True once two replicas recorded different values in the same turn. Until then the values are assumed to
            be reduced, and one thick line represents all replicas.
    """

    name: str
    lines: dict[int, Line] = field(default_factory=dict)
    differs: bool = False
    _turns: Counter[int] = field(default_factory=Counter)  # the number of values by replica
    # The turns that some replica has not reached yet: their step and value, and the number of replicas that have.
    _open: dict[int, tuple[float, float, int]] = field(default_factory=dict)

    def add(self, replica: int, step: float, value: float, total: int, seconds: float = 0.0) -> None:
        """Add a value of a replica."""
        line = self.lines.get(replica)
        if line is None:
            line = self.lines[replica] = Line()
        line.add(step, value, seconds)
        if self.differs:
            return
        self._turns[replica] += 1
        turn = self._turns[replica]
        there, known, reached = self._open.get(turn, (step, value, 0))
        self.differs = there != step or (known != value and not (math.isnan(known) and math.isnan(value)))
        if self.differs:
            self._open.clear()
        elif reached + 1 >= total:
            self._open.pop(turn, None)
        else:
            self._open[turn] = there, known, reached + 1
            if len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]

    def shown(self) -> dict[tuple[int, ...], Line]:
        """Return the lines to draw, each with the replicas that it represents."""
        if self.differs or len(self.lines) < 2:
            return {(replica,): line for replica, line in sorted(self.lines.items())}
        furthest = max(self.lines.values(), key=lambda line: line.points[-1][0])
        return {tuple(sorted(self.lines)): furthest}

    def extremes(self) -> tuple[Extreme | None, Extreme | None]:
        """Return the least and the greatest finite value of all replicas. Of equal values, the earliest counts."""
        least = [line.least for line in self.lines.values() if line.least is not None]
        greatest = [line.greatest for line in self.lines.values() if line.greatest is not None]
        return min(least, default=None), min(greatest, key=lambda each: (-each.value, each.step), default=None)

    def troubles(self) -> list[str]:
        """Return the faults in the values, in words: `loss is nan since step 120 (replica 1)`."""
        found: dict[str, list[int]] = {}
        exploded: list[tuple[float, Line, list[int]]] = []
        for replicas, line in self.shown().items():
            if line.bad is not None:
                found.setdefault(_bad_text(self.name, line, line.bad), []).extend(replicas)
            if line.exploded is not None:
                exploded.append((line.exploded[0].step, line, list(replicas)))
        if exploded:
            _, first, _ = min(exploded, key=lambda each: each[0])
            found[_exploded_text(self.name, first)] = [replica for *_, replicas in exploded for replica in replicas]
        return [text + _whose(replicas, self.lines) for text, replicas in found.items()]


def _bad_text(name: str, line: Line, bad: Extreme) -> str:
    if line.is_bad:
        return f"{name} is {bad.value:g} since step {bad.step:,.0f}"
    more = f" ({line.bad_count:,} such values in all)" if line.bad_count > 1 else ""
    return f"{name} was {bad.value:g} at step {bad.step:,.0f}{more}"


def _exploded_text(name: str, line: Line) -> str:
    assert line.exploded is not None
    there, before = line.exploded
    value, usual = short_number(there.value), short_number(before)
    return f"{name} exploded: {value} at step {there.step:,.0f}, up from at most {usual}"


def _whose(replicas: Sequence[int], all_of_them: Mapping[int, Line]) -> str:
    if len(replicas) == len(all_of_them):
        return ""
    return f" (replica{'s' if len(replicas) > 1 else ''} {', '.join(ranges(replicas))})"
