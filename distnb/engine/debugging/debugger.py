"""IPython's pdb in a replica's own frames, with its prompt in the notebook."""

from __future__ import annotations

import pdb  # noqa: T100  (to redirect its callers to ours)
import sys
from bdb import BdbQuit
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from IPython.core.debugger import Pdb

from distnb.compat import patches
from distnb.engine import guard
from distnb.engine.debugging.console import Console
from distnb.frames import OWN, cell_name, spared

__all__ = ["ReplicaPdb", "at_breakpoint", "post_mortem", "redirect", "stop_stepping"]

_QUIT = "You ended the cell at the debugger's prompt."


class ReplicaPdb(Pdb):
    """IPython's debugger on a `Console`, without distnb's frames.

    Attributes:
        who: The beginning of its prompt, such as "replica 1 (cpu:1)".
        after_line: Called after each command.
    """

    who = ""
    after_line: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, completekey: Any = None, stdin: Any = None, stdout: Any = None, **options: Any) -> None:
        # pdb must not handle SIGINT here. The notebook's Ctrl-C ends the program by the guard's signal.
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True, **options)
        self.report_skipped = False
        self.prompt = f"{self.who}> "
        _forget_latest()

    def set_trace(self, frame: FrameType | None = None, **options: Any) -> None:
        """Stop in a frame."""
        super().set_trace(frame, **options)  # type: ignore[no-untyped-call]
        _forget_latest()

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the user's frames, from the cell's own frame on. If there are none, return all frames."""
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

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], *options: Any) -> str:
        """Format one frame, with the cell's name instead of its file name."""
        text = str(super().format_stack_entry(frame_lineno, *options))
        filename = self.canonic(frame_lineno[0].f_code.co_filename)
        return text.replace(filename, cell_name(filename, self.shell) or filename, 1)

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether stepping stops in a frame. It never stops in ours."""
        return not frame.f_code.co_filename.startswith(OWN) and bool(super().stop_here(frame))  # type: ignore[no-untyped-call]

    def postcmd(self, stop: bool, line: str) -> bool:
        """Call `after_line` after a command, and return whether the user leaves."""
        self.after_line()
        return stop

    def _cmdloop(self) -> None:
        # The loops of pdb and IPython continue after a KeyboardInterrupt, which ends the program here.
        self.cmdloop()

    def interaction(self, frame: FrameType | None, tb_or_exc: Any) -> None:
        """Read and run the user's commands. Raise on the notebook's order to end the program, and on the user's `q`."""
        console: Console = self.stdin  # type: ignore[assignment]
        try:
            super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
            console.check()
            if self.quitting:
                raise BdbQuit(_QUIT)
        except BaseException as error:
            self._ended_by(error, frame)
            raise
        if self.stoplineno == -1:  # it does not stop again by itself
            console.leave()

    @spared  # an order to end the program frees the waiting thread and sends a signal, which may arrive now
    def _ended_by(self, error: BaseException, frame: FrameType | None) -> None:
        """Record the error that ends the program at the prompt, and the user's frames there."""
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
    """Stop in a user's frame, in the line after the breakpoint (since Python 3.13: in the breakpoint's line).

    Args:
        who: The name of this replica, one of `size`.
        header: A line to show first.
        commands: The debugger's commands to run before it asks.
    """
    others = "The other replicas continue until they need this one. " if size > 1 else ""
    on = " on all replicas" if size > 1 else ""
    console.write(f"{who[:1].upper()}{who[1:]} stopped. {others}c continues it, q ends the cell{on}.\n")
    if header is not None:
        console.write(f"{header}\n")
    debugger = _debugger(console, who)
    debugger.rcLines.extend(commands)
    debugger.set_trace(frame)


def post_mortem(console: Console, who: str, traceback: TracebackType, after_line: Callable[[], None]) -> None:
    """Debug the frames of a traceback until the user leaves. `after_line` is called after each command."""
    debugger = _debugger(console, who)
    debugger.after_line = after_line
    debugger.reset()
    with suppress(BdbQuit):
        debugger.interaction(None, traceback)
    console.leave()


def _debugger(console: Console, who: str) -> ReplicaPdb:
    kind = type("ReplicaPdb", (ReplicaPdb,), {"who": who})  # `debug` at the prompt makes another debugger of this class
    debugger: ReplicaPdb = kind(stdin=console, stdout=console)
    return debugger


def stop_stepping() -> None:
    """Stop tracing after a program has ended."""
    if (tracer := sys.gettrace()) is not None and isinstance(getattr(tracer, "__self__", None), ReplicaPdb):
        sys.settrace(None)


def redirect(stop: Callable[[FrameType, str | None, Iterable[str]], None]) -> None:
    """Have `pdb.set_trace`, and debuggers derived from it, call `stop`.

    Debuggers with a connection of their own, such as remote debuggers, keep it.
    """
    set_trace = pdb.Pdb.set_trace

    def ours(debugger: pdb.Pdb, frame: FrameType | None = None, *, commands: Iterable[str] | None = None) -> None:
        if isinstance(debugger, ReplicaPdb) or not debugger.use_rawinput:
            set_trace(debugger, frame, **({"commands": commands} if commands is not None else {}))
        else:
            stop(frame or sys._getframe(1), None, commands or ())

    patches.replace("pdb:Pdb.set_trace", ours)
    if sys.version_info >= (3, 14):
        set_trace_async = pdb.Pdb.set_trace_async

        async def ours_async(
            debugger: pdb.Pdb, frame: FrameType | None = None, *, commands: Iterable[str] | None = None
        ) -> None:
            if isinstance(debugger, ReplicaPdb) or not debugger.use_rawinput:
                await set_trace_async(debugger, frame, commands=commands)
            else:
                stop(frame or sys._getframe(1), None, commands or ())

        patches.replace("pdb:Pdb.set_trace_async", ours_async)


def _forget_latest() -> None:
    """Have `pdb.set_trace` create a debugger. Since Python 3.14 it uses the latest one, which may be ours."""
    pdb.Pdb._last_pdb_instance = None  # type: ignore[attr-defined]
