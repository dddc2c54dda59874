"""Ending exactly the program that runs, from another thread, and never the engine.

A real-time signal of our own reaches the main thread; its handler raises only while the program's guarding frame
is on the stack. SIGINT would not do: user code swaps its handler, and libraries ignore it.
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
# Once it has been disturbed so often, an `except` of the user's that catches even this does not keep it: a loop that
# does so each time would never end.
_PATIENT = 2
# What must not be left half done, and how long it is waited for. A lock that is taken and not yet known to be, or about
# to be released, would be held for ever; a child process that is being started could not be ended with the program. All
# are brief, or wait for one. An import leaves modules behind that others have seen half-made, and that the next import
# does not make again: torch, whose first optimizer imports for seconds, would stay broken.
_BRIEF = (*LOCKING, BaseProcess.start.__code__, SemLock.__enter__.__code__, SemLock.__exit__.__code__)
_SPARED_S = dict.fromkeys(_BRIEF, 1.0) | {vars(importlib._bootstrap)["_find_and_load"].__code__: 30.0}


def spared(function: F) -> F:
    """Let a brief function of ours come to its end: half of its bookkeeping would be worse than none."""
    if isinstance(function, FunctionType):
        _SPARED_S[function.__code__] = 1.0
    return function


class _Run:
    """One guarded program, an object of its own: a late order meets the old one, and no lock is needed.

    Args:
        program: Its number.
        frame: What is above it on the stack is the program's.
        grace_s: How long it may go on when another replica has failed. If that is for ever, it does not hear of it.
        is_leftover: It is what the program left, and an order to end a later one is for it, too.
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
        self.spared_since = 0.0  # when a signal first met what must not be left half done

    def order(self, reason: str, interrupted: bool) -> None:
        """It is to end; of several orders the first one counts."""
        if self.reason is None:
            self.next_press = 0.0 if interrupted else time.monotonic() + self.grace_s
            self.interrupted, self.reason = interrupted, reason

    @property
    def ordered(self) -> bool:
        """Whether it is to end, and has not."""
        return self.reason is not None and self.frame is not None

    def error(self) -> BaseException:
        """What ends it."""
        return KeyboardInterrupt(self.reason) if self.interrupted else ProgramAborted(self.reason)


class Guard:
    """Knows which program runs in the main thread, and raises in it on demand. Make it in the main thread."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._run: _Run | None = None
        self._early: dict[int, tuple[str, bool]] = {}  # orders that overtook the program they are about
        self._forking = False
        self._beginning = threading.Lock()  # a program begins, or one is told to end with all that it waits in
        signal.signal(_SIGNAL, self._handle)
        # A signal that comes during a fork is handled in the first of the callbacks after it, which is logging's: it
        # would never release its lock. Of those callbacks these are the first before, and the last after.
        os.register_at_fork(before=self._fork_begins, after_in_parent=self._fork_ended, after_in_child=self._fork_ended)
        self._report_unraisable = sys.unraisablehook
        sys.unraisablehook = self._unraisable

    def call(self, program: int, function: Callable[[], T], grace_s: float = 0.0) -> T:
        """Call a function so that `abort(program)` raises in it; in the main thread.

        Args:
            grace_s: How long it may go on when another replica has failed; not when the user interrupts.

        Raises:
            ProgramAborted: Another replica failed.
            KeyboardInterrupt: The user interrupted.
        """
        return self._call(_Run(program, sys._getframe(), grace_s), function)

    def call_last(self, function: Callable[[], T], grace_s: float) -> T:
        """Call what is left to do for a program that was told to end; that ends this, too, when it goes on for longer.

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
        """Let go of what a program left, once it has been replied to: its destructors may take for ever.

        They are ended by the order to end a later program, which waits for them.
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
        """Whether a program runs that was not told to end; what it left is no program."""
        run = self._run
        return run is not None and run.frame is not None and run.reason is None and not run.is_leftover

    @property
    def aborted(self) -> bool:
        """Whether the latest program was told to end: whatever it then raised is a consequence, not a cause."""
        return self._run is not None and self._run.reason is not None

    @property
    def interrupted(self) -> bool:
        """Whether it was the user who ended it."""
        return self._run is not None and self._run.interrupted

    @property
    def error(self) -> BaseException:
        """What ends the latest program, if it was told to end."""
        assert self._run is not None
        return self._run.error()

    def abort(
        self,
        program: int,
        reason: str,
        interrupted: bool = False,
        free: Callable[[str], object] = lambda reason: None,
    ) -> bool:
        """Order the end of a program, from another thread. False if it is not the one that runs.

        An order may come before its program does: it is kept, and the program ends as it begins.

        Args:
            free: Called with the reason if it is the one that runs: frees what it waits in, and not what the next one
                does, which does not begin meanwhile.
        """
        with self._beginning:
            ordered = self._order(program, reason, interrupted)
            if ordered:
                free(reason)
        return ordered

    def forestall(self, program: int) -> bool:
        """Let a program end as it begins, if it has not begun; from another thread. False if it has."""
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
        """Whether something was told to end and has not yet: `press` may have to be called again."""
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
            return  # it ended in the meantime: an idle engine must live on, and the signal is not for what follows
        while frame is not None and frame is not run.frame:
            spared_s = max(spared_s, _SPARED_S.get(frame.f_code, 0.0))
            frame = frame.f_back
        # Not since the first signal was sent: on a busy machine that may come late, and the second will not wait long.
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
        """See which `except` of the user's catches what is raised now."""
        if sys.gettrace() is not None:
            return  # somebody else sees, who is not to be blinded
        while frame is not None and frame is not run.frame:
            if frame.f_globals.get("__name__") == "__main__":  # a cell's; libraries know why they catch, and raise anew
                frame.f_trace = self._insist
            frame = frame.f_back
        sys.settrace(self._insist)

    def _insist(self, frame: FrameType, event: str, argument: object) -> Any:
        """Raise once more, where the user's `except` begins: outside of its `try`. Python then traces no more."""
        run = self._run
        if event == "line" and run is not None and run.ordered and _begins_handler(frame):
            raise run.error()
        return None if event == "call" else self._insist

    def _fork_begins(self) -> None:
        self._forking = True

    def _fork_ended(self) -> None:
        self._forking = False

    def _unraisable(self, unraisable: Any) -> None:
        """An exception in a destructor or callback was dropped. Ours is no news to the user: it comes again."""
        last = unraisable.exc_traceback
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if last is None or last.tb_frame.f_code is not Guard._handle.__code__:
            self._report_unraisable(unraisable)
            return
        if self._run is not None:
            self._run.next_press = 0.0


def _begins_handler(frame: FrameType) -> bool:
    """Whether it is at the line of an `except`. Not at a `finally` or the end of a `with`, which are to tidy up."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("except")
