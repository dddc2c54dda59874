"""Where a distributed cell's text stands in the notebook's cell, and what may not stand in it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from IPython.core.inputtransformer2 import make_tokens_by_line

from distnb.errors import OptionError

__all__ = ["check_no_nested_magic", "insert_after_future_imports", "padded"]


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
    if "%%" not in body:
        return
    for tokens in make_tokens_by_line(body.splitlines(keepends=True)):
        visible = [token for token in tokens if token.string.strip()]
        if len(visible) > 2 and [token.string for token in visible[:2]] == ["%", "%"] and visible[0].start[1] == 0:
            name, line = visible[2].string, visible[0].start[0] + first_line - 1
            cure = (
                f"Write %%{name} in the line above %%distribute."
                if name in ("time", "timeit", "capture", "prun")
                else f"Put what %%{name} does into a cell of its own."
            )
            raise OptionError(
                f"%%{name} in line {line} is a cell magic within a distributed cell, and only one can have the cell. "
                f"{cure}"
            )


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
