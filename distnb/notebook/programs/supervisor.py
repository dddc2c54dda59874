"""The supervisor thread of the notebook, which receives every engine's events and ends programs that must end.

The thread runs independently of the main thread. It does not wait for the user's code or for a heartbeat. A failure is
reported by the replica that failed (on the control channel), or by the operating system's kernel (by the pidfd of a
process, which `cluster` watches).
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import zmq

from distnb.notebook.programs.outcome import Outcome
from distnb.notebook.programs.supervision import EndProgram, GiveUpOn, Order, Supervision
from distnb.runtime.interrupts import drain
from distnb.story import Transition
from distnb.wire.control_channel import ControlChannel
from distnb.wire.messages import (
    Abort,
    Activity,
    CleaningUp,
    Died,
    DumpActivity,
    DumpStacks,
    Flush,
    Flushed,
    Hello,
    LogTexts,
    MeasureMemory,
    MemoryUse,
    ProgramEnded,
    ReclaimProgram,
    SendLog,
    Stacks,
    TelemetrySample,
)

__all__ = ["EventHub", "Supervisor"]

_logger = logging.getLogger("distnb.notebook.supervision")


class EventHub:
    """The distributor of events of `wire.messages` to all listeners, in order, on the supervisor's thread."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Any], None]] = []

    def subscribe(self, listener: Callable[[Any], None]) -> Callable[[], None]:
        """Call `listener(event)` for each event from now on. Return the function that ends the subscription.

        A listener must not block: it runs on the supervisor's thread, which ends hanging cells.
        """

        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def publish(self, event: Any) -> None:
        """Send an event to all listeners. The traceback of a listener that raises is printed on stderr."""
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                # A view that fails must stop neither the training nor the supervisor.
                _logger.exception("a listener failed at %s", type(event).__name__)
                traceback.print_exc()


class Supervisor:
    """The reader of the control channel, which only its thread uses, and the executor of `Supervision`'s orders."""

    def __init__(self, control: zmq.Socket[bytes], on_hello: Callable[[int], None]) -> None:
        self._control = ControlChannel(control)
        self._on_hello = on_hello
        self.events = EventHub()
        self._questions = itertools.count(1)
        self._state = Supervision()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Engines that died, and programs on engines that were given up on, and a descriptor that is then readable.
        self.lost: queue.SimpleQueue[GiveUpOn | Died] = queue.SimpleQueue()
        self.lost_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hellos: dict[int, Hello] = {}
        self._given_up: dict[int, float] = {}
        self._changed = threading.Condition()  # guards _state and _hellos
        # The programs that the state machine does not follow yet, since nothing has happened in them but successes. A
        # thread that runs programs adds and removes them, without a lock. The supervisor adopts them before each event.
        self.quiet: dict[int, Outcome] = {}
        self._thread = threading.Thread(target=self._serve, name="distnb-supervisor", daemon=True)
        self._thread.start()

    # -- called from any thread ------------------------------------------------------------------------------------

    @property
    def stuck(self) -> dict[int, int]:
        """The engines that are still busy with a program that was ended, with its number."""
        return dict(self._state.stuck)

    def silent_s(self, engine: int) -> float:
        """Return the time in seconds since a stuck engine was given up on."""
        return time.monotonic() - self._given_up.get(engine, 0.0)

    @property
    def story(self) -> list[Transition]:
        """The latest transitions of the supervision, the oldest first."""
        with self._changed:
            self._adopt_quiet()
            return self._state.story

    @property
    def hellos(self) -> dict[int, Hello]:
        """The hello of each engine, which it sent with facts about itself when it connected."""
        with self._changed:
            return dict(self._hellos)

    def program_began(self, program: int, engines: Iterable[int]) -> None:
        """Follow a program. Call this before the program is sent."""
        with self._changed:
            self._state.began(program, engines, time.monotonic())

    def replied(self, engine: int, program: int) -> None:
        """Note that a program succeeded on an engine, whose reply was read and which sends no event for it."""
        with self._changed:
            self._state.ended(engine, program, True, "", time.monotonic())

    def failed(self, engine: int, program: int, summary: str) -> None:
        """End a program on the other engines, since one engine could not begin it."""
        self._do(lambda: self._advance(lambda now: self._state.ended(engine, program, False, summary, now)))

    def interrupt(self, program: int) -> None:
        """End a program at the user's request."""
        self._do(lambda: self._advance(lambda now: self._state.interrupted(program, now)))

    def reclaim(self, engine: int, program: int) -> None:
        """Ask an engine to return a program if it has not begun it."""
        self.send(engine, ReclaimProgram(program))

    def send(self, engine: int, message: Any) -> None:
        """Send a message on the control channel."""
        self._do(partial(self._send, engine, message))

    def send_to_all(self, message: Any) -> None:
        """Send a message to every engine that is up."""
        for engine in self.hellos:
            self.send(engine, message)

    def engine_died(self, engine: int, pid: int, exit_status: str) -> None:
        """Handle the end of a process, which the cluster's watcher has reported."""
        self._do(lambda: self._remove(Died(engine, pid, exit_status)))

    def engines_lost(self, deaths: Sequence[Died]) -> None:
        """Handle the loss of all engines, which another notebook takes over. Their programs go on there."""

        def lose() -> None:
            self._advance(lambda now: self._state.lost(now))
            for death in deaths:
                _logger.info("%s", death)
                self._report_loss(death)
                self.events.publish(death)

        self._do(lose)

    def publish(self, event: Any) -> None:
        """Publish an event of the notebook, in order with the engines' events."""
        self._do(lambda: self.events.publish(event))

    def await_flush(self, engines: Iterable[int], timeout_s: float) -> bool:
        """Wait until engines have sent all their events. Return False if one did not answer in time."""
        number = next(self._questions)
        asked = [engine for engine in engines if engine not in self.stuck]
        return self.ask(
            asked, Flush(number), lambda event: isinstance(event, Flushed) and event.number == number, timeout_s
        )

    def ask_stacks(self, engines: Iterable[int], timeout_s: float) -> dict[int, str]:
        """Return the stack of each engine's main thread, as lines of a traceback; "" if it is idle.

        Engines that do not answer in time are missing: native code that holds Python's lock prevents an answer.
        """
        found: dict[int, str] = {}

        def answers(event: Any) -> bool:
            if isinstance(event, Stacks):
                found[event.engine] = event.text
            return isinstance(event, Stacks)

        self.ask(engines, DumpStacks(), answers, timeout_s)
        return found

    def ask_activity(self, engines: Iterable[int], steps: int, timeout_s: float) -> list[TelemetrySample]:
        """Return samples of each engine's latest steps, with all events; without engines that have not computed."""
        found: list[TelemetrySample] = []

        def answers(event: Any) -> bool:
            if isinstance(event, Activity) and event.sample is not None:
                found.append(event.sample)
            return isinstance(event, Activity)

        self.ask(engines, DumpActivity(steps), answers, timeout_s)
        return found

    def ask_log(self, engines: Iterable[int], timeout_s: float) -> dict[int, Mapping[str, str]]:
        """Return the logs in each engine's private directory, by engine, of the engines that answer in time."""
        found: dict[int, Mapping[str, str]] = {}

        def answers(event: Any) -> bool:
            if isinstance(event, LogTexts):
                found[event.engine] = event.texts
            return isinstance(event, LogTexts)

        self.ask(engines, SendLog(), answers, timeout_s)
        return found

    def ask_memory(self, engines: Iterable[int], timeout_s: float) -> dict[int, MemoryUse]:
        """Return the memory use of each engine, its machine and its device; engines that do not answer are missing."""
        found: dict[int, MemoryUse] = {}

        def answers(event: Any) -> bool:
            if isinstance(event, MemoryUse):
                found[event.engine] = event
            return isinstance(event, MemoryUse)

        self.ask(engines, MeasureMemory(), answers, timeout_s)
        return found

    def ask(self, engines: Iterable[int], question: Any, answers: Callable[[Any], bool], timeout_s: float) -> bool:
        """Ask engines, and return whether all of them that are up answered in time or died meanwhile."""
        missing = set(self.hellos).intersection(engines)
        all_here = threading.Event()

        def receive(event: Any) -> None:
            if isinstance(event, Died) or answers(event):
                missing.discard(event.engine)
                if not missing:
                    all_here.set()

        unsubscribe = self.events.subscribe(receive)
        try:
            for engine in tuple(missing):
                self.send(engine, question)
            return not missing or all_here.wait(timeout_s)
        finally:
            unsubscribe()

    def forget(self, engines: Iterable[int]) -> None:
        """Forget the hellos of engines that are about to be replaced, and the programs in which they are stuck."""
        with self._changed:
            for engine in engines:
                self._hellos.pop(engine, None)
                self._state.replaced(engine, time.monotonic())

    def wait_ended(self, program: int, timeout_s: float) -> bool:
        """Wait until all output of a program has been published. Return False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._state.follows(program), timeout_s)

    def close(self) -> None:
        """End the thread."""
        self._tasks.put(None)
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(5)
        os.close(self._wake_fd)
        os.close(self.lost_fd)

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        os.eventfd_write(self._wake_fd, 1)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control.socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while True:
            with self._changed:  # another thread may begin a program
                deadline = self._state.next_deadline()
            poller.poll(None if deadline is None else int(max(0.0, deadline - time.monotonic()) * 1000) + 1)
            drain(self._wake_fd)
            while not self._tasks.empty():
                task = self._tasks.get()
                if task is None:
                    return
                task()
            for engine, batch in self._control.receive():
                for event in batch:
                    self._handle_event(engine, event)
            self._advance(self._state.tick)

    def _handle_event(self, engine: int, event: Any) -> None:
        if isinstance(event, Hello):
            _logger.info("engine %d has connected: process %d on %s", engine, event.pid, event.host)
            with self._changed:
                self._hellos[engine] = event
                self._state.joined(engine, time.monotonic())
            self._on_hello(engine)
            return
        self.events.publish(event)
        if isinstance(event, CleaningUp):
            self._advance(lambda now: self._state.cleans_up(engine, event.program, now))
        elif isinstance(event, ProgramEnded):
            ok = event.status == "ok"
            self._advance(lambda now: self._state.ended(engine, event.program, ok, event.summary, now))

    def _remove(self, death: Died) -> None:
        _logger.info("%s", death)
        self._report_loss(death)
        self.events.publish(death)
        self._advance(lambda now: self._state.died(death.engine, now))

    def _report_loss(self, loss: GiveUpOn | Died) -> None:
        if isinstance(loss, GiveUpOn):
            self._given_up[loss.engine] = time.monotonic()
        self.lost.put(loss)
        os.eventfd_write(self.lost_fd, 1)

    def _advance(self, step: Callable[[float], list[Order]]) -> None:
        """Advance the state machine by a step, and carry out its orders."""
        with self._changed:
            if step != self._state.tick:
                self._adopt_quiet()
            orders = step(time.monotonic())
            self._changed.notify_all()
        for order in orders:
            if isinstance(order, EndProgram):
                self._send(order.engine, Abort(order.program, order.reason, order.interrupted))
                _logger.info("ordered: %s", order)
            else:
                _logger.warning("given up on: %s", order)
                self._report_loss(order)
                self.events.publish(order)

    def _adopt_quiet(self) -> None:
        """Let the state machine follow all programs.

        A thread that reads a reply stores it, and then reports it by `replied` if the program is quiet no more. So each
        reply is found here or reported there, or both.
        """
        for program in list(self.quiet):
            outcome, now = self.quiet.pop(program, None), time.monotonic()
            if outcome is not None:
                self._state.began(program, outcome.engines, now)
                for engine, reply in list(outcome.replies.items()):
                    if reply.status == "ok":
                        self._state.ended(engine, program, True, "", now)

    def _send(self, engine: int, message: Any) -> None:
        try:
            self._control.send(engine, message)  # the pidfd reports an engine that is gone
        except zmq.ZMQError as error:
            if error.errno != zmq.ENOTSOCK:
                raise
