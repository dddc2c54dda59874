"""The model of the live view: curves, replicas and status. Events in, plain values out; it draws nothing."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distnb.runtime import step_count
from distnb.views.curves import MOST_POINTS, Curve, Line, Point
from distnb.views.runs import History, Run
from distnb.views.timeline_model import TimelineModel
from distnb.views.waits_model import WaitsModel
from distnb.views.watch import Work
from distnb.wire.messages import (
    CleaningUp,
    Died,
    InputFinished,
    InputRequest,
    Live,
    ProgramEnded,
    Status,
    TelemetrySample,
)

__all__ = ["HERE", "MOST_POINTS", "Curve", "Line", "LiveCall", "LiveModel", "Point", "ReplicaRow", "State"]

HERE = -1
"""The number that represents the notebook's process among the numbers of engines and replicas."""


@dataclass
class LiveCall:
    """A call of `distnb.live` in the notebook's own process.

    Attributes:
        point: {name: number or {replica: number}}.
        place: The training step, of this process and of the replicas that it called, and the number of the `run` call.
        seconds: The time of the call, since 1970.
        epochs, reading: As in `wire.messages.TelemetrySample`.
    """

    point: Mapping[str, Any]
    place: step_count.StepPosition
    run: str = ""
    seconds: float = 0.0
    epochs: tuple[tuple[int, int], ...] = ()
    reading: step_count.Reading | None = None


State = Literal["starting", "running", "asks", "cleaning up", "ended", "stopped", "interrupted", "failed", "died"]
"""A replica "asks" while it waits for a line from the user, as at a debugger's prompt. It is "cleaning up" while it
handles the user's stop, "stopped" after another replica failed, and "interrupted" after the user ended the program."""

_ENDS: dict[str, State] = {"ok": "ended", "error": "failed", "aborted": "stopped", "interrupted": "interrupted"}

_RATE_WINDOW_S = 2.0
_BATCHES_WINDOW_S = 10.0


@dataclass
class ReplicaRow:
    """The latest state and measurements of one replica."""

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

    def measure(self, sample: TelemetrySample, steps_before: int, examples_before: int) -> None:
        """Apply a sample, without the steps and examples counted before the cell."""
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
        """Return the rate over the last two seconds, or over the whole program once it has ended; 0 if none."""
        if len(self._history) < 2 or self._first is None:
            return 0.0
        then, before = self._history[0] if self.state == "running" else self._first
        now, examples = self._history[-1]
        return (examples - before) / (now - then) if now > then else 0.0


class LiveModel:
    """The content of one cell's view: curves by name in the order of their first values, and rows by replica.

    Args:
        title: The strategy's word, for the status line.
        counted_before: (steps, examples) that each engine, and the notebook as `HERE`, had counted when the cell began.
        devices: The device of each engine.
        name: The run's name for values without one: the cell's, such as "In[3]".
        history: The runs of earlier cells. This cell's runs are added to it.

    Attributes:
        is_distributed: True if the whole cell runs under the strategy.
        runs: The runs of this cell, in the order in which they began.
        run_name: The run of values that are recorded without a run's name; "" for the cell's own.
        epochs: The training steps of this cell before each iteration over the training data, and its number.
        reading: The progress of the latest such iteration.
        work: The work that workers do for the cell, if there is any. The replicas are then the workers'.
        timeline: The model of how replicas spend their time.
        waits: The model of the operations that replicas wait in.
        waited: Sentences about the waits of replicas when a program ended with an error, an interrupt or a death.
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
        self.is_distributed = False
        self.runs: dict[str, Run] = {}
        self.history = history or History()
        self.epochs: dict[int, int] = {}
        self._begun: dict[int, int] = {}  # like `epochs`, but with the numbers of the datasets' own iterations
        self.reading: step_count.Reading | None = None
        self.rows: dict[int, ReplicaRow] = {}
        self._rows_of: defaultdict[int, dict[int, ReplicaRow]] = defaultdict(dict)  # by engine, the rows by replica
        self.work: Work | None = None
        self.timeline = TimelineModel()
        self.waits = WaitsModel()
        self.waited: list[str] = []
        self.state: State = "starting"
        self.began: float | None = None
        self.ended_at: float | None = None
        self._cleaned_up = 0  # the latest program that handled the user's stop
        self._name = name
        self.run_name = ""
        self._latest = Run(name=name)
        self._read_before: step_count.Reading | None = None
        self._latest_step: defaultdict[int, int] = defaultdict(int)  # the step of the latest value of each replica
        self._batches: deque[tuple[float, int]] = deque(maxlen=64)  # seconds, batches of all epochs
        self._counted_before = dict(counted_before or {})
        self._devices = dict(devices or {})

    def feed(self, event: Any, now: float) -> None:
        """Handle an event of `wire.messages`. Events that concern no view are ignored."""
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
            if row.state == "cleaning up" and event.program > self._cleaned_up:
                row.state = self.state = "running"  # the interrupt was caught in a function that the cell called
            before = self._before(event.engine, event.steps, event.examples)
            row.measure(event, *before)
            self.timeline.feed(event, before[0])
            self.waits.feed(event, now)
            if self.work is None and event.replica == 0:  # each worker reads its own data
                self._read(event.epochs, before[0], event.reading and step_count.Reading._make(event.reading), now)
        elif isinstance(event, Status):
            self._status(event)
        elif isinstance(event, InputRequest | InputFinished):
            self._row(event.replica, event.engine).state = "asks" if isinstance(event, InputRequest) else "running"
            (self.waits.asking.add if isinstance(event, InputRequest) else self.waits.asking.discard)(event.replica)
        elif isinstance(event, CleaningUp):
            self._row(event.replica, event.engine).state = self.state = "cleaning up"
            self._cleaned_up = event.program
        elif isinstance(event, ProgramEnded | Died):
            if isinstance(event, Died) or event.status != "ok":
                self.waited = self.waited or [f"When it ended: {line}" for line in self.waits.before_the_end(now)]
            self._replica_ended(event)

    def begin_here(self, now: float) -> None:
        """Note that the cell computes in the notebook's own process."""
        if self.began is None:
            self.began = now
        if self.state == "starting":
            self.state = "running"

    def follow(self, work: Work, title: str, now: float) -> None:
        """Follow the work that workers do for the cell."""
        self.work = work
        self.waits.who = "worker" if work.replicas_per_worker == 1 else "replica"
        self.title = self.title or title
        self.begin_here(now)

    def sampled(self, now: float) -> None:
        """Apply a new sample of the work that is followed."""
        if self.work is not None and self.work.reading is not None:
            self._read((), 0, self.work.reading, now)

    def feed_local(self, call: LiveCall, now: float) -> None:
        """Handle a call of `distnb.live` in the notebook's own process."""
        self.begin_here(now)
        step, number = call.place
        before = self._before(HERE, step)[0]
        if not self.rows and self.work is None:
            self._read(call.epochs, before, call.reading, now)
        components: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for name, value in call.point.items():
            own = value if isinstance(value, Mapping) else {0: value}
            for replica, component in own.items():
                components[replica][name] = float(component)
            for replica, row in self.rows.items():
                # A single number is a reduced value and belongs to all replicas.
                component = own.get(replica) if isinstance(value, Mapping) else value
                if component is not None:
                    row.values[name] = float(component)
        self._put(call.run, HERE, (max(step - before, 1), number), components, call.seconds)

    def _put(
        self,
        run_name: str,
        source: int,
        place: step_count.StepPosition,
        components: Mapping[int, Mapping[str, float]],
        seconds: float,
    ) -> None:
        """Add values by replica, which a source (a replica or `HERE`) recorded at a training step of this cell."""
        step, call = place
        run = self._run(run_name or self.run_name, self._latest_step[source])
        self._latest_step[source] = max(step, self._latest_step[source])
        names = {name for values in components.values() for name in values}
        at = run.axes[source].put((max(step - run.base, 0), call), names)
        # One replica's events may arrive long before those of the replicas with which its values are compared.
        workers = 0 if self.work is None else self.work.workers
        total = max(2, len(self.rows), workers)
        for replica, values in components.items():
            for name, value in values.items():
                run.curve(name).add(replica, at, value, total, seconds)

    def _run(self, name: str, steps: int) -> Run:
        run = self.runs.get(name)
        if run is None:
            base = steps if self.runs else 0
            run = self.runs[name] = Run(name=name or self._name, is_named=bool(name), base=base)
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
            self.reading = shown if self.epochs else None  # otherwise the reading belongs to an earlier cell
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
            # A new process has replaced the engine's, and counts from zero.
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
        if self.work is not None and self.work.failed:
            return "failed"
        return "interrupted" if any(row.state == "interrupted" for row in self.rows.values()) else "failed"

    def _replica_ended(self, event: ProgramEnded | Died) -> None:
        for row in self._rows_of[event.engine].values():
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
            row = self.rows[replica] = ReplicaRow(replica=replica, engine=engine, device=self._devices.get(engine, ""))
        self._rows_of[engine][replica] = row
        return row

    @property
    def curves(self) -> dict[str, Curve]:
        """The curves of the latest run, by name."""
        return self._latest.curves

    def charts(self) -> dict[str, list[Run]]:
        """Return the charts to draw: each name with the runs that have it, this cell's runs last.

        If the cell names its runs, earlier named runs are drawn, too, for comparison.
        """
        own = list(self.runs.values())
        kept = [run for run in self.history.runs.values() if run.is_named and run not in own]
        runs = [*(kept if any(run.is_named for run in own) else []), *own]
        names = dict.fromkeys(name for run in own for name in run.curves)
        return {name: [run for run in runs if name in run.curves] for name in names}

    def marks(self, run: Run) -> dict[int, int]:
        """Return the step of a run of this cell before each epoch, and the epoch's number."""
        return {steps - run.base: number for steps, number in self.epochs.items() if steps >= run.base}

    def troubles(self) -> list[str]:
        """Return the faults in this cell's values, in words."""
        found = []
        for run in self.runs.values():
            whose = f"{run.name}: " if len(self.runs) > 1 else ""
            found += [f"{whose}{text}" for curve in run.curves.values() for text in curve.troubles()]
        return found

    def seconds_left(self) -> tuple[float, bool] | None:
        """Return the remaining seconds at the recent rate, and whether they are for all epochs or only the current one.

        Return None if the remaining work is unknown, and once the cell has ended.
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
        """Return the running time of the cell."""
        if self.began is None:
            return 0.0
        return (now if self.ended_at is None else self.ended_at) - self.began

    def end(self, now: float, *, failed: bool) -> None:
        """End the cell."""
        self.ended_at = now
        self.waits.ended(self.rows)
        for row in self.rows.values():
            # A call from an ordinary cell reports its end by its reply alone, so no event has changed the row's state.
            if row.state in ("running", "asks", "cleaning up"):
                row.state = "ended"
        if failed:
            self.state = self._failure()
        elif self.state in ("starting", "running", "cleaning up"):
            self.state = "ended"

    @property
    def steps(self) -> int:
        """The steps that every replica has done, or the sum over workers."""
        if self.work is not None:
            return self.work.steps
        return min((row.steps for row in self.rows.values()), default=0)


def _numbered(begun: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Assign numbers to the epochs of a cell.

    A program may distribute a dataset again for each epoch. Every iteration then has number 0, and is counted here.
    Example: {0: 0, 10: 0, 20: 1} gives {0: 0, 10: 1, 20: 2}.

    Args:
        begun: The step before each iteration, and its number among those of its dataset.

    Returns:
        The step and the number of each epoch, and the difference to the numbers of the latest dataset.
    """
    numbered: dict[int, int] = {}
    further, last = 0, None
    for step, number in sorted(begun.items()):
        if number == 0:
            further = further + 1 if last == 0 else 0
        numbered[step], last = number + further, number
    return numbered, further
