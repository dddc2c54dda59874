"""The view of the replicas in a notebook cell: merged output, and the live view once there is something to show."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from distnb.notebook.output.output_merger import OutputMerger
from distnb.topology import Team
from distnb.views.live_model import LiveCall, LiveModel
from distnb.views.runs import History
from distnb.views.watch import Watch
from distnb.widgets.live_views import LiveView
from distnb.widgets.publisher import Publisher
from distnb.wire.messages import (
    CleaningUp,
    Died,
    Display,
    InputFinished,
    InputRequest,
    Live,
    Output,
    ProgramEnded,
    Status,
    TelemetrySample,
)

__all__ = ["VIEW_EVENTS", "CellView"]

VIEW_EVENTS = (
    Output,
    Display,
    Live,
    TelemetrySample,
    Status,
    CleaningUp,
    ProgramEnded,
    Died,
    InputRequest,
    InputFinished,
)
"""The events that `CellView.feed` handles."""

_APPEAR_S = 0.5  # a cell that ends sooner and draws nothing gets no live view
_SHARE = 0.1  # the largest share of a processor that drawing takes while a cell runs
_KEPT_CHARACTERS = 4_000_000

MakeView = Callable[[LiveModel, Publisher, str], LiveView]


class CellView:
    """The view of the programs that one cell runs, fed with their events. Used by one thread at a time.

    Args:
        publisher: The destination of the cell's output.
        make_view: A function that creates the live view.
        replicas: The number of replicas of a program that was not announced (`strategy.run` from an ordinary cell).
        counted_before: (steps, examples) that each engine, and the notebook, had counted before.
        devices: The device of each engine.
        workers: Each engine's number among the replicas, in a cluster whose engines have tasks. It marks the output of
            programs that were not announced.
        who: The noun for these numbers in marks, "worker ", or "" for replicas.
        name: The cell's name, see `LiveModel`.
        history: The history that keeps the cell's runs, see `LiveModel`.

    Attributes:
        written: The text that each replica wrote, unmerged; limited to the end of a very long text.
        has_old_replicas: True if the cluster of its replicas has ended.
    """

    def __init__(
        self,
        publisher: Publisher,
        make_view: MakeView,
        replicas: int = 1,
        counted_before: Mapping[int, tuple[int, int]] | None = None,
        devices: Mapping[int, str] | None = None,
        workers: Mapping[int, int] | None = None,
        who: str = "worker ",
        name: str = "",
        history: History | None = None,
    ) -> None:
        self.publisher = publisher
        publisher.on_clear = self._reappear
        self.model = LiveModel(counted_before=counted_before, devices=devices, name=name, history=history)
        self.written: dict[int, str] = {}
        self.quiet = False
        self.has_old_replicas = False
        self._name = f"distnb-{uuid.uuid4().hex[:12]}"
        self._make_view = make_view
        self._replicas = replicas
        self._workers = workers or {}
        self._who = who
        self._watch: Watch | None = None
        self._view: LiveView | None = None
        self._mergers: dict[int, OutputMerger] = {}  # by program; 0 for all programs that were not announced
        self._running: dict[int, Team] = {}  # programs that were announced
        self._changed = False
        self._next_draw = 0.0
        self._now = 0.0

    # -- events in -------------------------------------------------------------------------------------------------

    def feed(self, event: Any, now: float) -> None:
        """Handle an event of `wire.messages`."""
        self._now = now
        if isinstance(event, Output):
            text = self.written.get(event.replica, "") + event.text
            self.written[event.replica] = text[-_KEPT_CHARACTERS:]
        if isinstance(event, Output | Display):
            number = event.program if event.program in self._mergers else 0
            if number not in self._mergers:
                self._mergers[0] = self._unannounced()
            worker = self._workers.get(event.engine, event.replica) if number == 0 else event.replica
            self._mergers[number].feed(event if worker == event.replica else replace(event, replica=worker), now)
            return
        self.model.feed(event, now)
        self._changed = True
        if isinstance(event, Status):
            self._status(event, now)
        elif isinstance(event, ProgramEnded):
            self._replica_ended(event.program, event.engine, now)
        elif isinstance(event, Died):
            for program in self._running:
                self._replica_ended(program, event.engine, now)

    def _unannounced(self) -> OutputMerger:
        if self._workers:
            return OutputMerger(max(self._workers.values()) + 1, f"{self._name}-0", self._who)
        return OutputMerger(self._replicas, f"{self._name}-0")

    def watches(self, subject: object) -> bool:
        """Return whether the view samples this object now and will continue to."""
        return self._watch is not None and self._watch.subject is subject and self._watch.due

    def watch(self, watch: Watch, now: float) -> None:
        """Sample an object that the cell uses, from now on."""
        self._now = now
        if self._watch is None or self._watch.subject is not watch.subject:
            self._watch = watch
            watch.add_to(self.model, now)
        self._watch.due = True

    def feed_local(self, call: LiveCall, now: float) -> None:
        """Handle a call of `distnb.live` in the notebook's process."""
        self._now = now
        self.model.feed_local(call, now)
        self._changed = True

    def _status(self, event: Status, now: float) -> None:
        if event.state == "started":
            self._running[event.program] = event.team
            self._mergers[event.program] = OutputMerger(event.team.size, f"{self._name}-{event.program}")
            return
        self._running.pop(event.program, None)
        merger = self._mergers.pop(event.program, None)
        if merger is not None:
            self.publisher.apply(merger.collect(now, final=True))

    def _replica_ended(self, program: int, engine: int, now: float) -> None:
        team = self._running.get(program)
        if team is not None and program in self._mergers:
            with suppress(ValueError):  # the engine does not run the program
                self._mergers[program].ended(team.rank_of(engine), now)

    # -- drawing ---------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if nothing will change before the next event."""
        busy = self._running or self._changed or (self._is_watching and self.model.ended_at is None)
        return not busy and all(merger.idle for merger in self._mergers.values())

    @property
    def _is_watching(self) -> bool:
        return self._watch is not None and self._watch.due

    def tick(self, now: float) -> None:
        """Publish everything that is due."""
        self._now = now
        for merger in self._mergers.values():
            self.publisher.apply(merger.collect(now))
        if self.model.ended_at is not None:
            return
        if self._watch is not None and self._watch.poll(now, drawn=self._view is not None):
            self.model.sampled(now)
            self._changed = True
        if self._view is None and not self.quiet:
            long = self.model.began is not None and now - self.model.began >= _APPEAR_S
            busy = self._running or self.model.steps or self._is_watching or self.model.waits.lines(now)
            busy = busy or self.model.state == "cleaning up"
            if self.model.curves or (long and busy):
                self._appear(now)
        elif self._view is not None and now >= self._next_draw and (self._changed or self._running):
            self._changed = False
            self._draw(self._view, self._view.update, now)

    def _appear(self, now: float) -> None:
        self._view = self._make_view(self.model, self.publisher, f"{self._name}-live")
        self._draw(self._view, self._view.show, now)

    def _draw(self, view: LiveView, draw: Callable[[float], None], now: float) -> None:
        """Draw, and set the time of the next drawing: many replicas or curves are drawn less often."""
        began = time.thread_time()
        draw(now)
        self._next_draw = now + max(view.period_s, (time.thread_time() - began) / _SHARE)

    def _reappear(self) -> None:
        if self._view is not None and self.model.ended_at is None:
            self._view.show(self._now)

    def flush(self, now: float) -> None:
        """Publish everything that is held back, because the cell, or a part of it, has ended."""
        self.tick(now)
        for merger in self._mergers.values():
            self.publisher.apply(merger.collect(now, final=True))
        self.publisher.area(())  # in a terminal: the next text, an error for example, begins on a line of its own
        self._mergers = {program: merger for program, merger in self._mergers.items() if program in self._running}

    def show_all_of(self, program: int, replica: int, now: float) -> None:
        """Show everything received so far, including the unfinished line that a replica wrote before its prompt."""
        merger = self._mergers.get(program) or self._mergers.get(0)
        if merger is not None:
            merger.break_off(replica, now)
        for merger in self._mergers.values():
            self.publisher.apply(merger.collect(now, held=False))
        self.publisher.area(())

    def finish(self, now: float, *, failed: bool) -> None:
        """End the cell and draw its final state."""
        self.flush(now)
        if self.model.ended_at is not None:
            return
        self._changed = False
        if self._view is None and self.model.curves and not self.quiet:
            self._appear(now)
        if self._view is not None and self._watch is not None:
            self._watch.finish(now)
            self.model.sampled(now)
        self.model.end(now, failed=failed)
        if self._view is not None:
            self._view.finish(now)

    @property
    def is_needed(self) -> bool:
        """True if a page may still request the live view."""
        return self._view is not None and self._view.is_needed

    def close(self) -> None:
        """Free the live view. Its last picture stays in the notebook."""
        if self._view is not None:
            self._view.close()
