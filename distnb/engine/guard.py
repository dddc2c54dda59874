"""Ending exactly the program that runs, from another thread, and never the engine.

What programs leave behind is ended, too: destructors and weakref callbacks that run when a program has been replied
to, or in a collection of garbage while no program runs. An order to end the next program, which waits for them, ends
them first.

A real-time signal of our own reaches the main thread; its handler raises only while the program's guarding frame
is on the stack. SIGINT would not do: user code swaps its handler, and libraries ignore it.
"""

from __future__ import annotations

import gc
import importlib
import linecache
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
    """

    def __init__(self, program: int, frame: FrameType, grace_s: float = 0.0) -> None:
        self.program = program
        self.grace_s = grace_s
        self.frame: FrameType | None = frame
        self.reason: str | None = None
        self.interrupted = False
        self.presses = 0
        self.next_press = 0.0
        self.pressed = 0.0  # for the first time

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
        self._remains: _Run | None = None  # what an earlier program left, and what a collection of garbage finds
        self._collection: _Run | None = None  # the same, where it is of a collection
        self._early: dict[int, tuple[str, bool]] = {}  # orders that overtook the program they are about
        self._forking = False
        self._beginning = threading.Lock()  # a program begins, or one is told to end with all that it waits in
        signal.signal(_SIGNAL, self._handle)
        # A signal that comes during a fork is handled in the first of the callbacks after it, which is logging's: it
        # would never release its lock. Of those callbacks these are the first before, and the last after.
        os.register_at_fork(before=self._fork_begins, after_in_parent=self._fork_ended, after_in_child=self._fork_ended)
        self._report_unraisable = sys.unraisablehook
        sys.unraisablehook = self._unraisable
        gc.callbacks.append(self._collecting)

    def call(self, program: int, function: Callable[[], T], grace_s: float = 0.0) -> T:
        """Call a function so that `abort(program)` raises in it; in the main thread.

        Args:
            grace_s: How long it may go on when another replica has failed; not when the user interrupts.

        Raises:
            ProgramAborted: Another replica failed.
            KeyboardInterrupt: The user interrupted.
        """
        with self._beginning:
            run = self._run = _Run(program, sys._getframe(), grace_s)
        return self._call(run, function)

    def call_last(self, function: Callable[[], T], grace_s: float) -> T:
        """Call what is left to do for a program that was told to end; that ends this, too, when it goes on for longer.

        Raises:
            ProgramAborted, KeyboardInterrupt: As the program did.
        """
        before = self._run
        assert before is not None
        assert before.reason is not None
        with self._beginning:
            run = _Run(before.program, sys._getframe(), grace_s)
            run.order(before.reason, before.interrupted)
            run.next_press = time.monotonic() + grace_s
            self._run = run
        return self._call(run, function)

    def _call(self, run: _Run, function: Callable[[], T]) -> T:
        program = run.program
        try:
            # Looked up after `_run` is set, as `abort` looks at `_run` after it has left its word: one of the two sees.
            if program in self._early:
                self._order(program, *self._early[program])
                self._early = {later: order for later, order in self._early.items() if later > program}
                raise ProgramAborted(run.reason)
            return function()
        finally:
            run.frame = None
            if run.presses > _PATIENT and sys.gettrace() == self._insist:
                sys.settrace(None)

    def release(self, function: Callable[[], None]) -> None:
        """Let go of what a program left, once it has been replied to. An order to end a later one ends this, too."""
        remains = self._expect(sys._getframe())
        try:
            function()
        except (ProgramAborted, KeyboardInterrupt):
            pass  # in the function itself: all the rest is done in destructors and callbacks, which drop it
        finally:
            remains.frame = self._remains = None

    def _expect(self, frame: FrameType) -> _Run:
        remains = self._remains = _Run(self._run.program if self._run is not None else 0, frame)
        # As in `call`: looked up after `_remains` is set, as `abort` looks at it after it has left its word.
        for program, order in sorted(self._early.items()):
            if program > remains.program:
                remains.order(*order)
        return remains

    def _collecting(self, phase: str, info: object) -> None:
        """The collector begins, or ends: in between it may call destructors, whose exceptions it drops."""
        if threading.get_ident() != self._main:
            return
        below = sys._getframe().f_back
        if phase == "start" and below is not None and not self._in_program and self._remains is None:
            self._collection = self._expect(below)
        elif phase == "stop" and self._collection is not None:
            self._collection.frame = self._collection = self._remains = None

    @property
    def _in_program(self) -> bool:
        return self._run is not None and self._run.frame is not None

    @property
    def aborted(self) -> bool:
        """Whether the latest program was told to end: whatever it then raised is a consequence, not a cause."""
        return self._run is not None and self._run.reason is not None

    @property
    def interrupted(self) -> bool:
        """Whether it was the user who ended it."""
        return self._run is not None and self._run.interrupted

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

    def _order(self, program: int, reason: str, interrupted: bool) -> bool:
        run = self._run
        if run is None or program > run.program:
            self._early[program] = (reason, interrupted)
            run = self._run  # it may have begun meanwhile
            remains = self._remains
            if remains is not None and remains.frame is not None:
                remains.order(reason, interrupted)
                return True
        if run is None or run.program != program or run.frame is None:
            return False
        if not interrupted and run.grace_s == math.inf:
            return False
        run.order(reason, interrupted)
        return True

    @property
    def waiting(self) -> bool:
        """Whether something was told to end and has not yet: `press` may have to be called again."""
        return any(run is not None and run.ordered for run in (self._run, self._remains))

    def press(self) -> None:
        """Send the signal if it is due; the control thread calls this often.

        One signal may be swallowed (in a destructor, a callback, a bare `except`), so it is sent again.
        """
        for run in (self._run, self._remains):
            if run is None or not run.ordered or time.monotonic() < run.next_press:
                continue
            run.next_press = time.monotonic() + _RETRY_S[min(run.presses, len(_RETRY_S) - 1)]
            run.presses += 1
            run.pressed = run.pressed or time.monotonic()
            signal.pthread_kill(self._main, _SIGNAL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        for run in (self._run, self._remains):
            # If it ended in the meantime: an idle engine must live on. Nor is the signal for what follows it.
            if run is not None and run.ordered and run.presses:
                self._raise_in(run, frame)

    def _raise_in(self, run: _Run, frame: FrameType | None) -> None:
        own = run is self._remains and frame is not None and (frame is run.frame or frame.f_code is _COLLECTING)
        spared_s, top = 0.0, frame
        while frame is not None and frame is not run.frame:
            spared_s = max(spared_s, _SPARED_S.get(frame.f_code, 0.0))
            frame = frame.f_back
        if self._forking or own or time.monotonic() < run.pressed + spared_s:
            run.next_press = 0.0
        elif frame is not None:
            if run is self._run and run.presses > _PATIENT:
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
        if last is None or last.tb_frame.f_code is not Guard._raise_in.__code__:
            self._report_unraisable(unraisable)
            return
        for run in (self._run, self._remains):
            if run is not None:
                run.next_press = 0.0


def _begins_handler(frame: FrameType) -> bool:
    """Whether it is at the line of an `except`. Not at a `finally` or the end of a `with`, which are to tidy up."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("except")


_COLLECTING = Guard._collecting.__code__
