"""The position of a distributed cell's text in the notebook's cell, and the checks of that text."""

from __future__ import annotations
import __future__

import ast
import re
import warnings
from typing import TYPE_CHECKING

from distnb.errors import OptionError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["check_no_nested_magic", "check_syntax", "lines_above", "padded", "transformed"]

_NESTED = re.compile(r"get_ipython\(\)\.run_line_magic\('%(\w+)'")
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def lines_above(raw_cell: str, body: str) -> int | None:
    """Return the number of lines above a body in the notebook's cell, or None if the cell has another end."""
    # IPython strips indentation and prompts.
    whole = [line.strip() for line in raw_cell.rstrip().split("\n")]
    part = [line.strip() for line in body.rstrip().split("\n")]
    above = len(whole) - len(part)
    return above if above >= 0 and whole[above:] == part else None


def padded(above: int, line: str, body: str) -> str:
    """Return the body with as many lines before it as in the notebook's cell, so that line numbers agree.

    The magic's line remains as a comment, for tracebacks to show.
    """
    return "\n" * (above - 1) + f"# %%distribute {line}\n" + body if above else body  # without a magic: %autodistribute


def check_no_nested_magic(text: str) -> None:
    """Raise OptionError for a cell magic in the body of a distributed cell, with its name and line.

    IPython, which has transformed the text to Python, treats it as a line magic.
    """
    for number, line in enumerate(text.splitlines(), 1):
        found = _NESTED.search(line)
        if found is None:
            continue
        name = found[1]
        cure = (
            f"Write %%{name} in the line above %%distribute."
            if name in ("time", "timeit", "capture", "prun")
            else f"Move %%{name} and its text into a cell of its own."
        )
        raise OptionError(
            f"%%{name} in line {number} is a cell magic within a distributed cell, but a cell can have only one. {cure}"
        )


def transformed(source: str, filename: str, shell: InteractiveShell) -> str:
    """Return the text with IPython's syntax transformed to Python's, line for line.

    Raises:
        SyntaxError: The text cannot be split into tokens. It is shown as `check_syntax` shows it.
    """
    # IPython strips empty lines at the top, which represent the notebook cell's first lines.
    above = len(source) - len(source.lstrip("\n"))
    try:
        return "\n" * above + str(shell.transform_cell(source))
    except SyntaxError as error:  # such as a dedent to a level that no line above has
        error.filename, error.lineno = filename, (error.lineno or 1) + above
        _show_the_line(error, source, shell)
        raise


def check_syntax(text: str, filename: str, shell: InteractiveShell) -> None:
    """Raise a syntax error before anything is sent, and before a cluster is started.

    It is shown as in any cell, with the line and the error but without frames. Only the compiler's flags of
    `from __future__` imports in earlier cells apply, because another flag of the shell's accepts incomplete cells.
    """
    flags = shell.compile.flags & _FUTURE | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        with warnings.catch_warnings(action="ignore"):  # the replicas will warn
            compile(text, filename, "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        _show_the_line(error, text, shell)
        raise


def _show_the_line(error: SyntaxError, text: str, shell: InteractiveShell) -> None:
    """Make IPython draw a syntax error by its line in the text, without frames."""
    lines = text.splitlines()
    if not error.text and error.lineno is not None and error.lineno <= len(lines):
        error.text = lines[error.lineno - 1]
    drawn = shell.SyntaxTB.structured_traceback(type(error), error)
    error._render_traceback_ = lambda: drawn  # type: ignore[attr-defined]
