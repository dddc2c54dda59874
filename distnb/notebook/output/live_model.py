"""What the live view shows, as data: curves, replicas, status. Events in, plain values out; it draws nothing."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distnb.notebook.output.closures_model import ClosuresModel
from distnb.runtime import step_count
from distnb.wire.messages import Asks, Died, GoesOn, Live, ProgramEnded, Status, TelemetrySample

__all__ = ["HERE", "MOST_POINTS", "Curve", "Line", "LiveModel", "Point", "State"]

MOST_POINTS = 600
"""A line keeps at most this many points: then neighbours are joined, with their least and greatest value."""

HERE = -1
"""Stands for the notebook where engines are named by their numbers."""

Point = tuple[float, float, float, float]
"""Step, value, and the least and greatest finite value of the steps that the point stands for."""

State = Literal["starting", "running", "asks", "ended", "stopped", "interrupted", "failed", "died"]
"""A replica "asks" while it waits for a line of the user's, as at a debugger's prompt. It is "stopped" when another one
failed, and "interrupted" when the user ended the program."""

_ENDS: dict[str, State] = {"ok": "ended", "error": "failed", "aborted": "stopped", "interrupted": "interrupted"}

_RATE_WINDOW_S = 2.0
_MOST_OPEN = 5_000


class Line:
    """One replica's values of one name, at most so many points: old ones are joined as it grows, extremes are kept."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._width = 1  # steps that one point stands for
        self._count = 0  # of those, in the last point
        self.points: list[Point] = []

    def add(self, step: float, value: float) -> None:
        """Add a value; steps grow."""
        point = (step, value, value, value) if math.isfinite(value) else (step, value, math.inf, -math.inf)
        if self._count and self._count < self._width:
            self.points[-1] = _joined(self.points[-1], point)
            self._count += 1
            return
        if len(self.points) >= self._most:
            halves = itertools.zip_longest(self.points[::2], self.points[1::2])
            self.points = [first if second is None else _joined(first, second) for first, second in halves]
            self._width *= 2
        self.points.append(point)
        self._count = 1

    @property
    def last(self) -> float | None:
        """The latest value."""
        return self.points[-1][1] if self.points else None


def _joined(first: Point, second: Point) -> Point:
    """One point for two neighbours: the latter's step and value, and the extremes of both.

    A value that is nan or infinite is not hidden by those around it: it is the joined point's.
    """
    value = second[1] if math.isfinite(first[1]) else first[1]
    return second[0], value, min(first[2], second[2]), max(first[3], second[3])


@dataclass
class Curve:
    """All that is known of one name.

    Attributes:
        lines: By replica.
        differs: Whether two replicas told different values in the same turn. While they never did, the values are
            taken to be reduced ones, and one thick line stands for all.
    """

    name: str
    lines: dict[int, Line] = field(default_factory=dict)
    differs: bool = False
    _turns: Counter[int] = field(default_factory=Counter)  # by replica: how often it has told one
    _open: dict[int, tuple[float, float]] = field(default_factory=dict)  # turns that not every replica has come to

    def add(self, replica: int, step: float, value: float, total: int) -> None:
        """Add a value of a replica."""
        self.lines.setdefault(replica, Line()).add(step, value)
        if self.differs:
            return
        self._turns[replica] += 1
        turn = self._turns[replica]
        there, known = self._open.setdefault(turn, (step, value))
        self.differs = there != step or (known != value and not (math.isnan(known) and math.isnan(value)))
        if self.differs:
            self._open.clear()
        elif len(self._turns) == total and turn <= min(self._turns.values()):
            del self._open[turn]
        elif len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def shown(self) -> dict[tuple[int, ...], Line]:
        """The lines to draw, each with the replicas that it stands for."""
        if self.differs or len(self.lines) < 2:
            return {(replica,): line for replica, line in sorted(self.lines.items())}
        furthest = max(self.lines.values(), key=lambda line: line.points[-1][0])
        return {tuple(sorted(self.lines)): furthest}


@dataclass
class ReplicaRow:
    """What is known of one replica."""

    replica: int
    engine: int | None = None
    device: str = ""
    state: State = "running"
    steps: int = 0
    examples: int = 0
    rss_nbytes: int | None = None
    device_nbytes: int | None = None
    where: str = ""
    values: dict[str, float] = field(default_factory=dict)
    _history: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))  # seconds, examples
    _first: tuple[float, int] | None = None

    def measured(self, sample: TelemetrySample, steps_before: int, examples_before: int) -> None:
        """Take a sample; what had been counted before the cell is taken off."""
        self.steps, self.examples = sample.steps - steps_before, sample.examples - examples_before
        self.where = sample.where or self.where
        self.rss_nbytes, self.device_nbytes = sample.rss_nbytes, sample.device_nbytes
        if self._history and sample.seconds < self._history[-1][0]:
            self._history.clear()
        self._history.append((sample.seconds, self.examples))
        if self._first is None or self.examples == 0:
            self._first = self._history[-1]
        while len(self._history) > 2 and self._history[1][0] < sample.seconds - _RATE_WINDOW_S:
            self._history.popleft()

    def examples_per_second(self) -> float:
        """Over the last two seconds; once ended, over all. 0 where nothing was counted."""
        if len(self._history) < 2 or self._first is None:
            return 0.0
        then, before = self._history[0] if self.state == "running" else self._first
        now, examples = self._history[-1]
        return (examples - before) / (now - then) if now > then else 0.0


class LiveModel:
    """Everything that one cell's view shows: curves by name, in the order in which they came, and rows by replica.

    Args:
        title: The strategy's word, for the status line.
        counted_before: (steps, examples) that each engine, and the notebook as `HERE`, had counted when the cell began.
        devices: Of each engine.

    Attributes:
        closures: What a coordinator does, where the cell uses one: then replicas are its workers.
    """

    def __init__(
        self,
        title: str = "",
        counted_before: Mapping[int, tuple[int, int]] | None = None,
        devices: Mapping[int, str] | None = None,
    ) -> None:
        self.title = title
        self.curves: dict[str, Curve] = {}
        self.rows: dict[int, ReplicaRow] = {}
        self.closures: ClosuresModel | None = None
        self.state: State = "starting"
        self.began: float | None = None
        self.ended_at: float | None = None
        self._axes: defaultdict[int, step_count.Axis] = defaultdict(step_count.Axis)  # by replica, and HERE
        self._counted_before = dict(counted_before or {})
        self._devices = dict(devices or {})

    def feed(self, event: Any, now: float) -> None:
        """Take an event of `wire.messages`; those that concern no view are passed over."""
        if self.began is None:
            self.began = now
        if isinstance(event, Live):
            row = self._row(event.replica, event.engine)
            for step, call, values in event.points:
                at = self._axes[event.replica].put((step - self._before(event.engine, step)[0], call), values)
                for name, value in values.items():
                    self._add(event.replica, name, at, value)
                row.values.update(values)
        elif isinstance(event, TelemetrySample):
            row = self._row(event.replica, event.engine)
            row.measured(event, *self._before(event.engine, event.steps, event.examples))
        elif isinstance(event, Status):
            self._status(event)
        elif isinstance(event, Asks | GoesOn):
            self._row(event.replica, event.engine).state = "asks" if isinstance(event, Asks) else "running"
        elif isinstance(event, ProgramEnded | Died):
            self._replica_ended(event)

    def follow(self, closures: ClosuresModel, title: str, now: float) -> None:
        """The cell uses a coordinator."""
        self.closures = closures
        self.title = self.title or title
        if self.began is None:
            self.began = now
        if self.state == "starting":
            self.state = "running"

    def feed_here(self, point: Mapping[str, Any], place: step_count.Place, now: float) -> None:
        """Take a call of `distnb.live` in the notebook's own process: {name: number or {replica: number}}.

        The notebook does not follow the steps of replicas that it calls: a name that is told again begins the next.
        """
        if self.began is None:
            self.began = now
        if self.state == "starting":
            self.state = "running"
        step, call = place
        at = self._axes[HERE].put((max(step - self._before(HERE, step)[0], 1), call), point)
        for name, value in point.items():
            own = value if isinstance(value, Mapping) else {0: value}
            for replica, component in own.items():
                self._add(replica, name, at, float(component))
            for replica, row in self.rows.items():
                # One number is all replicas': a reduced one.
                component = own.get(replica) if isinstance(value, Mapping) else value
                if component is not None:
                    row.values[name] = float(component)

    def _before(self, engine: int, steps: int, examples: int | None = None) -> tuple[int, int]:
        before = self._counted_before.get(engine, (0, 0))
        if steps < before[0] or (examples is not None and examples < before[1]):
            # Another process has taken the engine's place, and counts from the beginning.
            before = self._counted_before[engine] = (0, 0)
        return before

    def _status(self, event: Status) -> None:
        if event.state == "started":
            self.state = "running"
            for replica, engine in enumerate(event.team.engines):
                row = self._row(replica, engine)
                row.state, row.device = "running", str(event.team.devices[replica])
        else:
            self.state = self._failure() if event.text else "ended"

    def _failure(self) -> State:
        if self.closures is not None and (self.closures.counts()["failed"] or self.closures.status.lost_servers):
            return "failed"  # the other closures were ended for that
        return "interrupted" if any(row.state == "interrupted" for row in self.rows.values()) else "failed"

    def _replica_ended(self, event: ProgramEnded | Died) -> None:
        for row in self.rows.values():
            if row.engine == event.engine:
                if isinstance(event, Died):
                    row.state, row.where = "died", event.exit_status
                else:
                    row.state, row.where = _ENDS[event.status], event.where or row.where

    def _row(self, replica: int, engine: int) -> ReplicaRow:
        if self.state == "starting":
            self.state = "running"
        row = self.rows.get(replica)
        if row is None:
            row = self.rows[replica] = ReplicaRow(replica, engine, self._devices.get(engine, ""))
        row.engine = engine
        return row

    def _add(self, replica: int, name: str, step: float, value: float) -> None:
        curve = self.curves.setdefault(name, Curve(name))
        curve.add(replica, step, value, max(1, len(self.rows)))

    def seconds(self, now: float) -> float:
        """How long the cell has run."""
        if self.began is None:
            return 0.0
        return (now if self.ended_at is None else self.ended_at) - self.began

    def end(self, now: float, *, failed: bool) -> None:
        """The cell ended."""
        self.ended_at = now
        for row in self.rows.values():
            if row.state in (
                "running",
                "asks",
            ):  # calls from an ordinary cell tell of their ends by their replies alone
                row.state = "ended"
        if failed:
            self.state = self._failure()
        elif self.state in ("starting", "running"):
            self.state = "ended"

    @property
    def steps(self) -> int:
        """Steps that every replica has done; those of workers are added up."""
        if self.closures is not None:
            return self.closures.steps
        return min((row.steps for row in self.rows.values()), default=0)
