"""A guard that ends the program that runs, from another thread, and never the engine.

A real-time signal of our own reaches the main thread. Its handler raises only while the program's guarding frame is on
the stack. SIGINT would not be enough, because user code replaces its handler, and libraries ignore it.
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
from types import FrameType, FunctionType
from typing import Any, TypeVar

from distnb.errors import ProgramAborted
from distnb.frames import LOCKING

__all__ = ["Guard", "spared"]

_logger = logging.getLogger("distnb.engine.guard")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

_SIGNAL = signal.SIGRTMIN + 5
# User code in a `finally` is given time to clean up before it is disturbed again.
_RETRY_S = (0.25, 0.5, 1.0)
# After so many signals an `except` of the user that catches even these no longer protects the program. Otherwise a
# loop that does so each time would never end.
_PATIENT = 2
# Code that must not be left half done, and the time to wait for it. A lock that is being taken or released would be
# held for ever. A child process that is being started could not be ended with the program. All of these are brief, or
# wait for something brief. An interrupted import leaves half-made modules behind, which the next import does not make
# again: torch would stay broken, whose first optimizer imports for seconds.
_BRIEF = (*LOCKING, BaseProcess.start.__code__, SemLock.__enter__.__code__, SemLock.__exit__.__code__)
_SPARED_S = dict.fromkeys(_BRIEF, 1.0) | {vars(importlib._bootstrap)["_find_and_load"].__code__: 30.0}


def spared(function: F) -> F:
    """Let a brief function of ours complete: half of its bookkeeping would be worse than none."""
    if isinstance(function, FunctionType):
        _SPARED_S[function.__code__] = 1.0
    return function


class _Run:
    """A guarded run of a program. Each has its own object, so a late order meets the old one, and no lock is needed.

    Args:
        program: The program's number.
        frame: The guarding frame. All frames above it on the stack are the program's.
        grace_s: The time for which it may go on when another replica has failed. `inf` ignores such failures.
        is_leftover: True if it is what the program left. An order to end a later program ends it, too.
    """

    def __init__(self, program: int, frame: FrameType, grace_s: float = 0.0, *, is_leftover: bool = False) -> None:
        self.program = program
        self.grace_s = grace_s
        self.is_leftover = is_leftover
        self.frame: FrameType | None = frame
        self.reason: str | None = None
        self.interrupted = False
        self.presses = 0
        self.next_press = 0.0
        self.spared_since = 0.0  # the time when a signal first met code that must not be left half done

    def order(self, reason: str, interrupted: bool) -> None:
        """Order its end. Of several orders the first one counts."""
        if self.reason is None:
            self.next_press = 0.0 if interrupted else time.monotonic() + self.grace_s
            self.interrupted, self.reason = interrupted, reason

    @property
    def ordered(self) -> bool:
        """True if its end was ordered and it has not ended."""
        return self.reason is not None and self.frame is not None

    def error(self) -> BaseException:
        """Return the exception that ends it."""
        return KeyboardInterrupt(self.reason) if self.interrupted else ProgramAborted(self.reason)


class Guard:
    """The guard of the program in the main thread, which raises in it on demand. Make it in the main thread."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._run: _Run | None = None
        self._early: dict[int, tuple[str, bool]] = {}  # orders that overtook the program they are about
        self._forking = False
        self._beginning = threading.Lock()  # a program begins, or one is ordered to end, with its waits
        signal.signal(_SIGNAL, self._handle)
        # A signal that comes during a fork is handled in the first of the callbacks after it, which is logging's: it
        # would never release its lock. Of those callbacks these are the first before, and the last after.
        os.register_at_fork(before=self._fork_begins, after_in_parent=self._fork_ended, after_in_child=self._fork_ended)
        self._report_unraisable = sys.unraisablehook
        sys.unraisablehook = self._unraisable

    def call(self, program: int, function: Callable[[], T], grace_s: float = 0.0) -> T:
        """Call a function so that `abort(program)` raises in it; in the main thread.

        Args:
            grace_s: The time for which it may go on when another replica has failed. An interrupt ends it at once.

        Raises:
            ProgramAborted: Another replica failed.
            KeyboardInterrupt: The user interrupted.
        """
        return self._call(_Run(program, sys._getframe(), grace_s), function)

    def call_last(self, function: Callable[[], T], grace_s: float) -> T:
        """Call a function that completes a program that was ordered to end. After `grace_s` the order ends this, too.

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
        """Release what a program left, after the reply: its destructors may take for ever.

        The order to end a later program, which waits for them, ends them.
        """
        assert self._run is not None
        try:
            self._call(_Run(self._run.program, sys._getframe(), is_leftover=True), function)
        except (ProgramAborted, KeyboardInterrupt):
            pass

    def _call(self, run: _Run, function: Callable[[], T]) -> T:
        try:
            with self._beginning:  # an order comes before, and is kept, or after, and meets this run
                self._run = run
                for program, order in sorted(self._early.items()):
                    if program == run.program or (run.is_leftover and program > run.program):
                        run.order(*order)
                self._early = {later: order for later, order in self._early.items() if later > run.program}
            if run.reason is not None and not (run.grace_s or run.is_leftover):
                raise run.error()
            return function()
        finally:
            run.frame = None
            if run.presses > _PATIENT and sys.gettrace() == self._insist:
                sys.settrace(None)

    @property
    def running(self) -> bool:
        """True if a program runs whose end was not ordered. What a program left is no program."""
        run = self._run
        return run is not None and run.frame is not None and run.reason is None and not run.is_leftover

    @property
    def aborted(self) -> bool:
        """True if the latest program was ordered to end. What it then raised is a consequence, not a cause."""
        return self._run is not None and self._run.reason is not None

    @property
    def interrupted(self) -> bool:
        """True if the user ended it."""
        return self._run is not None and self._run.interrupted

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
        """Order the end of a program, from another thread. Return False if it does not run.

        An order may arrive before its program. Then it is kept, and the program ends as it begins.

        Args:
            free: Called with the reason if the program runs, to free its waits. The next program does not begin
                meanwhile.
        """
        with self._beginning:
            ordered = self._order(program, reason, interrupted)
            if ordered:
                free(reason)
        return ordered

    def forestall(self, program: int) -> bool:
        """Let a program end as it begins, from another thread. Return False if it has begun."""
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
        """True if something was ordered to end and has not ended, so that `press` may have to be called again."""
        return self._run is not None and self._run.ordered

    def press(self) -> None:
        """Send the signal if it is due; the control thread calls this often.

        One signal may be swallowed (in a destructor, a callback, a bare `except`), so it is sent again.
        """
        run = self._run
        if run is not None and run.ordered and time.monotonic() >= run.next_press:
            run.next_press = time.monotonic() + _RETRY_S[min(run.presses, len(_RETRY_S) - 1)]
            run.presses += 1
            _logger.debug("signal %d to end program %d", run.presses, run.program)
            signal.pthread_kill(self._main, _SIGNAL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        run, top, spared_s = self._run, frame, 0.0
        if run is None or not run.ordered or not run.presses:
            return  # it has ended meanwhile: the engine must live on, and the signal is not for the next program
        while frame is not None and frame is not run.frame:
            spared_s = max(spared_s, _SPARED_S.get(frame.f_code, 0.0))
            frame = frame.f_back
        # Counted from here, and not from the sending of the first signal, which may arrive late on a busy machine.
        now = time.monotonic()
        run.spared_since = (run.spared_since or now) if spared_s else 0.0
        if self._forking or (spared_s and now < run.spared_since + spared_s):
            run.next_press = 0.0
        elif frame is not None:
            run.spared_since = 0.0
            if run.presses > _PATIENT and not run.is_leftover:
                self._watch_handlers(run, top)
            raise run.error()

    def _watch_handlers(self, run: _Run, frame: FrameType | None) -> None:
        """Trace which `except` of the user catches the exception that is raised now."""
        if sys.gettrace() is not None:
            return  # another tracer is at work, and must not be replaced
        while frame is not None and frame is not run.frame:
            if (
                frame.f_globals.get("__name__") == "__main__"
            ):  # a cell's: libraries have a reason to catch, and raise again
                frame.f_trace = self._insist
            frame = frame.f_back
        sys.settrace(self._insist)

    def _insist(self, frame: FrameType, event: str, argument: object) -> Any:
        """Raise once more where the user's `except` begins, outside of its `try`. Python then stops tracing."""
        run = self._run
        if event == "line" and run is not None and run.ordered and _begins_handler(frame):
            raise run.error()
        return None if event == "call" else self._insist

    def _fork_begins(self) -> None:
        self._forking = True

    def _fork_ended(self) -> None:
        self._forking = False

    def _unraisable(self, unraisable: Any) -> None:
        """Report an exception that a destructor or callback dropped, unless it is ours, which is raised again."""
        last = unraisable.exc_traceback
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if last is None or last.tb_frame.f_code is not Guard._handle.__code__:
            self._report_unraisable(unraisable)
            return
        if self._run is not None:
            self._run.next_press = 0.0


def _begins_handler(frame: FrameType) -> bool:
    """Return whether a frame is at the line of an `except`, and not at a `finally` or the end of a `with`."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("except")
