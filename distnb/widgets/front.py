"""The front end of one IPython shell: leads every event to the cell that it belongs to, and draws.

One thread publishes everything, ten to twenty times a second at most, however many replicas write: the Jupyter
server drops messages of a flood, the cell's own among them.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from distnb.notebook.output.live_model import HERE, LiveModel, VariableRow
from distnb.runtime import step_count
from distnb.strategies import live
from distnb.widgets.cell_view import VIEW_EVENTS, CellView
from distnb.widgets.publisher import NotebookPublisher, Publisher, publisher_for
from distnb.widgets.views import LiveView, PictureView, TextView
from distnb.wire.messages import Died, Display, Output, TelemetrySample

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.notebook.session import Session

__all__ = ["Front", "Mode"]

Mode = Literal["auto", "widget", "picture", "text", "off"]

_TICK_S = 0.05
_MOST_PROGRAMS = 5_000


class Front:
    """Between the session's events and the notebook's cells.

    Args:
        shell: IPython's.
        clock: Gives seconds, steadily.

    Attributes:
        mode: How the live view is drawn: "auto" picks widgets in a notebook and text in a terminal.
        variables: Asked at a cell's end for the variables that were made by a program of this number or a later one.
    """

    def __init__(self, shell: InteractiveShell, clock: Callable[[], float] = time.monotonic) -> None:
        self._shell = shell
        self._clock = clock
        self.mode: Mode = "auto"
        self.variables: Callable[[int], Iterable[VariableRow]] = lambda since_program: ()
        self._queue: deque[tuple[CellView | None, Any]] = deque()
        self._lock = threading.RLock()
        self._current: CellView | None = None
        self._of_program: OrderedDict[int, CellView] = OrderedDict()
        self._previous: CellView | None = None
        self._boundary = 0  # programs up to this number are of earlier cells
        self._latest: CellView | None = None  # in which a replica wrote something: `%distnb output` shows it
        self._retired: deque[CellView] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._session: Session | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._replicas = 1
        self._devices: dict[int, str] = {}
        self._counted: dict[int, tuple[int, int]] = {}  # steps and examples of each engine so far
        self._closed = False
        self._complained = False

    # -- the session -----------------------------------------------------------------------------------------------

    def attach(self, session: Session | None) -> None:
        """Listen to this session's events from now on."""
        if session is self._session:
            return
        self._unsubscribe()
        with self._lock:
            # The next session counts its programs from one again: none of them may be taken for an earlier one's.
            self._drain()
            self._of_program.clear()
            self._counted.clear()
            self._boundary = session.latest_program if session is not None else 0
            self._session, self._unsubscribe = session, lambda: None
        if session is not None:
            self._unsubscribe = session.events.subscribe(self.take)
            rows = session.status()
            self._replicas = len(rows)
            self._devices = {row.engine: row.device for row in rows}

    def take(self, event: Any) -> None:
        """An event of the session; on the supervisor's thread, so it is only queued."""
        if isinstance(event, VIEW_EVENTS):
            self._queue.append((None, event))
            self._wake_up()

    def live(self, point: live.Point, place: step_count.Place) -> None:
        """A call of `distnb.live` in this process."""
        view = self._current
        if view is not None:
            self._queue.append((view, (point, place)))
            self._wake_up()

    # -- cells -----------------------------------------------------------------------------------------------------

    def begin_cell(self) -> None:
        """A cell begins: what happens now is its."""
        with self._lock:
            self._drain()
            self._of_program = OrderedDict(list(self._of_program.items())[-_MOST_PROGRAMS:])
            previous, self._current = self._current, None
            self._previous = previous
            self._boundary = self._session.latest_program if self._session is not None else 0
            if previous is not None:
                self._retire(previous)
            publisher = publisher_for(self._shell, "distnb")
            counted = {**self._counted, HERE: (step_count.steps, step_count.examples)}
            self._current = CellView(publisher, self._make_view, self._replicas, counted, self._devices)

    def _retire(self, view: CellView) -> None:
        """Its cell is over: what still comes for it is sent to it by name."""
        if isinstance(view.publisher, NotebookPublisher):
            view.publisher.current = False
        self._retired.append(view)
        while len(self._retired) > 2:
            # A widget is kept for a while: closing it at once would blank what a slow browser still shows.
            self._retired.popleft().close()

    def name_cell(self, title: str) -> None:
        """Say which strategy the cell runs."""
        if self._current is not None:
            self._current.model.title = title

    def flush(self) -> None:
        """Show all that has come so far for the running cell. Called before its error is raised, and at its end."""
        with self._lock:
            self._drain()
            if self._current is not None:
                self._guarded(lambda view: view.flush(self._clock()), self._current)

    def catch_up(self) -> None:
        """Show all that the replicas have written so far; calls end without waiting for it."""
        session = self._session
        if session is not None and session.alive and session.latest_program > self._boundary:
            session.flush_events()
        self.flush()

    def end_cell(self, *, failed: bool) -> None:
        """The cell ended."""
        self.catch_up()
        with self._lock:
            self._drain()
            view = self._current
            if view is not None:
                self._guarded(lambda view: self._finish(view, failed), view)

    def _finish(self, view: CellView, failed: bool) -> None:
        first = min((program for program, each in self._of_program.items() if each is view), default=None)
        rows = self.variables(first) if first is not None else ()
        view.finish(self._clock(), failed=failed, variables=rows)

    def written(self) -> dict[int, str]:
        """What each replica wrote in the latest cell in which one did."""
        return self._latest.written() if self._latest is not None else {}

    def close(self) -> None:
        """Listen and draw no more."""
        self.attach(None)
        self._closed = True
        self._wake.set()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _wake_up(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="distnb-front", daemon=True)
            self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def _serve(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            while not self._closed:
                with self._lock:
                    self._drain()
                    views = self._views()
                    for view in views:
                        self._guarded(self._tick, view)
                    if not self._queue and all(view.idle for view in views):
                        break
                time.sleep(_TICK_S)

    def _tick(self, view: CellView) -> None:
        if isinstance(view.publisher, NotebookPublisher):
            view.publisher.adopt_thread()
        view.tick(self._clock())

    def _views(self) -> list[CellView]:
        views = [*self._retired]
        if self._current is not None:
            views.append(self._current)
        return views

    def _drain(self) -> None:
        now = self._clock()
        while self._queue:
            view, event = self._queue.popleft()
            if view is not None:
                self._guarded(lambda view: view.feed_here(event[0], event[1], now), view)  # noqa: B023  (called at once)
                continue
            if isinstance(event, TelemetrySample):
                self._counted[event.engine] = (event.steps, event.examples)
            elif isinstance(event, Died):
                self._counted.pop(event.engine, None)
            for each in self._views_of(event):
                self._guarded(lambda view: view.feed(event, now), each)  # noqa: B023

    def _views_of(self, event: Any) -> list[CellView]:
        if isinstance(event, Died):
            return [self._current] if self._current is not None else []
        if isinstance(event, Output | Display) and self._session and event.program in self._session.unshown:
            return []
        view = self._of_program.get(event.program)
        if view is None:
            owner = self._current if event.program > self._boundary else self._previous
            if owner is None:
                return []
            view = self._of_program[event.program] = owner
            if not view.model.title and self._session is not None:  # an ordinary cell that calls replicas
                view.model.title = self._session.latest_strategy
        if isinstance(event, Output):
            self._latest = view
        return [view]

    def _guarded(self, action: Callable[[CellView], object], view: CellView) -> None:
        try:
            action(view)
        except Exception:  # noqa: BLE001
            # A view that cannot be drawn must not end a training; it is told once.
            if not self._complained:
                self._complained = True
                traceback.print_exc(file=sys.__stderr__)

    def _make_view(self, model: LiveModel, publisher: Publisher, name: str) -> LiveView:
        mode = self.mode
        if mode == "auto":
            mode = "widget" if isinstance(publisher, NotebookPublisher) else "text"
        if mode == "widget":
            try:
                from distnb.widgets.widget_view import WidgetView
            except ImportError:
                mode = "picture"  # no anywidget in this environment: displays do as well, at some cost
            else:
                return WidgetView(model, publisher, name)
        kinds: dict[str, type[LiveView]] = {"picture": PictureView, "text": TextView, "off": LiveView}
        return kinds[mode](model, publisher, name)
