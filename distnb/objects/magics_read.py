"""What IPython's magics and shell escapes in a cell read and assign."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

__all__ = ["Magic", "as_python", "magic_of"]

_TIMED = frozenset({"time", "timeit", "prun", "memit", "mprun", "lprun"})
_INSPECTING = frozenset({"pinfo", "pinfo2", "pdoc", "pdef", "psource", "psearch", "page", "pp"})
_DYNAMIC = frozenset(
    {
        "run",
        "who",
        "who_ls",
        "whos",
        "macro",
        "recall",
        "rerun",
        "edit",
        "load",
        "reset",
        "reset_selective",
        "store",
        "debug",
    }
)
_OPTION_WITH_VALUE = re.compile(r"-[nrclsTDofmu]\s*\S+\s+")
_OPTION = re.compile(r"(--?[\w-]+(=\S+)?)(\s+|$)")
_INTERPOLATED = re.compile(r"\{([^{}]+)\}|\$([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Magic:
    """What one magic does with the namespace.

    Attributes:
        expressions: Python expressions that it evaluates.
        body: Python statements that it runs, or None.
        assigns: Names that it assigns.
        dynamic: It may read any name.
    """

    expressions: tuple[str, ...] = ()
    body: str | None = None
    assigns: tuple[str, ...] = ()
    dynamic: bool = False


def as_python(source: str) -> str:
    """A cell's text as Python, its IPython syntax turned into calls."""
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell(source)


def magic_of(call: ast.Call) -> Magic | None:
    """What a call of the shell, as IPython writes it for its own syntax, reads and assigns; None for other calls."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call)):
        return None
    shell = function.value.func
    if not (isinstance(shell, ast.Name) and shell.id == "get_ipython"):
        return None
    texts = [
        argument.value
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    if len(texts) != len(call.args):
        return None
    match function.attr, texts:
        case (("system" | "getoutput" | "system_raw" | "system_piped"), [command]):
            return Magic(_interpolated(command))
        case "run_line_magic", [name, line]:
            return _line_magic(name, line)
        case "run_cell_magic", [name, line, body]:
            return _cell_magic(name, line, body)
    return None


def _line_magic(name: str, line: str) -> Magic:
    if name in _TIMED:
        return Magic(body=_without_options(line))
    if name in _INSPECTING:
        return Magic((line.strip().rstrip("?"),))
    if name in _DYNAMIC:
        return Magic(_interpolated(line), dynamic=True)
    return Magic(_interpolated(line))


def _cell_magic(name: str, line: str, body: str) -> Magic:
    if name in _TIMED:
        return Magic(body=_without_options(line) + "\n" + body)
    if name == "capture":
        words = [word for word in line.split() if not word.startswith("-")]
        return Magic(body=body, assigns=tuple(words[:1]))
    if name in _DYNAMIC:
        return Magic(dynamic=True)
    return Magic(_interpolated(line))


def _without_options(line: str) -> str:
    rest = line.strip()
    while rest.startswith("-"):
        match = _OPTION_WITH_VALUE.match(rest) or _OPTION.match(rest)
        if match is None:
            break
        rest = rest[match.end() :]
    return rest


def _interpolated(text: str) -> tuple[str, ...]:
    return tuple(braced or name for braced, name in _INTERPOLATED.findall(text))
