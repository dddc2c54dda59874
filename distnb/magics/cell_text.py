"""Where a distributed cell's text stands in the notebook's cell, and what may not stand in it."""

from __future__ import annotations
import __future__

import ast
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from IPython.core.inputtransformer2 import make_tokens_by_line

from distnb.errors import OptionError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["cell_magics", "check_no_nested_magic", "check_syntax", "padded"]

_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def padded(raw_cell: str, line: str, body: str) -> str:
    """The body with as many lines before it as in the notebook's cell, so that line numbers agree.

    The magic's line stays, as a comment, for tracebacks to show.
    """
    whole, part = raw_cell.rstrip().split("\n"), body.rstrip().split("\n")
    at = len(whole) - len(part)
    # IPython strips indentation and prompts, so a text that does not match is taken to follow one line of magic.
    before = at if at > 0 and [line.strip() for line in whole[at:]] == [line.strip() for line in part] else 1
    return "\n" * (before - 1) + f"# %%distribute {line}\n" + body


def check_no_nested_magic(body: str, first_line: int) -> None:
    """Refuse a cell magic in the body of a distributed cell; OptionError names it and its line in the cell."""
    for name, line in cell_magics(body.splitlines(keepends=True)):
        cure = (
            f"Write %%{name} in the line above %%distribute."
            if name in ("time", "timeit", "capture", "prun")
            else f"Put what %%{name} does into a cell of its own."
        )
        raise OptionError(
            f"%%{name} in line {line + first_line - 1} is a cell magic within a distributed cell, and only one can "
            f"have the cell. {cure}"
        )


def cell_magics(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The cell magics in a text, each with its line number; what only looks like one, within a string, is none."""
    if not any(line.startswith("%%") for line in lines):
        return
    for tokens in make_tokens_by_line(list(lines)):
        visible = [token for token in tokens if token.string.strip()]
        if len(visible) > 2 and [token.string for token in visible[:2]] == ["%", "%"] and visible[0].start[1] == 0:
            yield visible[2].string, visible[0].start[0]


def check_syntax(text: str, filename: str, shell: InteractiveShell) -> None:
    """Raise a syntax error before anything is sent, and before a cluster is started for it.

    It looks as in any cell: the line and what is wrong with it, no frames. Of the compiler's flags those of
    `from __future__` imports in earlier cells count: another one says that a cell may be incomplete.
    """
    flags = shell.compile.flags & _FUTURE | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        with warnings.catch_warnings(action="ignore"):  # the replicas warn
            compile(text, filename, "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        lines = text.splitlines()
        if not error.text and error.lineno is not None and error.lineno <= len(lines):
            error.text = lines[error.lineno - 1]
        drawn = shell.SyntaxTB.structured_traceback(type(error), error)
        error._render_traceback_ = lambda: drawn  # type: ignore[attr-defined]
        raise
