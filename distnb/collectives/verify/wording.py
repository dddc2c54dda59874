"""What the user's source text says about a call: its words, and what it is about.

Two calls at different lines can be the same collective of the same tensor, or of another one of the same shape. Their
arguments, as they are written, are all that tells them apart.
"""

from __future__ import annotations

import ast
import linecache
import warnings
from itertools import islice
from types import CodeType

__all__ = ["calls_at", "subject", "words"]

# Arguments that say how a collective is done. Its signature holds what they mean, or it does not matter.
_SETTINGS = frozenset({"async_op", "group", "op"})


def words(code: CodeType, instruction: int) -> str | None:
    """The text of the expression that an instruction evaluates, on one line.

    Args:
        code: The code object.
        instruction: The offset of the instruction in its bytecode, as in `frame.f_lasti`.

    Returns:
        The text; None where the source is not at hand.
    """
    position = next(islice(code.co_positions(), instruction // 2, None), None)
    if position is None:
        return None
    first, last, begin, end = position
    if first is None or last is None or begin is None or end is None:
        return None
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if len(lines) != last - first + 1:
        return None
    lines[-1] = lines[-1][:end]  # columns count bytes
    lines[0] = lines[0][begin:]
    return b" ".join(line.strip() for line in lines).decode(errors="replace")


def calls_at(source: str, line: int) -> list[str]:
    """The texts of all calls that a line is part of, each on one line, the shortest first; none if it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [ast.get_source_segment(source, node) or "" for node in calls if node.lineno <= line <= _last(node)]
    return sorted((" ".join(map(str.strip, text.splitlines())) for text in found), key=len)


def _last(node: ast.Call) -> int:
    return node.end_lineno or node.lineno


def subject(text: str) -> str:
    """What a call is about: its arguments, or what it is called on if it has none.

    Constants do not count, nor does the order of the arguments or how they are quoted, named and spaced.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler has warned already
            node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return text
    if not isinstance(node, ast.Call):
        return ast.unparse(node)
    given = [*node.args, *(each.value for each in node.keywords if each.arg not in _SETTINGS)]
    told = sorted(ast.unparse(each) for each in given if not isinstance(each, ast.Constant))
    return ", ".join(told) or ast.unparse(node.func)
