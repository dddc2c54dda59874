"""A guard that ends the running program from another thread, and never the engine.

The guard sends a real-time signal to the main thread. The handler raises only while the program's guarding frame is on
the stack. SIGINT would not do, because user code replaces its handler, and some libraries ignore it.
"""

from __future__ import annotations

import importlib
import linecache
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import SemLock
from types import FrameType
from typing import Any, TypeVar

from distnb.errors import ProgramAborted, ProgramInterrupted
from distnb.frames import SPARED_S

__all__ = ["Guard"]

_logger = logging.getLogger("distnb.engine.guard")
T = TypeVar("T")

_SIGNAL = signal.SIGRTMIN + 5
# A destructor or a bare `except` may swallow the exception that a signal raises, so the signal is repeated.
_RETRY_S = (0.25, 0.5, 1.0)
# After the user's stop, an `except KeyboardInterrupt` or a `finally` may take so long before the next signal.
_CLEANING_S = 30.0
# The number of signals after which a user's `except` that catches even these exceptions no longer protects the program.
# Otherwise a loop that catches each of them would never end.
_PATIENT = 2
# More code that must not be interrupted, and the time in seconds to wait for it:
# - Locks: a lock that is being acquired or released would be held forever.
# - The start of a child process: the process could not be ended with the program.
# - An import: it would leave half-initialised modules, which the next import does not load again. The first optimizer
#   of torch imports for seconds, and torch would then stay broken.
# All except imports are brief, or wait for something brief.
SPARED_S.update(
    dict.fromkeys((BaseProcess.start.__code__, SemLock.__enter__.__code__, SemLock.__exit__.__code__), 1.0)
    | {vars(importlib._bootstrap)["_find_and_load"].__code__: 30.0}
)


class _Run:
    """A guarded run of a program. Each run has its own object, so a late order meets the old one and needs no lock.

    Args:
        program: The program's number.
        frame: The guarding frame. All frames above it on the stack are the program's.
        grace_s: The time for which it may continue after another replica's failure. `inf` ignores such failures.
        is_leftover: True if it releases what the program left. An order to end a later program ends it, too.
        may_clean_up: True for the program itself, whose handlers have time after the user's stop.
    """

    def __init__(
        self,
        program: int,
        frame: FrameType,
        grace_s: float = 0.0,
        *,
        is_leftover: bool = False,
        may_clean_up: bool = False,
    ) -> None:
        self.program = program
        self.grace_s = grace_s
        self.is_leftover = is_leftover
        self.may_clean_up = may_clean_up
        self.cleans_until = 0.0  # the time until which the program's handlers are not disturbed
        self.frame: FrameType | None = frame
        self.reason: str | None = None
        self.interrupted = False
        self.noticed = False  # whether a signal has arrived in the program
        self.presses = 0
        self.next_press = 0.0
        self.spared_since = 0.0  # the time when a signal first met code that must not be interrupted

    def order(self, reason: str, interrupted: bool) -> None:
        """Order its end. The first of several orders counts, but the user's second stop ends the user's handlers."""
        now = time.monotonic()
        if self.reason is None:
            self.next_press = 0.0 if interrupted else now + self.grace_s
            self.cleans_until = now + _CLEANING_S if interrupted and self.may_clean_up else 0.0
            self.interrupted, self.reason = interrupted, reason
        elif self.interrupted and interrupted:
            self.next_press = self.cleans_until = 0.0

    @property
    def ordered(self) -> bool:
        """True if its end was ordered and it has not ended."""
        return self.reason is not None and self.frame is not None

    def error(self) -> BaseException:
        """Return the exception that ends it."""
        return ProgramInterrupted(self.reason) if self.interrupted else ProgramAborted(self.reason)


class Guard:
    """The guard of the program in the main thread, which raises an exception there on demand. Create it there, too."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._run: _Run | None = None
        self._early: dict[int, tuple[str, bool]] = {}  # orders that arrived before their programs
        self._forking = False
        self._beginning = threading.Lock()  # held while a program begins, or while one is ordered to end and freed
        signal.signal(_SIGNAL, self._handle)
        # Python would handle a signal that arrives during a fork in the first callback after it. That one is logging's,
        # which would never release its lock. The callbacks here are the first before a fork, and the last after it.
        os.register_at_fork(before=self._fork_begins, after_in_parent=self._fork_ended, after_in_child=self._fork_ended)
        self._report_unraisable = sys.unraisablehook
        sys.unraisablehook = self._unraisable

    def call(self, program: int, function: Callable[[], T], grace_s: float = 0.0) -> T:
        """Call a function so that `abort(program)` raises in it. Call this in the main thread.

        Args:
            grace_s: The time for which it may continue after another replica's failure. An interrupt ends it at once.

        Raises:
            ProgramAborted: Another replica failed.
            KeyboardInterrupt: The user interrupted.
        """
        return self._call(_Run(program, sys._getframe(), grace_s, may_clean_up=not grace_s), function)

    def call_last(self, function: Callable[[], T], grace_s: float) -> T:
        """Call a function that completes a program after the order to end it. After `grace_s` the order ends this, too.

        Raises:
            ProgramAborted, KeyboardInterrupt: As the program did.
        """
        before = self._run
        assert before is not None
        assert before.reason is not None
        run = _Run(before.program, sys._getframe(), grace_s)
        run.order(before.reason, before.interrupted)
        run.next_press = time.monotonic() + grace_s
        return self._call(run, function)

    def release(self, function: Callable[[], None]) -> None:
        """Release a program's leftover objects after the reply, since their destructors may take forever.

        A later program waits for the destructors. The order to end that program ends them, too.
        """
        assert self._run is not None
        try:
            self._call(_Run(self._run.program, sys._getframe(), is_leftover=True), function)
        except (ProgramAborted, KeyboardInterrupt):
            pass

    def _call(self, run: _Run, function: Callable[[], T]) -> T:
        try:
            with self._beginning:  # an earlier order has been kept; a later one finds this run
                self._run = run
                if self._early:
                    for program, order in sorted(self._early.items()):
                        if program == run.program or (run.is_leftover and program > run.program):
                            run.order(*order)
                    self._early = {later: order for later, order in self._early.items() if later > run.program}
            if run.reason is not None and not (run.grace_s or run.is_leftover):
                raise run.error()
            return function()
        finally:
            run.frame = None
            if run.presses > _PATIENT and sys.gettrace() == self._raise_in_handler:
                sys.settrace(None)

    @property
    def running(self) -> bool:
        """True if a program runs and its end was not ordered. The release of leftovers does not count."""
        run = self._run
        return run is not None and run.frame is not None and run.reason is None and not run.is_leftover

    @property
    def aborted(self) -> bool:
        """True if the latest program was ordered to end. Its own error is then a consequence, and not the cause."""
        return self._run is not None and self._run.reason is not None

    @property
    def interrupted(self) -> bool:
        """True if the user ended the latest program."""
        return self._run is not None and self._run.interrupted

    @property
    def cleans_up(self) -> int | None:
        """The program whose `except KeyboardInterrupt` or `finally` runs because of the user's stop, or None."""
        run = self._run
        return run.program if run is not None and self._cleans_up(run) else None

    def _cleans_up(self, run: _Run) -> bool:
        return run.ordered and time.monotonic() < run.cleans_until and _handles_interrupt(self._main)

    @property
    def caught(self) -> bool:
        """True if the latest program caught the user's interrupt, provided that it has ended without an error."""
        return self._run is not None and self._run.interrupted and self._run.noticed

    @property
    def error(self) -> BaseException:
        """The exception that ends the latest program, which was ordered to end."""
        assert self._run is not None
        return self._run.error()

    def abort(
        self,
        program: int,
        reason: str,
        interrupted: bool = False,
        free: Callable[[str], object] = lambda reason: None,
    ) -> bool:
        """Order the end of a program, from another thread. Return False if the program does not run.

        If the order arrives before its program, it is kept, and the program ends as soon as it begins.

        Args:
            free: Called with the reason if the program runs, to free its waits. The next program cannot begin
                meanwhile.
        """
        with self._beginning:
            ordered = self._order(program, reason, interrupted)
            if ordered:
                if interrupted:
                    self.press()  # before the waits are freed: the program may end as soon as they are
                free(reason)
        return ordered

    def withdraw(self, program: int) -> bool:
        """Order the end of a program before it begins, from another thread. Return False if it has begun."""
        with self._beginning:
            begun = self._run is not None and program <= self._run.program
            if not begun:
                self._early[program] = ("taken back", False)
            return not begun

    def _order(self, program: int, reason: str, interrupted: bool) -> bool:
        run = self._run
        if run is None or program > run.program:
            self._early[program] = (reason, interrupted)
        if run is None or run.frame is None:
            return False
        if program != run.program and not (run.is_leftover and program > run.program):
            return False
        if not interrupted and run.grace_s == math.inf:
            return False
        run.order(reason, interrupted)
        return True

    @property
    def waiting(self) -> bool:
        """True if a run was ordered to end and has not ended, so `press` may have to be called again."""
        return self._run is not None and self._run.ordered

    def press(self) -> None:
        """Send the signal if it is due; the control thread calls this often.

        User code may swallow a signal's exception (in a destructor, a callback, a bare `except`), so the signal is sent
        again, unless the program handles the user's stop.
        """
        run = self._run
        if run is not None and run.ordered and time.monotonic() >= run.next_press and not self._cleans_up(run):
            run.next_press = time.monotonic() + _RETRY_S[min(run.presses, len(_RETRY_S) - 1)]
            run.presses += 1
            _logger.debug("signal %d to end program %d", run.presses, run.program)
            signal.pthread_kill(self._main, _SIGNAL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        run, top, spared_s = self._run, frame, 0.0
        if run is None or not run.ordered or not run.presses:
            return  # the program has ended meanwhile; the signal must not end the engine or the next program
        if self._cleans_up(run):
            run.noticed = True  # a collective that was freed has raised
            return
        while frame is not None and frame is not run.frame:
            spared_s = max(spared_s, SPARED_S.get(frame.f_code, 0.0))
            frame = frame.f_back
        # The time counts from the first arrival, not from the first sending: a signal may be late on a busy machine.
        now = time.monotonic()
        run.spared_since = (run.spared_since or now) if spared_s else 0.0
        if self._forking or (spared_s and now < run.spared_since + spared_s):
            run.next_press = 0.0
        elif frame is not None:
            run.spared_since, run.noticed = 0.0, True
            if run.presses > _PATIENT and not run.is_leftover:
                self._watch_handlers(run, top)
            raise run.error()

    def _watch_handlers(self, run: _Run, frame: FrameType | None) -> None:
        """Trace the user's code, to find the `except` that catches the exception about to be raised."""
        if sys.gettrace() is not None:
            return  # another tracer is active, and must not be replaced
        while frame is not None and frame is not run.frame:
            if (
                frame.f_globals.get("__name__") == "__main__"
            ):  # only frames of a cell: libraries catch for a reason, and raise again
                frame.f_trace = self._raise_in_handler
            frame = frame.f_back
        sys.settrace(self._raise_in_handler)

    def _raise_in_handler(self, frame: FrameType, event: str, argument: object) -> Any:
        """Raise again where the user's `except` begins, outside its `try`. Python then stops tracing."""
        run = self._run
        if event == "line" and run is not None and run.ordered and _begins_handler(frame):
            raise run.error()
        return None if event == "call" else self._raise_in_handler

    def _fork_begins(self) -> None:
        self._forking = True

    def _fork_ended(self) -> None:
        self._forking = False

    def _unraisable(self, unraisable: Any) -> None:
        """Report an exception that a destructor or callback dropped. One of ours is raised again instead."""
        last = unraisable.exc_traceback
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if last is None or last.tb_frame.f_code is not Guard._handle.__code__:
            self._report_unraisable(unraisable)
            return
        if self._run is not None:
            self._run.next_press = 0.0


def _handles_interrupt(thread: int) -> bool:
    """Return whether a thread runs an `except`, a `finally` or an `__exit__` because of a KeyboardInterrupt."""
    found: Any = sys._current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found  # a tuple in Python 3.11
    seen: list[BaseException] = []
    while error is not None and all(error is not each for each in seen):
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.append(error)
        error = error.__context__
    return False


def _begins_handler(frame: FrameType) -> bool:
    """Return whether a frame is at the line of an `except`, and not at a `finally` or the end of a `with`."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("except")
