"""The front end of one IPython shell, which routes each event to its cell and draws it.

One thread publishes everything, at most ten to twenty times a second, however many replicas write. The Jupyter server
drops messages that come faster, including the cell's own.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from distnb.notebook.front_end import ask_here
from distnb.runtime import step_count
from distnb.views.event_files import EventFiles
from distnb.views.live_model import HERE, LiveCall, LiveModel
from distnb.views.runs import History
from distnb.views.watch import Watch
from distnb.watching import live
from distnb.widgets import front_end_widgets
from distnb.widgets.cell_view import VIEW_EVENTS, CellView
from distnb.widgets.live_views import LiveView, PictureView, TextView
from distnb.widgets.publisher import NotebookPublisher, Publisher, publisher_for
from distnb.widgets.replica_widgets import ReplicaWidgets
from distnb.wire.messages import (
    CleaningUp,
    Died,
    Display,
    InputRequest,
    Output,
    ProgramEnded,
    Status,
    TelemetrySample,
    WidgetChange,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.notebook.session import Session

__all__ = ["Front"]

Result = TypeVar("Result")

_TICK_S = 0.05
_EVENTS_S = 1.0
_KEPT_CELLS = 3
_KEPT_VIEWS = 20  # the most views of earlier cells that stay open for pages which have not shown their final state


class Front:
    """The link between the session's events and the notebook's cells.

    Attributes:
        mode: The kind of live view. "auto" chooses widgets or pictures in a notebook and text in a terminal; the others
            are "widget", "picture", "text" and "off".
        history: The runs of this notebook.
        busy: True while a cell runs.
        on_news: Called on any thread when a session, cell, program or engine has changed its state. It must not block.
        on_end: Called with a cell's view when the cell has ended.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.mode = "auto"
        self.history = History()
        self._events: EventFiles | None = None
        self._next_events = 0.0
        self.busy = False
        self.on_news: Callable[[], None] = lambda: None
        self.on_end: Callable[[CellView], None] = lambda view: None
        # Either an action of a cell's view, called with the time, or None and an event of the session.
        self._queue: deque[tuple[Callable[[float], object] | None, Any]] = deque()
        self._lock = threading.RLock()
        # Each cell with the number of the last program before it. The latest cell is the last.
        self._cells: deque[tuple[int, CellView]] = deque()
        self._open: list[CellView] = []  # earlier cells with a view that a page may still need
        self._of_output: CellView | None = None  # the latest cell with output of a replica
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._session: Session | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._replicas = 1
        self._devices: dict[int, str] = {}
        self._workers: dict[int, int] = {}  # each engine's number among the workers' replicas
        self._who = ""  # the noun for these numbers
        self._samples: dict[int, TelemetrySample] = {}  # the latest sample of each engine
        self._widgets = ReplicaWidgets(shown=hasattr(shell, "kernel"))
        self._has_printed_error = False
        self._has_written_cure = False

    # -- the session -----------------------------------------------------------------------------------------------

    def attach(self, session: Session | None) -> None:
        """Subscribe to a session's events, and unsubscribe from the previous session's."""
        if session is self._session:
            if session is not None:  # it may have other engines
                with self._lock:
                    self._note_engines(session)
            return
        self._unsubscribe()
        with self._lock:
            # The next session numbers its programs from one again. The queue is emptied first, so that they cannot be
            # confused with earlier programs.
            self._drain()
            self._samples.clear()
            self._widgets.ended()
            self._session, self._unsubscribe = session, lambda: None
            boundary = session.latest_program if session is not None else 0
            self._cells = deque((boundary, view) for _, view in self._cells)
            for _, view in self._cells:
                view.has_old_replicas = bool(view.model.rows or view.model.work)
        if session is not None:
            self._unsubscribe = session.events.subscribe(self._enqueue)
            self._note_engines(session)
        self.on_news()

    def _note_engines(self, session: Session) -> None:
        rows = session.status()
        self._replicas = len(rows)
        self._devices = {row.engine: row.device for row in rows}
        tasks = session.tasks
        computing = sorted(engine for engine, task in tasks.items() if task.computes)
        self._workers = {engine: replica for replica, engine in enumerate(computing)}
        self._who = "worker " if len({tasks[engine] for engine in computing}) == len(computing) else ""
        for engine in self._samples.keys() - self._devices.keys():
            del self._samples[engine]
            self._widgets.ended(engine)
        self.on_news()

    def _enqueue(self, event: Any) -> None:
        """Queue an event of the session. This runs on the supervisor's thread, so it must not draw."""
        if isinstance(event, (*VIEW_EVENTS, WidgetChange)):
            self._queue.append((None, event))
            self._wake_up()
        if isinstance(event, Status | CleaningUp | ProgramEnded | Died):
            self.on_news()

    def live(self, point: live.Point, place: step_count.StepPosition, run: str) -> None:
        """Queue a call of `distnb.live` in this process."""
        view = self._current
        if view is not None:
            call = LiveCall(
                point=point,
                place=place,
                run=run,
                seconds=time.time(),
                epochs=step_count.epochs_begun(),
                reading=step_count.reading(),
            )
            self._queue.append((partial(view.feed_local, call), None))
            self._wake_up()

    def watch(self, subject: Any, make: Callable[[Any], Watch]) -> None:
        """Show an object that the running cell uses. The caller holds the object's lock, so this takes no lock."""
        view = self._current
        if view is not None and not view.watches(subject):
            self._queue.append((partial(view.watch, make(subject)), None))
            self._wake_up()

    # -- cells -----------------------------------------------------------------------------------------------------

    @property
    def _current(self) -> CellView | None:
        return self._cells[-1][1] if self._cells else None

    def begin_cell(self, number: int) -> None:
        """Begin a cell: events from now on belong to it."""
        with self._lock:
            self._drain()
            previous = self._current
            if previous is not None and isinstance(previous.publisher, NotebookPublisher):
                previous.publisher.current = False  # its later output is sent as messages with its parent
            boundary = self._session.latest_program if self._session is not None else 0
            publisher = publisher_for(self._shell)
            counted = {engine: (sample.steps, sample.examples) for engine, sample in self._samples.items()}
            counted[HERE] = (step_count.steps, step_count.examples)
            who = self._workers, self._who
            name = f"In[{number}]"
            view = CellView(
                publisher, self._make_view, self._replicas, counted, self._devices, *who, name, self.history
            )
            self._cells.append((boundary, view))
            while len(self._cells) > _KEPT_CELLS:
                # Close a widget late: a slow browser would lose its view if it were closed immediately.
                self._open.append(self._cells.popleft()[1])
            unneeded = [view for view in self._open if not view.is_needed] + self._open[:-_KEPT_VIEWS]
            for view in dict.fromkeys(unneeded):
                self._open.remove(view)
                view.close()
            self.busy = True
        self.on_news()

    @property
    def title(self) -> str:
        """The name of the cell's strategy, or "" if the cell has none."""
        return self._current.model.title if self._current is not None else ""

    def write_events(self, files: EventFiles | None) -> None:
        """Start to write drawn values to TensorBoard's files, or stop if `files` is None."""
        with self._lock:
            before, self._events = self._events, files
        if before is not None:
            before.close()

    def _write_events(self) -> None:
        if self._events is not None:
            for _, view in self._cells:
                self._events.write(view.model.runs.values())
            self._events.flush()

    def name_cell(self, title: str, *, whole: bool = True, here: bool = False) -> None:
        """Set the name of the cell's strategy, and whether the whole cell runs under it, and in this process."""
        if self._current is not None:
            model = self._current.model
            model.title, model.is_distributed = title, whole
            if here:
                model.begin_here(time.monotonic())

    def draw(self, *, each_wait: bool, run: str, quiet: bool) -> None:
        """Set the options of the running cell's view.

        Args:
            each_wait: Show in detail how replicas spend their time.
            run: The name of the run of values that are recorded without one.
            quiet: Draw nothing.
        """
        view = self._current
        if view is not None:
            view.model.timeline.in_detail, view.model.run_name, view.quiet = each_wait, run, quiet

    def flush(self) -> None:
        """Show everything received so far for the running cell. Called before its error is raised, and at its end."""
        with self._lock:
            self._drain()
            if self._current is not None:
                self._guarded(self._current.flush, time.monotonic())
            self._guarded(partial(self._widgets.send, final=True), time.monotonic())

    def catch_up(self) -> None:
        """Fetch and show everything the replicas have written so far. Calls return without waiting for output."""
        session = self._session
        if session is not None and session.alive and self._cells and session.latest_program > self._cells[-1][0]:
            session.flush_events()
        self.flush()

    def ask(self, request: InputRequest) -> str:
        """Ask the user for a line, below everything received so far for the running cell."""
        with self._lock:
            self._drain()
            view = self._current
            if view is not None:
                self._guarded(partial(view.show_all_of, request.program, request.replica), time.monotonic())
            if not isinstance(view and view.publisher, NotebookPublisher):
                return ask_here(request)  # the lock is held, so that nothing else is drawn in the terminal meanwhile
        return ask_here(request)

    def end_cell(self, *, failed: bool) -> None:
        """End the running cell: draw its final state, and write its values to event files."""
        self.catch_up()
        with self._lock:
            self._drain()
            if self._current is not None:
                self._guarded(partial(self._current.finish, failed=failed), time.monotonic())
                self._guarded(self.on_end, self._current)
            self._guarded(self._write_events)
            self.busy = False

    def written(self) -> dict[int, str]:
        """Return what each replica wrote in the latest cell with output of a replica."""
        return dict(sorted(self._of_output.written.items())) if self._of_output is not None else {}

    def read(self, function: Callable[[list[CellView], dict[int, TelemetrySample]], Result]) -> Result:
        """Call a function with the latest cells' views and the engines' samples. They cannot change during the call."""
        with self._lock:
            self._drain()
            return function([view for _, view in self._cells], self._samples)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _wake_up(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="distnb-front", daemon=True)
            self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def _serve(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while True:
                with self._lock:
                    self._guarded(self._adopt_thread)  # first, so that everything appears in this cell
                    self._drain()
                    for _, view in self._cells:
                        self._guarded(view.tick, time.monotonic())
                    self._guarded(self._widgets.send, time.monotonic())
                    if time.monotonic() >= self._next_events:
                        self._next_events = time.monotonic() + _EVENTS_S
                        self._guarded(self._write_events)
                    if not self._queue and self._widgets.idle and all(view.idle for _, view in self._cells):
                        break
                time.sleep(_TICK_S)

    def _adopt_thread(self) -> None:
        view = self._current
        if view is not None and isinstance(view.publisher, NotebookPublisher):
            view.publisher.adopt_thread()

    def _drain(self) -> None:
        now = time.monotonic()
        while self._queue:
            action, event = self._queue.popleft()
            if action is not None:
                self._guarded(action, now)
                continue
            if isinstance(event, TelemetrySample):
                self._samples[event.engine] = event
            elif isinstance(event, Died):
                self._samples.pop(event.engine, None)
                self._widgets.ended(event.engine)
            elif isinstance(event, WidgetChange):
                self._guarded(self._widgets.feed, event)
                continue
            elif isinstance(event, Output | Display) and (event := self._widgets.capture(event)) is None:
                continue
            view = self._view_of(event)
            if view is not None:
                self._guarded(view.feed, event, now)

    def _view_of(self, event: Any) -> CellView | None:
        if isinstance(event, Died):
            return self._current
        if isinstance(event, Output | Display) and self._session and event.program in self._session.programs.unshown:
            return None
        view = next((view for boundary, view in reversed(self._cells) if event.program > boundary), None)
        if view is not None and not view.model.title and self._session is not None:
            # An ordinary cell that calls replicas has no title of its own.
            view.model.title = self._session.calls.latest_strategy
        if isinstance(event, Output):
            self._of_output = view or self._of_output
        return view

    def _guarded(self, action: Callable[..., object], *args: Any) -> None:
        try:
            action(*args)
        except Exception:  # noqa: BLE001
            # An error in a view must not end the training. Only the first error is printed.
            if not self._has_printed_error:
                self._has_printed_error = True
                traceback.print_exc(file=sys.__stderr__)

    def _make_view(self, model: LiveModel, publisher: Publisher, name: str) -> LiveView:
        mode = self.mode
        if mode == "auto":
            mode = self._mode_for(publisher)
        if mode == "widget":
            from distnb.widgets.widget_view import WidgetView

            return WidgetView(model, publisher, name)
        kinds: dict[str, type[LiveView]] = {"picture": PictureView, "text": TextView, "off": LiveView}
        return kinds[mode](model, publisher, name)

    def _mode_for(self, publisher: Publisher) -> str:
        """Choose the kind of live view. With the first picture, write how to get the widget instead."""
        if not isinstance(publisher, NotebookPublisher):
            return "text"
        cure = front_end_widgets.cure()
        if cure and not self._has_written_cure:
            self._has_written_cure = True
            publisher.write("stdout", f"{cure}\n")
        return "picture" if cure else "widget"
