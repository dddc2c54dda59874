"""What the live view shows, as data: curves, replicas, status. Events in, plain values out; it draws nothing."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distnb.notebook.views.closures_model import ClosuresModel
from distnb.notebook.views.curves import MOST_POINTS, Curve, Line, Point
from distnb.notebook.views.runs import History, Run
from distnb.notebook.views.timeline_model import TimelineModel
from distnb.notebook.views.waits_model import WaitsModel
from distnb.runtime import step_count
from distnb.wire.messages import Asks, Died, GoesOn, Live, ProgramEnded, Status, TelemetrySample

__all__ = ["HERE", "MOST_POINTS", "Curve", "Line", "LiveModel", "Point", "ReplicaRow", "State", "Told"]

HERE = -1
"""Stands for the notebook where engines are named by their numbers."""


@dataclass
class Told:
    """A call of `distnb.live` in the notebook's own process.

    Attributes:
        point: {name: number or {replica: number}}.
        place: Training step of this process, and those of replicas that it called; and the call of `run`.
        seconds: Since 1970.
        epochs, reading: As in `wire.messages.TelemetrySample`.
    """

    point: Mapping[str, Any]
    place: step_count.StepPosition
    run: str = ""
    seconds: float = 0.0
    epochs: tuple[tuple[int, int], ...] = ()
    reading: step_count.Reading | None = None


State = Literal["starting", "running", "asks", "ended", "stopped", "interrupted", "failed", "died"]
"""A replica "asks" while it waits for a line of the user's, as at a debugger's prompt. It is "stopped" when another one
failed, and "interrupted" when the user ended the program."""

_ENDS: dict[str, State] = {"ok": "ended", "error": "failed", "aborted": "stopped", "interrupted": "interrupted"}

_RATE_WINDOW_S = 2.0
_BATCHES_WINDOW_S = 10.0


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
        name: Of the run of what is told without the name of a run: the cell's, "In[3]".
        history: Runs of earlier cells, and where this cell's are kept.

    Attributes:
        runs: This cell's, in the order in which they began.
        run_name: The run of values that are told without the name of one; "" for none, which is the cell's.
        epochs: The training steps of this cell before each iteration over the data that is trained on, and its number.
        reading: How far the latest such iteration has come.
        closures: What a coordinator does, where the cell uses one: then replicas are its workers.
        timeline: How the replicas spend their time.
        waits: What they wait in.
        waited: Who waited for whom, in words, when a program ended that did not end well.
    """

    def __init__(
        self,
        title: str = "",
        counted_before: Mapping[int, tuple[int, int]] | None = None,
        devices: Mapping[int, str] | None = None,
        name: str = "",
        history: History | None = None,
    ) -> None:
        self.title = title
        self.runs: dict[str, Run] = {}
        self.history = history or History()
        self.epochs: dict[int, int] = {}
        self._begun: dict[int, int] = {}  # as datasets number their iterations
        self.reading: step_count.Reading | None = None
        self.rows: dict[int, ReplicaRow] = {}
        self.closures: ClosuresModel | None = None
        self.timeline = TimelineModel()
        self.waits = WaitsModel()
        self.waited: list[str] = []
        self.state: State = "starting"
        self.began: float | None = None
        self.ended_at: float | None = None
        self._name = name
        self.run_name = ""
        self._latest = Run(name)
        self._read_before: step_count.Reading | None = None
        self._told_at: defaultdict[int, int] = defaultdict(int)  # the latest step at which each replica told a value
        self._batches: deque[tuple[float, int]] = deque(maxlen=64)  # seconds, batches of all epochs
        self._counted_before = dict(counted_before or {})
        self._devices = dict(devices or {})

    def feed(self, event: Any, now: float) -> None:
        """Take an event of `wire.messages`; those that concern no view are passed over."""
        if self.began is None:
            self.began = now
        if isinstance(event, Live):
            row = self._row(event.replica, event.engine)
            times = event.times or (time.time(),) * len(event.points)
            for (step, call, values), seconds in zip(event.points, times, strict=True):
                place = (step - self._before(event.engine, step)[0], call)
                self._put(event.run, event.replica, place, {event.replica: values}, seconds)
                row.values.update(values)
        elif isinstance(event, TelemetrySample):
            row = self._row(event.replica, event.engine)
            before = self._before(event.engine, event.steps, event.examples)
            row.measured(event, *before)
            self.timeline.feed(event, before[0])
            self.waits.feed(event, now)
            if self.closures is None and event.replica == 0:  # workers read each their own
                self._read(event.epochs, before[0], event.reading and step_count.Reading(*event.reading), now)
        elif isinstance(event, Status):
            self._status(event)
        elif isinstance(event, Asks | GoesOn):
            self._row(event.replica, event.engine).state = "asks" if isinstance(event, Asks) else "running"
            (self.waits.asking.add if isinstance(event, Asks) else self.waits.asking.discard)(event.replica)
        elif isinstance(event, ProgramEnded | Died):
            if isinstance(event, Died) or event.status != "ok":
                self.waited = self.waited or [f"When it ended: {line}" for line in self.waits.before_the_end(now)]
            self._replica_ended(event)

    def follow(self, closures: ClosuresModel, title: str, now: float) -> None:
        """The cell uses a coordinator."""
        self.closures = closures
        self.waits.who = "worker" if closures.status.replicas_per_worker == 1 else "replica"
        self.title = self.title or title
        if self.began is None:
            self.began = now
        if self.state == "starting":
            self.state = "running"

    def sampled(self, now: float) -> None:
        """The coordinator that is followed was looked at."""
        if self.closures is not None and self.closures.reading is not None:
            self._read((), 0, self.closures.reading, now)

    def feed_here(self, told: Told, now: float) -> None:
        """Take a call of `distnb.live` in the notebook's own process."""
        if self.began is None:
            self.began = now
        if self.state == "starting":
            self.state = "running"
        step, call = told.place
        before = self._before(HERE, step)[0]
        if not self.rows and self.closures is None:
            self._read(told.epochs, before, told.reading, now)
        components: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for name, value in told.point.items():
            own = value if isinstance(value, Mapping) else {0: value}
            for replica, component in own.items():
                components[replica][name] = float(component)
            for replica, row in self.rows.items():
                # One number is all replicas': a reduced one.
                component = own.get(replica) if isinstance(value, Mapping) else value
                if component is not None:
                    row.values[name] = float(component)
        self._put(told.run, HERE, (max(step - before, 1), call), components, told.seconds)

    def _put(
        self,
        run_name: str,
        teller: int,
        place: step_count.StepPosition,
        components: Mapping[int, Mapping[str, float]],
        seconds: float,
    ) -> None:
        """Add values, by replica, that a replica or the notebook told at a training step of this cell."""
        step, call = place
        run = self._run(run_name or self.run_name, self._told_at[teller])
        self._told_at[teller] = max(step, self._told_at[teller])
        names = {name for values in components.values() for name in values}
        at = run.axes[teller].put((max(step - run.base, 0), call), names)
        # The first that is heard of may have told much before another begins, with which it is to be compared.
        workers = 0 if self.closures is None else len(self.closures.status.workers)
        total = max(2, len(self.rows), workers)
        for replica, values in components.items():
            for name, value in values.items():
                run.curve(name).add(replica, at, value, total, seconds)

    def _run(self, name: str, steps: int) -> Run:
        run = self.runs.get(name)
        if run is None:
            base = steps if self.runs else 0
            run = self.runs[name] = Run(name or self._name, is_named=bool(name), base=base)
            self.history.begin(run)
        self._latest = run
        return run

    def _read(
        self, epochs: Iterable[tuple[int, int]], before: int, reading: step_count.Reading | None, now: float
    ) -> None:
        self._begun |= {steps - before: number for steps, number in epochs if steps >= before}
        self.epochs, further = _numbered(self._begun)
        self._read_before = self._read_before or reading
        shown = None if reading is None else reading._replace(epoch=reading.epoch + further)
        if shown is None or shown.batches is None or (reading == self._read_before and not self.epochs):
            self.reading = shown if self.epochs else None  # else it is an earlier cell's
            return
        self.reading = shown
        batch = shown.epoch * shown.batches + shown.batch
        if self._batches and batch < self._batches[-1][1]:
            self._batches.clear()
        if not self._batches or batch > self._batches[-1][1]:
            self._batches.append((now, batch))
        while len(self._batches) > 2 and self._batches[1][0] < now - _BATCHES_WINDOW_S:
            self._batches.popleft()

    def _before(self, engine: int, steps: int, examples: int | None = None) -> tuple[int, int]:
        before = self._counted_before.get(engine, (0, 0))
        if steps < before[0] or (examples is not None and examples < before[1]):
            # Another process has taken the engine's place, and counts from the beginning.
            before = self._counted_before[engine] = (0, 0)
        return before

    def _status(self, event: Status) -> None:
        if event.state == "started":
            self.state, self.waited = "running", []
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
                self.waits.ended([row.replica])
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

    @property
    def curves(self) -> dict[str, Curve]:
        """The latest run's, by name."""
        return self._latest.curves

    def charts(self) -> dict[str, list[Run]]:
        """What there is to draw: each name with the runs that have it, this cell's last.

        A cell that names its runs is compared with earlier ones that were named.
        """
        own = list(self.runs.values())
        kept = [run for run in self.history.runs.values() if run.is_named and run not in own]
        runs = [*(kept if any(run.is_named for run in own) else []), *own]
        names = dict.fromkeys(name for run in own for name in run.curves)
        return {name: [run for run in runs if name in run.curves] for name in names}

    def marks(self, run: Run) -> dict[int, int]:
        """The step of a run of this cell before each epoch, and the epoch's number."""
        return {steps - run.base: number for steps, number in self.epochs.items() if steps >= run.base}

    def troubles(self) -> list[str]:
        """What is wrong with the values of this cell, in words."""
        told = []
        for run in self.runs.values():
            whose = f"{run.name}: " if len(self.runs) > 1 else ""
            told += [f"{whose}{text}" for curve in run.curves.values() for text in curve.troubles()]
        return told

    def seconds_left(self) -> tuple[float, bool] | None:
        """How long it takes at the rate of the last seconds, and whether of the whole training, or of this epoch only.

        None where it is not known how much is left, and once the cell has ended.
        """
        reading = self.reading
        if reading is None or reading.batches is None or self.ended_at is not None or len(self._batches) < 2:
            return None
        (then, before), (now, batch) = self._batches[0], self._batches[-1]
        if now <= then:
            return None
        left = reading.batches - reading.batch
        if reading.epochs is not None:
            left += max(reading.epochs - reading.epoch - 1, 0) * reading.batches
        return left * (now - then) / (batch - before), reading.epochs is not None

    def seconds(self, now: float) -> float:
        """How long the cell has run."""
        if self.began is None:
            return 0.0
        return (now if self.ended_at is None else self.ended_at) - self.began

    def end(self, now: float, *, failed: bool) -> None:
        """The cell ended."""
        self.ended_at = now
        self.waits.ended(self.rows)
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


def _numbered(begun: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Number the epochs of a cell: of a dataset that is distributed anew for each epoch, every iteration is the first.

    Args:
        begun: Step before each iteration, and its number among those of its dataset.

    Returns:
        Step and number of each epoch; and by how much the latest dataset's numbers are greater.
    """
    numbered: dict[int, int] = {}
    further, last = 0, None
    for step, number in sorted(begun.items()):
        if number == 0:
            further = further + 1 if last == 0 else 0
        numbered[step], last = number + further, number
    return numbered, further
