"""The console of a replica, whose prompts the notebook shows to its user, one line at a time."""

from __future__ import annotations

import io
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from distnb.engine.guard import Guard
from distnb.engine.output import telemetry
from distnb.frames import OWN
from distnb.runtime.this_process import this_process
from distnb.wire.messages import Answer, InputFinished, InputRequest, Output

__all__ = ["Console"]

_NOBODY = (
    "{what} was called where it cannot ask the user: in a child process of a replica (num_workers=0 keeps a DataLoader "
    "in the replica itself), or while the notebook runs no program on the replica."
)
_BLOCKED_S = 0.3  # a collective that takes longer is assumed to wait for other replicas
_AWAY_S = 2.0  # if a debugger's command takes longer, other replicas may ask
_COLLECTIVES = os.path.join(OWN, "collectives", "")


class Console(io.TextIOBase):
    """A stream that debuggers read from and write to, and that asks for `input`. Several threads take turns.

    Written text is kept, and shown above the next prompt. An order to end the program frees the thread that waits for
    an answer.

    Args:
        running: Returns the current (program, replica).
        emit: Sends an event to the notebook, at once if it is `urgent`.

    Attributes:
        refusal: The reason why the running program cannot ask the user, with a place for `{what}`; "" if it can.
        stopped_in: The error that ended the program at a debugger's prompt, and the user's frames there.
    """

    def __init__(
        self, engine: int, guard: Guard, running: Callable[[], tuple[int, int] | None], emit: Callable[..., None]
    ) -> None:
        self._engine = engine
        self._guard = guard
        self._running = running
        self._emit = emit
        self._owner = os.getpid()
        self._turn = threading.RLock()
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()  # a signal can safely end its `get`
        self._written: list[str] = []
        self._inside = False  # True if the notebook shows this replica's prompt
        self._debugging = False  # True if a debugger has asked, and will ask again
        self._since: float | None = None  # the time when the debugger received its current command
        self.refusal = ""
        self.stopped_in: tuple[BaseException, TracebackType | None] | None = None

    # -- the replica's threads -------------------------------------------------------------------------------------

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._written.append(text)
        return len(text)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Return a debugger's next line; "" at the end of input. The prompt is the line that it has begun to write."""
        text, newline, prompt = "".join(self._written).rpartition("\n")
        self._written = [text + newline]
        self._debugging = True
        try:
            return self._ask(prompt, "A debugger") + "\n"
        except EOFError:
            return ""

    def input(self, prompt: object = "") -> str:
        """Ask the user for a line, like Python's `input`."""
        return self._input(prompt, "input()")

    def getpass(self, prompt: str = "Password: ", stream: object = None, **keywords: object) -> str:
        """Ask the user for a password, like `getpass.getpass`."""
        return self._input(prompt, "getpass()", hidden=True)

    def _input(self, prompt: object, what: str, *, hidden: bool = False) -> str:
        process = this_process.replica
        mark = (
            f"[{process.rank}] " if process is not None and process.size > 1 else ""
        )  # the same mark as before its output
        try:
            return self._ask(f"{mark}{prompt}", what, hidden=hidden)
        finally:
            if not self._debugging:
                self.leave()

    def _ask(self, prompt: str, what: str, *, hidden: bool = False) -> str:
        running = self._running()
        if running is None or os.getpid() != self._owner:
            raise RuntimeError(_NOBODY.format(what=what))
        if self.refusal:
            raise RuntimeError(self.refusal.format(what=what))
        with self._turn:
            self._since = None
            while not self._answers.empty():
                self._answers.get()
            self.check()  # after emptying the queue: an order to end that arrives from here on puts None into it
            text, self._written = "".join(self._written), []
            program, replica = running
            self._inside = True
            self._emit(
                InputRequest(
                    engine=self._engine, program=program, replica=replica, text=text, prompt=prompt, hidden=hidden
                ),
                urgent=True,
            )
            answer = self._answers.get()
            self._since = time.monotonic() if self._debugging else None
            self.check()
        if answer is None or answer.refusal:
            raise RuntimeError(f"{what}: {answer.refusal if answer else 'the program has ended.'}")
        if answer.line is None:
            raise EOFError
        return answer.line

    def check(self) -> None:
        """Raise the exception of an order to end the program, since debuggers ignore a KeyboardInterrupt."""
        if self._guard.aborted:
            self._written = []  # the debugger's own text about the interrupt
            raise self._guard.error

    def leave(self) -> None:
        """Report that the user is no longer at this prompt, since the program continues or has ended."""
        self._since, self._debugging = None, False
        if not (self._written or self._inside):
            return
        running = self._running()
        if running is None or os.getpid() != self._owner:
            return
        if self._written:
            text, self._written = "".join(self._written), []
            self._print(text, *running)
        if self._inside:
            self._inside = False
            self._emit(InputFinished(self._engine, *running), urgent=True)

    # -- the control thread ----------------------------------------------------------------------------------------

    def answer(self, answer: Answer) -> None:
        """Pass the user's answer to the thread that waits for it."""
        running = self._running()
        if running is not None and running[0] == answer.program:
            self._answers.put(answer)

    def free(self) -> None:
        """Free the thread that waits for an answer, since the program is ordered to end."""
        self._answers.put(None)

    def watch_command(self) -> None:
        """Report a debugger's command that waits for the other replicas. It is called many times a second."""
        since, running = self._since, self._running()
        if since is None or running is None:
            return
        passed = time.monotonic() - since
        name = _collective() if passed >= _BLOCKED_S else ""
        if self._inside and (name or passed >= _AWAY_S):  # others may ask meanwhile
            self._inside = False
            self._emit(InputFinished(self._engine, *running))
        if name:
            self._since = None
            text = f"{name}: this replica waits until every other replica has called it.\n"
            self._print(text, *running)

    def _print(self, text: str, program: int, replica: int) -> None:
        self._emit(Output(engine=self._engine, program=program, replica=replica, stream="stdout", text=text))


def _collective() -> str:
    """Return the main thread's collective and the user's line that called it: "all_reduce (cell 3, line 4)"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    codes: list[Any] = []
    while frame is not None and not _is_users(frame):
        codes.append(frame.f_code)
        frame = frame.f_back
    if frame is None or not any(code.co_filename.startswith(_COLLECTIVES) for code in codes):
        return ""
    named = [code.co_name for code in codes if code.co_name != "wrapper"]
    where = telemetry.innermost([(frame, frame.f_lineno)])[0]
    return f"{named[-1]} ({where})" if where else named[-1]


def _is_users(frame: FrameType) -> bool:
    torch = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or os.devnull) + os.sep
    return not frame.f_code.co_filename.startswith((OWN, torch))
