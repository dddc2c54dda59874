"""Where a distributed cell's text stands in the notebook's cell, and what may not stand in it."""

from __future__ import annotations
import __future__

import ast
import warnings
from collections.abc import Callable, Iterator, Sequence

from IPython.core.inputtransformer2 import make_tokens_by_line

from distnb.errors import OptionError

__all__ = ["cell_magics", "check_no_nested_magic", "check_syntax", "insert_after_future_imports", "padded"]

_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def padded(raw_cell: str, line: str, body: str) -> str:
    """The body with as many lines before it as in the notebook's cell, so that line numbers agree.

    Args:
        raw_cell: The whole cell as the user wrote it.
        line: The magic's line; it stays, as a comment, for tracebacks to show.
        body: What follows the `%%distribute` line.
    """
    whole, part = raw_cell.rstrip().split("\n"), body.rstrip().split("\n")
    at = len(whole) - len(part)
    # IPython strips indentation and prompts, so a text that does not match is taken to follow one line of magic.
    before = at if at > 0 and [line.strip() for line in whole[at:]] == [line.strip() for line in part] else 1
    return "\n" * (before - 1) + f"# %%distribute {line}\n" + body


def check_no_nested_magic(body: str, first_line: int) -> None:
    """Refuse a cell magic within a distributed cell.

    Args:
        body: What follows the `%%distribute` line.
        first_line: Its line number in the notebook's cell.

    Raises:
        OptionError: There is one; the text names it and its line.
    """
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
    """The cell magics in a text, each with its line number; what only looks like one, within a string, is none.

    Args:
        lines: The text, with line ends.
    """
    if not any(line.startswith("%%") for line in lines):
        return
    for tokens in make_tokens_by_line(list(lines)):
        visible = [token for token in tokens if token.string.strip()]
        if len(visible) > 2 and [token.string for token in visible[:2]] == ["%", "%"] and visible[0].start[1] == 0:
            yield visible[2].string, visible[0].start[0]


def check_syntax(text: str, filename: str, flags: int) -> None:
    """Find a syntax error before anything is sent, and before a cluster is started for it.

    Args:
        text: The cell, IPython's own syntax already made Python's.
        filename: What the error is to name.
        flags: The shell's compiler's. Only those of `from __future__` imports in earlier cells count: another one
            says that a cell may be incomplete.

    Raises:
        SyntaxError: With the line that it is about.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the replicas warn
            compile(text, filename, "exec", flags & _FUTURE | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        lines = text.splitlines()
        if not error.text and error.lineno is not None and error.lineno <= len(lines):
            error.text = lines[error.lineno - 1]
        raise


def insert_after_future_imports(lines: Sequence[str], statement: str) -> list[str]:
    """Add a statement to a cell without moving a line: in its first line, or behind its `from __future__` imports.

    Args:
        lines: The cell, with an empty first line.
        statement: What is added.
    """
    changed = list(lines)
    if any("__future__" in line for line in lines):
        end = _end_of_future_imports("".join(lines))
        if end is not None:
            row, column = end
            line = changed[row].encode()
            changed[row] = f"{line[:column].decode()}; {statement}{line[column:].decode()}"
            return changed
    changed[0] = statement + "\n"
    return changed


def _end_of_future_imports(text: str, parse: Callable[[str], ast.Module] = ast.parse) -> tuple[int, int] | None:
    try:
        body = parse(text).body
    except SyntaxError:
        return None  # IPython's own syntax is in it, or an error that will be told when the cell runs
    ends = [
        (node.end_lineno - 1, node.end_col_offset)
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__" and node.end_lineno and node.end_col_offset
    ]
    return ends[-1] if ends else None
