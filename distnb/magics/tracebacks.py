"""Errors of ours raised in ordinary cells: their traceback ends at the user's line, not in our house."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

import distnb
from distnb.errors import DistnbError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["install", "remove", "users_part"]

_KINDS = (DistnbError, SyntaxError)
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
    if own is None and isinstance(error, SyntaxError):
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


def users_part(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback up to the last frame that is not distnb's; all of it where every frame is."""
    frames = []
    each = traceback
    while each is not None:
        frames.append(each)
        each = each.tb_next
    last = max((index for index, frame in enumerate(frames) if not _is_ours(frame)), default=len(frames) - 1)
    rebuilt: TracebackType | None = None
    for frame in reversed(frames[: last + 1]):
        rebuilt = TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rebuilt


def _is_ours(traceback: TracebackType) -> bool:
    return traceback.tb_frame.f_code.co_filename.startswith(_OWN)
