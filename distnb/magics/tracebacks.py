"""The display of errors in a notebook: with the user's lines, and without distnb's own."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import IPython
from IPython.core.error import UsageError

from distnb.compat.ipython_internals import draw_notes, show_lines
from distnb.errors import DistnbError, ProgramError
from distnb.frames import (
    OWN,
    cell_name,
    frames_of,
    frames_without,
    raised_by_distnb,
    torch_frames,
    traceback_of,
    with_frames,
)
from distnb.notebook.handles.handle import HANDLES

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.notebook.session import Session

__all__ = ["callers_lines", "debug_on_replicas", "presented", "show_plainly", "users_part"]

_IPYTHON = os.path.dirname(IPython.__file__) + os.sep
_HANDLE = (
    "({} is a handle: the object itself lives on the replicas. Use the object there: in a %%distribute cell, in the "
    "body of `with strategy.scope():`, or in a function that strategy.run calls. strategy.local_results(handle)[0] is "
    "a copy of it.)"
)
_MAGIC = re.compile(r"magic (?:function )?`%{1,2}(\w+)`", re.IGNORECASE)
_MAGICS = {"distribute": "%%distribute", "distnb": "%distnb", "autodistribute": "%autodistribute"}


def show_plainly(shell: InteractiveShell) -> None:
    """Make a shell show errors without distnb's frames. A handler of another extension is kept."""
    draw_notes(shell.InteractiveTB)
    if not shell.custom_exceptions:
        # This includes the user's own errors, which may have passed through distnb, or follow one of its errors.
        shell.set_custom_exc((BaseException,), _show)


def debug_on_replicas(shell: InteractiveShell, session: Callable[[], Session | None]) -> None:
    """Make IPython's `%debug` and `%pdb` open the debugger of the replica that raised the last error shown."""
    here: Callable[..., None] = shell.debugger

    def debugger(force: bool = False) -> None:
        current = session()
        failure = current.programs.failure if current is not None else None
        if current is None or failure is None or failure.error is not getattr(sys, "last_value", None):
            here(force=force)
        elif force or shell.call_pdb:
            try:
                current.programs.debug()
            except ProgramError:  # no line of the user's code failed there, or its process has ended
                here(force=True)

    shell.debugger = debugger  # type: ignore[method-assign]


def _show(
    shell: Any, kind: type[BaseException], error: BaseException, traceback: Any, tb_offset: int | None = None
) -> Any:
    own = getattr(error, "_render_traceback_", None)
    # IPython ignores the rendering that errors of these types have, and ignores `%xmode Minimal` for other errors with
    # a rendering of their own. If it joins lines without a separator, as in a terminal, each line needs its end.
    minimal = shell.InteractiveTB.mode == "Minimal"
    joined = not hasattr(shell, "kernel") and not shell.InteractiveTB.tb_join_char
    if own is not None and (minimal or joined or isinstance(error, SyntaxError | BaseExceptionGroup)):
        text = shell.InteractiveTB.get_exception_only(kind, error) if minimal else own()
        lines = [f"{line}\n" for line in text] if joined and not minimal else text
        show_lines(shell, (kind, error, traceback), lines)
        if shell.call_pdb:
            shell.debugger(force=True)
        return text
    if own is not None:
        shell.showtraceback((kind, error, traceback), tb_offset=tb_offset, running_compiled_code=True)
        return None
    _note_handles(error)
    _name_magic(error)
    with with_frames(error, _shown):
        shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset, running_compiled_code=True)
    sys.last_traceback = traceback  # for %tb, which shows all frames
    return None


def _note_handles(error: BaseException) -> None:
    """Explain the error of a library that got a handle but requires the object itself."""
    if isinstance(error, TypeError | ValueError) and not isinstance(error, DistnbError):
        word = next((kind.__name__ for kind in HANDLES if kind.__name__ in str(error)), "")
        if word and _HANDLE.format(word) not in getattr(error, "__notes__", ()):
            error.add_note(_HANDLE.format(word))


def _name_magic(error: BaseException) -> None:
    """Add to IPython's error for a misspelt magic the one of distnb's that was probably meant."""
    found = _MAGIC.search(str(error)) if isinstance(error, UsageError) else None
    similar = difflib.get_close_matches(found[1], _MAGICS, 1) if found else []
    if similar:
        error.args = (f"{str(error).rstrip('.')}. Did you mean {_MAGICS[similar[0]]}?",)


def _shown(error: BaseException) -> Sequence[TracebackType]:
    """Return the frames of an error that are shown: all of them for an unexpected error in distnb, a defect."""
    frames = frames_of(error.__traceback__)
    known = isinstance(error, DistnbError) or not isinstance(error, Exception) or hasattr(error, "_render_traceback_")
    if not known and frames and raised_by_distnb(frames[-1].tb_frame):
        return frames
    return frames_of(users_part(error.__traceback__, (OWN, *torch_frames(error))))


def callers_lines(shell: InteractiveShell, error: BaseException) -> list[str]:
    """Return the traceback's lines from the user's cell to the failed call on replicas, as IPython draws them.

    Return [] outside of cells. The error's traceback is reduced to these frames, also for %debug.
    """
    part = users_part(error.__traceback__, (OWN, _IPYTHON))
    while part is not None and not cell_name(part.tb_frame.f_code.co_filename, shell):
        part = part.tb_next
    if part is None:
        return []
    if sys.exc_info()[1] is error or getattr(sys, "last_value", None) is error:
        sys.last_traceback = part
    error.__traceback__ = part
    # %debug begins in the frames that this call draws. The title and the message are left out of the result.
    drawer = shell.InteractiveTB
    drawn = drawer.structured_traceback(type(error), Exception(), part, tb_offset=0)
    return [line.rstrip("\n") for line in drawn[2 if drawer.mode in drawer.verbose_modes else 1 : -1] if line.strip()]


def users_part(traceback: TracebackType | None, own: tuple[str, ...] = (OWN,)) -> TracebackType | None:
    """Return the traceback without distnb's frames, also without those between two frames of the user's.

    Return the whole traceback if all frames, or none, are distnb's.
    """
    frames = frames_of(traceback)
    if not any(frame.tb_frame.f_code.co_filename.startswith(own) for frame in frames):
        return traceback
    return traceback_of(frames_without(frames, own) or frames)


@contextmanager
def presented() -> Iterator[None]:
    """Make an error that leaves the block show only its text.

    An error of a replica has its own rendering, with the replica's traceback, which is kept. An error that is not
    distnb's keeps its traceback, because it is a defect whose place must be visible.
    """
    try:
        yield
    except (DistnbError, KeyboardInterrupt) as error:
        if not hasattr(error, "_render_traceback_"):
            line = f"\x1b[31m{type(error).__name__}\x1b[0m" + (f": {error}" if str(error) else "")
            # IPython shows the result of this method of the exception.
            error._render_traceback_ = lambda: [line]  # type: ignore[union-attr]
        raise
