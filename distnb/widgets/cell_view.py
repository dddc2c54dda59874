"""What one notebook cell shows of the replicas: merged output, and the live view when there is something to see."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distnb.notebook.output.live_model import LiveModel, VariableRow
from distnb.notebook.output.output_merger import OutputMerger
from distnb.runtime import step_count
from distnb.widgets.publisher import Publisher
from distnb.widgets.views import LiveView
from distnb.wire.messages import Died, Display, Live, Output, ProgramEnded, Status, TelemetrySample

__all__ = ["VIEW_EVENTS", "CellView"]

APPEAR_S = 0.5
"""A cell that ends sooner, and draws nothing, shows no live view."""

_KEPT_CHARACTERS = 4_000_000

MakeView = Callable[[LiveModel, Publisher, str], LiveView]


class CellView:
    """Takes the events of the programs that one cell runs. Used by one thread at a time.

    Args:
        publisher: Where the cell's output goes.
        make_view: Makes the live view when it is time.
        replicas: Replicas to expect of a program that was not announced (`strategy.run` from an ordinary cell).
        counted_before: (steps, examples) that each engine, and the notebook, had counted before.
        devices: Of each engine.
    """

    def __init__(
        self,
        publisher: Publisher,
        make_view: MakeView,
        replicas: int = 1,
        counted_before: Mapping[int, tuple[int, int]] | None = None,
        devices: Mapping[int, str] | None = None,
    ) -> None:
        self.name = f"distnb-{uuid.uuid4().hex[:12]}"
        self.publisher = publisher
        publisher.on_clear = self._reappear
        self.model = LiveModel(counted_before=counted_before, devices=devices)
        self._make_view = make_view
        self._replicas = replicas
        self._view: LiveView | None = None
        self._mergers: dict[int, OutputMerger] = {}  # by program; 0 for all that were not announced
        self._running: set[int] = set()
        self._engines: dict[int, dict[int, int]] = {}  # of a program: engine → replica
        self._has_live = False
        self._changed = False
        self._next_draw = 0.0
        self._now = 0.0
        self.finished = False
        self._kept: dict[int, list[str]] = {}
        self._kept_size: dict[int, int] = {}

    # -- events in -------------------------------------------------------------------------------------------------

    def feed(self, event: Any, now: float) -> None:
        """Take an event of `wire.messages`."""
        self._now = now
        if isinstance(event, Output | Display):
            if isinstance(event, Output):
                self._keep(event)
            self._merger(event.program).feed(event, now)
            return
        self.model.feed(event, now)
        self._changed = True
        if isinstance(event, Live):
            self._has_live = True
        elif isinstance(event, Status):
            self._status(event, now)
        elif isinstance(event, ProgramEnded):
            self._replica_ended(event.program, event.engine, now)
        elif isinstance(event, Died):
            for program in list(self._running):
                self._replica_ended(program, event.engine, now)

    def feed_here(self, point: dict[str, Any], place: step_count.Place, now: float) -> None:
        """Take a call of `distnb.live` in the notebook's process."""
        self._now = now
        self.model.feed_here(point, place, now)
        self._has_live = self._changed = True

    def _status(self, event: Status, now: float) -> None:
        if event.state == "started":
            self._running.add(event.program)
            self._engines[event.program] = {engine: replica for replica, engine in enumerate(event.team.engines)}
            self._mergers[event.program] = OutputMerger(event.team.size, f"{self.name}-{event.program}")
        elif event.state == "ended":
            self._running.discard(event.program)
            self._close_merger(event.program, now)

    def _replica_ended(self, program: int, engine: int, now: float) -> None:
        replica = self._engines.get(program, {}).get(engine)
        if replica is not None and program in self._mergers:
            self._mergers[program].ended(replica, now)

    def _merger(self, program: int) -> OutputMerger:
        if program in self._mergers:
            return self._mergers[program]
        if 0 not in self._mergers:
            self._mergers[0] = OutputMerger(self._replicas, f"{self.name}-0")
        return self._mergers[0]

    def _close_merger(self, program: int, now: float) -> None:
        merger = self._mergers.pop(program, None)
        if merger is not None:
            self.publisher.apply(merger.collect(now, final=True))

    def _keep(self, event: Output) -> None:
        """For `%distnb output`: the last megabytes of each replica, as it wrote them."""
        kept = self._kept.setdefault(event.replica, [])
        kept.append(event.text)
        self._kept_size[event.replica] = self._kept_size.get(event.replica, 0) + len(event.text)
        while self._kept_size[event.replica] > _KEPT_CHARACTERS and len(kept) > 1:
            self._kept_size[event.replica] -= len(kept.pop(0))

    def written(self) -> dict[int, str]:
        """What each replica wrote, unmerged; of very much the last 4 million characters."""
        return {replica: "".join(kept) for replica, kept in sorted(self._kept.items())}

    # -- drawing ---------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing will change before the next event."""
        return not self._running and not self._changed and all(merger.idle for merger in self._mergers.values())

    def tick(self, now: float) -> None:
        """Publish what is due."""
        self._now = now
        for merger in self._mergers.values():
            self.publisher.apply(merger.collect(now))
        if self.finished:
            return
        if self._view is None:
            long = self.model.began is not None and now - self.model.began >= APPEAR_S
            if self._has_live or (long and (self._running or self.model.steps)):
                self._view = self._make_view(self.model, self.publisher, f"{self.name}-live")
                self._view.show(now)
                self._next_draw = now + self._view.period_s
        elif now >= self._next_draw and (self._changed or self._running):
            self._changed = False
            self._next_draw = now + self._view.period_s
            self._view.update(now)

    def flush(self, now: float) -> None:
        """Hold nothing back any more: the cell, or a part of it, has ended."""
        self.tick(now)
        for merger in self._mergers.values():
            self.publisher.apply(merger.collect(now, final=True))
        self.publisher.area(())  # in a terminal: what comes next, an error say, stands in a line of its own
        self._mergers = {program: merger for program, merger in self._mergers.items() if program in self._running}

    def finish(self, now: float, *, failed: bool, variables: Iterable[VariableRow] = ()) -> None:
        """The cell ended: what stays is drawn."""
        self.flush(now)
        if self.finished:
            return
        self.finished = True
        self._changed = False
        if self._view is None and self._has_live:
            self._view = self._make_view(self.model, self.publisher, f"{self.name}-live")
            self._view.show(now)
        self.model.end(now, failed=failed)
        if self._view is not None:
            self.model.variables = list(variables)
            self._view.finish(now)

    def close(self) -> None:
        """Free the live view; the picture that it left stays."""
        if self._view is not None:
            self._view.close()

    def _reappear(self) -> None:
        if self._view is not None and not self.finished:
            self._view.show(self._now)


# TelemetrySample reaches `feed` through the model; named here because the router subscribes to it as well.
VIEW_EVENTS = (Output, Display, Live, TelemetrySample, Status, ProgramEnded, Died)
