"""Errors of ours raised in ordinary cells: their traceback ends at the user's line, not in our house."""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import IPython

import distnb
from distnb.errors import DistnbError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["callers_lines", "install", "remove", "users_part"]

# IPython asks no group how it wants to be shown.
_KINDS = (DistnbError, SyntaxError, BaseExceptionGroup)
_IPYTHON = os.path.dirname(IPython.__file__) + os.sep
_MANAGERS = contextlib.__file__  # it stands between us and us
_OWN = os.path.dirname(os.path.abspath(distnb.__file__)) + os.sep


def install(shell: InteractiveShell) -> None:
    """Show distnb's errors in this shell without distnb's frames. Another extension's handler is left alone."""
    if not shell.custom_exceptions:
        shell.set_custom_exc(_KINDS, _show)


def remove(shell: InteractiveShell) -> None:
    """Take the handler away."""
    if shell.custom_exceptions == _KINDS:
        shell.set_custom_exc((), None)


def _show(
    shell: Any, kind: type[BaseException], error: BaseException, traceback: Any, tb_offset: int | None = None
) -> Any:
    own = getattr(error, "_render_traceback_", None)
    if own is None and not isinstance(error, DistnbError):
        shell.showtraceback((kind, error, traceback), tb_offset=tb_offset, running_compiled_code=True)
        return None
    trimmed = users_part(traceback)
    text = (
        own()
        if own is not None
        else shell.InteractiveTB.structured_traceback(kind, error, trimmed, tb_offset=tb_offset)
    )
    shell._showtraceback(kind, error, text)
    return text


def callers_lines(shell: InteractiveShell, error: BaseException) -> list[str]:
    """The way from the user's cell to the call that failed on replicas, as IPython draws it; nothing outside of cells.

    The error's traceback ends there from now on, and so does that in which %debug begins.
    """
    part = users_part(error.__traceback__, (_OWN, _IPYTHON))
    while part is not None and shell.compile.format_code_name(part.tb_frame.f_code.co_filename) is None:
        part = part.tb_next
    if part is None:
        return []
    if sys.exc_info()[1] is error or getattr(sys, "last_value", None) is error:
        sys.last_traceback = part
    error.__traceback__ = part
    # What it draws is where %debug begins, too. Of the text we need the frames only: no title, no message.
    drawn = shell.InteractiveTB.structured_traceback(type(error), Exception(), part, tb_offset=0)
    return [line for line in drawn[2:-1] if line.strip()]


def users_part(traceback: TracebackType | None, own: tuple[str, ...] = (_OWN,)) -> TracebackType | None:
    """The traceback without distnb's frames, also those on the way to a function of the user's that it called.

    All of it where every frame is distnb's.
    """
    frames = []
    each = traceback
    while each is not None:
        frames.append(each)
        each = each.tb_next
    kept = [frame for frame in frames if not frame.tb_frame.f_code.co_filename.startswith((*own, _MANAGERS))] or frames
    rebuilt: TracebackType | None = None
    for frame in reversed(kept):
        rebuilt = TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rebuilt
