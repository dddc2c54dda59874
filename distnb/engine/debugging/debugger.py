"""A debugger's prompt in a replica's own frames, for the user in the notebook: pdb as IPython has it."""

from __future__ import annotations

import pdb  # noqa: T100  (to lead to ours whoever calls it)
import sys
from bdb import BdbQuit
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from IPython.core.debugger import Pdb

from distnb.engine import guard
from distnb.engine.debugging.console import Console
from distnb.frames import OWN

__all__ = ["ReplicaPdb", "at_breakpoint", "post_mortem", "redirect", "stop_stepping"]

_QUIT = "The cell was ended at the debugger's prompt."


class ReplicaPdb(Pdb):
    """IPython's debugger, which asks by a `Console` and shows none of distnb's frames.

    Attributes:
        who: What its prompt begins with, "replica 1 (cpu:1)".
        after_line: Called after each command.
    """

    who = ""
    after_line: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, completekey: Any = None, stdin: Any = None, stdout: Any = None, **options: Any) -> None:
        # Nobody may be interrupted by SIGINT here: the notebook's Ctrl-C ends the program, by the guard.
        super().__init__(None, stdin, stdout, nosigint=True, **options)
        self.report_skipped = False
        self.prompt = f"{self.who}> "
        _forget_latest()

    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        """Stop in a frame."""
        super().set_trace(frame, **options)  # type: ignore[no-untyped-call]
        _forget_latest()

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """The user's frames, from the cell's own on; all of them where there are no others."""
        stack, _ = super().get_stack(f, t)  # type: ignore[no-untyped-call]
        guarded = [place for place, (frame, _) in enumerate(stack) if frame.f_code.co_filename == guard.__file__]
        users = [
            entry
            for entry in stack[guarded[-1] + 1 if guarded else 0 :]
            if not entry[0].f_code.co_filename.startswith(OWN)
        ]
        shown = users or stack
        at = [place for place, (frame, _) in enumerate(shown) if frame is f]
        return shown, at[-1] if at else len(shown) - 1

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """One frame, of a cell by the cell's name."""
        text = str(super().format_stack_entry(frame_lineno, lprefix))
        filename = self.canonic(frame_lineno[0].f_code.co_filename)
        name = self.shell.compile.format_code_name(filename)
        return text.replace(filename, " ".join(name), 1) if name is not None else text

    def stop_here(self, frame: FrameType) -> bool:
        """Whether stepping stops in a frame: never in ours."""
        return not frame.f_code.co_filename.startswith(OWN) and bool(super().stop_here(frame))  # type: ignore[no-untyped-call]

    def postcmd(self, stop: bool, line: str) -> bool:
        """Whether the user leaves, after a command."""
        self.after_line()
        return stop

    def _cmdloop(self) -> None:
        # pdb's and IPython's own begin again after a KeyboardInterrupt, which ends the program here.
        self.cmdloop()

    def interaction(self, frame: FrameType | None, tb_or_exc: Any) -> None:
        """Talk with the user. Raises what ends the program: the notebook's word, or the user's `q`."""
        console: Console = self.stdin  # type: ignore[assignment]
        try:
            super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
            console.check()
            if self.quitting:
                raise BdbQuit(_QUIT)
        except BaseException as error:
            self._ended_by(error, frame)
            raise
        if self.stoplineno == -1:  # it stops no more by itself
            console.leave()

    @guard.spared  # a program is told to end by a word to who waits here and by a signal: the second one comes now
    def _ended_by(self, error: BaseException, frame: FrameType | None) -> None:
        """The program ends at the prompt: note where that is."""
        console: Console = self.stdin  # type: ignore[assignment]
        sys.settrace(None)
        console.leave()
        if frame is not None:
            stopped: TracebackType | None = None
            for each, line in reversed(self.get_stack(frame, None)[0]):
                stopped = TracebackType(stopped, each, each.f_lasti, line)
            console.stopped_in = error, stopped  # Python leaves out a frame that was about to return


def at_breakpoint(
    console: Console, who: str, size: int, frame: FrameType, header: str | None = None, commands: Iterable[str] = ()
) -> None:
    """Stop in a frame of the user's, in the line that comes next (since Python 3.13: in that of the breakpoint).

    Args:
        who: Names one of `size` replicas.
        header: A line to show first.
        commands: What the debugger does before it asks.
    """
    others = "The other replicas go on until they need this one. " if size > 1 else ""
    on = " on all replicas" if size > 1 else ""
    console.write(f"{who[:1].upper()}{who[1:]} stops. {others}c lets it go on, q ends the cell{on}.\n")
    if header is not None:
        console.write(f"{header}\n")
    debugger = _debugger(console, who)
    debugger.rcLines.extend(commands)
    debugger.set_trace(frame)


def post_mortem(console: Console, who: str, traceback: TracebackType, after_line: Callable[[], None]) -> None:
    """Look around in the frames of a traceback, until the user leaves. `after_line` is called after each command."""
    debugger = _debugger(console, who)
    debugger.after_line = after_line
    debugger.reset()
    with suppress(BdbQuit):
        debugger.interaction(None, traceback)
    console.leave()


def _debugger(console: Console, who: str) -> ReplicaPdb:
    kind = type("ReplicaPdb", (ReplicaPdb,), {"who": who})  # `debug` at the prompt makes another one
    debugger: ReplicaPdb = kind(stdin=console, stdout=console)
    return debugger


def stop_stepping() -> None:
    """The program has ended: what follows is not traced."""
    if isinstance(getattr(sys.gettrace(), "__self__", None), ReplicaPdb):
        sys.settrace(None)


def redirect(stop: Callable[[FrameType, str | None, Iterable[str]], None]) -> None:
    """Let `pdb.set_trace`, and debuggers made of it, stop by a call of this.

    Those that have a connection of their own, as remote debuggers do, are left alone.
    """
    set_trace = pdb.Pdb.set_trace

    def ours(debugger: pdb.Pdb, frame: FrameType | None = None, *, commands: Iterable[str] | None = None) -> None:
        if isinstance(debugger, ReplicaPdb) or not debugger.use_rawinput:
            set_trace(debugger, frame, **({"commands": commands} if commands is not None else {}))
        else:
            stop(frame or sys._getframe(1), None, commands or ())

    pdb.Pdb.set_trace = ours  # type: ignore[assignment, method-assign]
    if sys.version_info >= (3, 14):
        set_trace_async = pdb.Pdb.set_trace_async

        async def ours_async(
            debugger: pdb.Pdb, frame: FrameType | None = None, *, commands: Iterable[str] | None = None
        ) -> None:
            if isinstance(debugger, ReplicaPdb) or not debugger.use_rawinput:
                await set_trace_async(debugger, frame, commands=commands)
            else:
                stop(frame or sys._getframe(1), None, commands or ())

        pdb.Pdb.set_trace_async = ours_async


def _forget_latest() -> None:
    """Have `pdb.set_trace` make a debugger: since Python 3.14 it takes the latest one, which may be ours."""
    pdb.Pdb._last_pdb_instance = None  # type: ignore[attr-defined]
