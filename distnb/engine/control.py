"""The control thread, which sends events and receives orders while the main thread computes.

It owns the control socket. It reads the process's output from file descriptors 1 and 2, and samples telemetry. On the
notebook's order it ends the running program: it frees blocked collectives, and sends a signal whose handler raises in
the main thread.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zmq

from distnb import activity, process_log
from distnb.engine import guard
from distnb.engine.absence import Absence
from distnb.engine.debugging.console import Console
from distnb.engine.guard import Guard
from distnb.engine.output import telemetry
from distnb.frames import OWN, with_users_paths
from distnb.watching import live
from distnb.wire.channel import ConnectionMonitor, Link
from distnb.wire.messages import (
    Abort,
    Activity,
    Answer,
    CleaningUp,
    DumpActivity,
    DumpStacks,
    EngineTask,
    Flush,
    Flushed,
    Live,
    LogTexts,
    MeasureMemory,
    MemoryUse,
    Output,
    ProgramEnded,
    ProgramReclaimed,
    Prompting,
    ReclaimProgram,
    SendLog,
    SetLogLevel,
    Stacks,
    TelemetrySample,
    WidgetChange,
)

__all__ = ["Control"]

_logger = logging.getLogger("distnb.engine.control")

_TORCH = os.path.dirname(torch.__file__) + os.sep
_WAITING = (threading.__file__, queue.__file__)  # the modules in whose functions distnb waits


_Point = tuple[tuple[int, int], str, tuple[int, int], dict[str, Any], float]
"""A point of `distnb.live`: (program, replica), run, (training step, number of the call of `run` or 0), {name: value},
and the time in seconds since 1970.

A named tuple would cost each training step 2 µs more."""


class Control:
    """The engine's second thread, and the queue in which the other threads put their events.

    Args:
        directory: The cluster's private directory on this machine.
        connect: Returns a new link to the notebook for control. Only this thread uses it.
        absence: The behaviour of the engine while no notebook is connected.
        console: Receives the user's answers.
        free_collectives: Frees every collective that is blocked in this process (thread-safe): (reason, interrupted=).
        hold_limits: Suspends the time limits of collectives, or resumes them (thread-safe).
        sample: Measures this process while a program runs: (engine, program, replica) → TelemetrySample. With
            `steps=N` the sample has the events of the latest N steps.
        memory: Measures the memory of this process: engine → MemoryUse.
        pipes: File descriptors to read from, each with the function that handles the data.

    Attributes:
        running: The current (program, replica); None between programs.
    """

    def __init__(
        self,
        engine: int,
        directory: Path,
        connect: Callable[[], Link],
        guard: Guard,
        console: Console,
        *,
        absence: Absence,
        free_collectives: Callable[..., None],
        hold_limits: Callable[[bool], None],
        sample: Callable[..., TelemetrySample],
        memory: Callable[[int], MemoryUse],
        pipes: dict[int, Callable[[bytes], None]],
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._connect = connect
        self._link = connect()
        self._absence = absence
        self._poller = zmq.Poller()
        self._guard = guard
        self._console = console
        self._hold_limits = hold_limits
        self._free_collectives = free_collectives
        self._sample = sample
        self._memory = memory
        self._pipes = pipes
        self._events: deque[Any] = deque()
        self._points: deque[_Point] = deque()
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.running: tuple[int, int] | None = None
        self._cleaning: int | None = None  # the program that was last reported to clean up
        self._measured: tuple[int, int] | None = None  # the latest (program, replica) that is measured
        # Points are read as seldom as samples are taken: reading them holds Python's lock, which delays the training.
        self._replicas = 1
        self._period_s, self._output_period_s = activity.sample_period_s(1), activity.output_period_s(1)
        self._next_sample = self._next_points = 0.0
        self._thread = threading.Thread(target=self._serve, name="distnb-control", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # -- called by the main thread ---------------------------------------------------------------------------------

    def program_began(self, program: int, replica: int, replicas: int, *, measured: bool) -> None:
        """Assign events to this program, which `replicas` run, from now on.

        A program that only reads an object is not measured.
        """
        if replicas != self._replicas:
            self._replicas = replicas
            self._period_s = activity.sample_period_s(replicas)
            self._output_period_s = activity.output_period_s(replicas)
        self._next_sample = max(self._next_sample, time.monotonic())  # many short programs are sampled like a long one
        if measured:
            self._measured = (program, replica)
            activity.program_began()
        self.running = (program, replica)
        self._absence.program_began(program)

    def program_ended(self, event: ProgramEnded | None) -> None:
        """Send the event at once, after all of the program's output. With None the reply alone reports the end."""
        if self.running == self._measured:
            activity.program_ended()
            if event is not None or time.monotonic() >= self._next_sample:
                self._measure()
        self.running = None
        if event is not None:
            self.emit(event, urgent=True)

    def emit(self, event: Any, *, urgent: bool = False) -> None:
        """Queue an event for the notebook. Any thread may call this, and it is cheap.

        Events are sent in order, up to 20 times a second, or at once if one is `urgent`.
        """
        self._events.append(event)
        if urgent or self._asleep:
            self.wake()

    def live(self, values: dict[str, Any], place: tuple[int, int], run: str) -> None:
        """Queue a point of `distnb.live`. The control thread reads its tensors, so the training never waits for one."""
        self._points.append((self.running or (0, 0), run, place, values, time.time()))
        if self._asleep:
            self.wake()

    def wake(self) -> None:
        """Have the thread check its queues now."""
        os.eventfd_write(self._wake_fd, 1)

    def end_program(self, program: int, reason: str) -> None:
        """Order the end of a program that runs here, from any thread."""
        # The guard comes first. It records the reason, so the freed collective's error is reported as an abort.
        if self._guard.abort(program, reason, free=self._free):
            self.wake()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = self._poller
        poller.register(self._link.socket, zmq.POLLIN)
        if self._link.monitor is not None:
            poller.register(self._link.monitor.socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        for fd in self._pipes:
            poller.register(fd, zmq.POLLIN)
        while True:
            # Set the flag first, and check the queues after that: a thread that adds an event later sees the flag, and
            # wakes this one.
            self._asleep = True
            busy = self.running is not None or self._guard.waiting or self._events or self._points
            self._asleep = not busy
            ready = dict(poller.poll(int(self._output_period_s * 1000) if busy else 1000))
            self._asleep = False
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            if self._link.monitor is not None:
                self._follow_connection(self._link.monitor)
            while (order := self._link.receive()) is not None:
                self._follow_order(order)
            for fd, forward in self._pipes.items():
                if fd in ready:
                    forward(os.read(fd, 1 << 16))
            self._guard.press()
            self._report_cleaning_up()
            self._console.watch_command()
            if self.running is not None and self.running == self._measured and time.monotonic() >= self._next_sample:
                self._measure()
            self._flush()

    def _report_cleaning_up(self) -> None:
        cleaning, running = self._guard.cleans_up, self.running
        if cleaning is not None and cleaning != self._cleaning and running is not None and running[0] == cleaning:
            self._cleaning = cleaning
            _logger.info("program %d handles the interrupt", cleaning)
            self._events.append(CleaningUp(engine=self._engine, program=cleaning, replica=running[1]))

    def _follow_connection(self, monitor: ConnectionMonitor) -> None:
        """Handle the end of a notebook, and the arrival of the next one."""
        for connected in monitor.news():
            if connected:
                self._absence.meet(self._link.send)
                continue
            self._absence.begin(self.running)
            self._replace_link(monitor)
            running = self.running
            if running is not None:
                self._console.answer(Answer(running[0], refusal="the notebook has ended, so nobody can answer."))
                if self._absence.ends_programs:
                    self.end_program(running[0], "the notebook has ended")
            return  # the monitor is closed

    def _replace_link(self, monitor: ConnectionMonitor) -> None:
        """Connect again: the old socket would send the next notebook what the last one did not read."""
        self._poller.unregister(monitor.socket)
        self._poller.unregister(self._link.socket)
        self._link.socket.linger = 0
        self._link.close()
        self._link = self._connect()
        assert self._link.monitor is not None
        self._poller.register(self._link.socket, zmq.POLLIN)
        self._poller.register(self._link.monitor.socket, zmq.POLLIN)

    def _follow_order(self, order: Any) -> None:
        _logger.debug("received %s", type(order).__name__)  # without its content: an `Answer` may be a password
        if isinstance(order, Abort):
            _logger.info("program %d is to end: %s", order.program, order.reason)
            # The guard comes first. It records the reason, so the freed collective's error is reported as an abort.
            free = partial(self._free, interrupted=order.interrupted)
            self._guard.abort(order.program, order.reason, order.interrupted, free)
        elif isinstance(order, Answer):
            self._console.answer(order)
        elif isinstance(order, Prompting):
            self._hold_limits(order.on)
        elif isinstance(order, ReclaimProgram):
            if self._guard.withdraw(order.program):
                self.emit(ProgramReclaimed(self._engine, order.program))
        elif isinstance(order, DumpStacks):
            self.emit(Stacks(self._engine, _program_stack()))
        elif isinstance(order, DumpActivity):
            found = None
            if self._measured is not None:
                found = self._sample(self._engine, *self._measured, steps=order.steps)
            self.emit(Activity(self._engine, found))
        elif isinstance(order, MeasureMemory):
            self.emit(self._memory(self._engine))
        elif isinstance(order, SetLogLevel):
            process_log.set_level(order.level)
        elif isinstance(order, EngineTask):
            self.emit(order.carry_out(self._engine, self._directory), urgent=True)
        elif isinstance(order, SendLog):
            self.emit(LogTexts(self._engine, process_log.log_texts()))
        elif isinstance(order, Flush):
            if self._measured is not None:
                self._measure()
            self._next_points = 0.0
            self.emit(Flushed(self._engine, order.number))
        elif kept := self._absence.follow(order, self._engine):
            self._link.send(list(kept))

    def _free(self, reason: str, *, interrupted: bool = False) -> None:
        self._free_collectives(reason, interrupted=interrupted)
        self._console.free()

    def _measure(self) -> None:
        assert self._measured is not None
        self._next_sample = time.monotonic() + self._period_s
        self._events.append(self._sample(self._engine, *self._measured))

    def _flush(self) -> None:
        if self._points and (time.monotonic() >= self._next_points or self.running != self._points[0][0]):
            self._next_points = time.monotonic() + self._period_s
            self._events.extendleft(reversed(self._read_points()))
        if not self._events:
            return
        batch = _joined([self._events.popleft() for _ in range(len(self._events))])
        self._absence.keep(batch)
        if not self._absence.lasts:
            self._link.send(batch)

    def _read_points(self) -> list[Live]:
        """Return the points whose numbers have arrived from the device, or all points once the program has ended."""
        read: list[_Point] = []
        while self._points and (self.running != self._points[0][0] or live.is_ready(self._points[0][3])):
            read.append(self._points.popleft())
        events = []
        for ((program, replica), run), calls in itertools.groupby(read, lambda point: point[:2]):
            points, times = [], []
            for _, _, place, values, seconds in calls:
                points.append((*place, {name: float(value) for name, value in values.items()}))
                times.append(seconds)
            events.append(
                Live(
                    engine=self._engine,
                    program=program,
                    replica=replica,
                    points=tuple(points),
                    times=tuple(times),
                    run=run,
                )
            )
        return events


def _joined(events: list[Any]) -> list[Any]:
    """Join neighbouring pieces of text of one stream, and neighbouring changes of widgets."""
    joined: list[Any] = []
    for key, group in itertools.groupby(events, _stream_of):
        pieces = list(group)
        if key is not None and len(pieces) > 1:
            pieces = _one_change_each(pieces) if key == _WIDGETS else [_one_text(pieces)]
        joined += pieces
    return joined


_WIDGETS = (0, "widgets")


def _stream_of(event: Any) -> tuple[int, str] | None:
    if isinstance(event, WidgetChange):
        return _WIDGETS if event.method == "update" else None
    return (event.program, event.stream) if isinstance(event, Output) else None


def _one_text(pieces: list[Output]) -> Output:
    first = pieces[0]
    text = "".join([piece.text for piece in pieces])
    return Output(engine=first.engine, program=first.program, replica=first.replica, stream=first.stream, text=text)


def _one_change_each(changes: list[WidgetChange]) -> list[WidgetChange]:
    """Join the changes of each widget. The latest value of a trait replaces earlier ones."""
    latest: dict[str, WidgetChange] = {}
    for change in changes:
        before = latest.get(change.widget)
        content = change.content if before is None else {**before.content, **change.content}
        latest[change.widget] = replace(change, content=content)
    return list(latest.values())


def _program_stack() -> str:
    """Return the main thread's stack in the user's program, innermost frame last; "" if no program runs.

    Frames of distnb are left out. If the thread is in distnb, torch's frames that lead there are left out, too (a
    backward pass that sums gradients).
    """
    stack = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    guarded = [place for place, frame in enumerate(stack) if frame.filename == guard.__file__]
    program = stack[guarded[-1] + 1 :] if guarded else []
    below = list(itertools.takewhile(lambda frame: frame.filename.startswith((OWN, *_WAITING)), reversed(program)))
    if any(frame.filename.startswith(OWN) for frame in below):
        del program[-len(below) :]
        while len(program) > 1 and program[-1].filename.startswith(_TORCH):
            del program[-1]
    users = [frame for frame in program if not frame.filename.startswith(OWN)]
    texts = zip(traceback.format_list(users), users, strict=True)
    return with_users_paths("".join(telemetry.name_cell(text, frame.filename) for text, frame in texts))
