"""Errors of ours in a notebook: one clear line, without the frames that led to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING

from distnb.errors import DistnbError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["presented", "without_frames"]


@contextmanager
def presented() -> Iterator[None]:
    """Let an error that leaves the block be shown by its text alone.

    An error of a replica brings its own rendering, with the replica's traceback; that one is kept. An error that is
    not distnb's keeps its traceback: it would be a defect, whose place must be seen.
    """
    try:
        yield
    except (DistnbError, KeyboardInterrupt) as error:
        if not hasattr(error, "_render_traceback_"):
            _render_plainly(error)
        raise


def _render_plainly(error: BaseException) -> None:
    name, text = type(error).__name__, str(error)

    def render(self: BaseException) -> list[str]:
        return [f"\x1b[31m{name}\x1b[0m: {text}" if text else f"\x1b[31m{name}\x1b[0m"]

    # IPython asks the exception itself how it wants to be shown.
    error._render_traceback_ = MethodType(render, error)  # type: ignore[attr-defined]


@contextmanager
def without_frames(shell: InteractiveShell) -> Iterator[None]:
    """Let a syntax error of the user's text look as in any cell: the line and what is wrong with it, no frames."""
    try:
        yield
    except SyntaxError as error:
        lines = shell.SyntaxTB.structured_traceback(type(error), error)
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
        raise
