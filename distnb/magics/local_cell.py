"""`%%distribute default` and `one_device`: the cell becomes an ordinary one.

An input transformer takes the magic line away before IPython makes a magic call of the cell. So everything is as in
any cell: plain objects, breakpoint() and %debug, top-level await, tracebacks with the cell's own lines. In the place
of the magic line stands a call that binds the name `strategy`; behind `from __future__` imports, where there are some.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from distnb.errors import OptionError, StartError
from distnb.magics.cell_request import read_request
from distnb.magics.cell_text import cell_magics, check_no_nested_magic
from distnb.magics.commands import asks_for_help
from distnb.magics.tracebacks import presented
from distnb.notebook import compose as sessions
from distnb.options import StrategySpec

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.widgets.front import Front

__all__ = ["LocalCells", "StrategyName"]

_MAGIC = re.compile(r"%%distribute(?:[ \t]+(?P<line>.*))?$")
_ENTER = "get_ipython()._distnb_local"


class StrategyName:
    """Binds the name `strategy` for a cell. It stays bound, unless the name was the user's own before."""

    def __init__(self, user_ns: dict[str, Any]) -> None:
        self._user_ns = user_ns
        self._ours: Any = None
        self._before: tuple[Any, ...] = ()

    def bind(self, spec: StrategySpec) -> None:
        """The cell begins."""
        from distnb.strategies import resolve

        before = self._user_ns.get("strategy")
        if "strategy" in self._user_ns and before is not self._ours:
            self._before = (before,)
        self._ours = self._user_ns["strategy"] = resolve(spec)

    def restore(self) -> None:
        """The cell ended: what the user had called `strategy` is called so again."""
        if self._before and self._user_ns.get("strategy") is self._ours:
            self._user_ns["strategy"] = self._before[0]
            self._ours = None  # the very object may be the user's own, and is not ours in the next cell
        self._before = ()


class LocalCells(ast.NodeTransformer):
    """The transformers of a shell's cells, and the call that they put into one."""

    has_side_effects = False

    def __init__(self, shell: InteractiveShell, front: Front, name: StrategyName) -> None:
        self._shell = shell
        self._front = front
        self._name = name
        self._copies = ExitStack()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it, the transformer stands before the one that makes magic calls."""
        shell: Any = self._shell
        transforms = shell.input_transformer_manager.cleanup_transforms
        names = [getattr(transform, "__name__", "") for transform in transforms]
        transforms.insert(names.index("cell_magic") if "cell_magic" in names else len(transforms), self)
        shell.ast_transformers.append(self)
        shell._distnb_local, shell._distnb_misplaced = self.enter, self.complain
        yield
        transforms.remove(self)
        shell.ast_transformers.remove(self)

    def __call__(self, lines: list[str]) -> list[str]:
        """Transform a cell; called by IPython for every cell, also for completions."""
        if not any(line.startswith("%%distribute") for line in lines):
            return lines
        match = _MAGIC.match(lines[0].rstrip())
        if match is None:
            misplaced = _misplaced(lines)
            return [f"get_ipython()._distnb_misplaced({misplaced})\n"] if misplaced else lines
        line = match["line"] or ""
        if asks_for_help(line) or not "".join(lines[1:]):
            return [lines[0], "\n"]  # of a cell without a body IPython would complain before the magic hears of it
        try:
            request = read_request(line, self._shell.user_ns)
            check_no_nested_magic("".join(lines[1:]), 2)
        except (OptionError, StartError):
            return lines  # the magic itself tells what is wrong
        if not request.local or not "".join(lines[1:]).strip():
            return lines
        return [f"{_ENTER}({line!r})\n", *lines[1:]]

    def visit_Module(self, tree: ast.Module) -> ast.Module:
        """Put the call behind the cell's `from __future__` imports; called by IPython for every cell."""
        futures = [
            place
            for place, node in enumerate(tree.body)
            if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ]
        if futures and ast.unparse(tree.body[0]).startswith(_ENTER):
            tree.body.insert(futures[-1], tree.body.pop(0))
        return tree

    def enter(self, line: str) -> None:
        """The first thing that a local cell does."""
        _restore_first_line(sys._getframe(1).f_code.co_filename, line)
        with presented():
            request = read_request(line, self._shell.user_ns)
            self._name.bind(request.spec)
            self._front.name_cell(request.word)
            session = sessions.current()
            if session is not None:
                # What lives on the engines is worked on as copies; the names are the handles again when the cell ends.
                text = "".join(linecache.getlines(sys._getframe(1).f_code.co_filename))
                self._copies.enter_context(session.namespace.localise(text))

    def leave(self) -> None:
        """The cell ended."""
        self._copies.close()

    def complain(self, line: int) -> None:
        """What a cell does that has something above its magic line."""
        with presented():
            raise OptionError(
                f"%%distribute must be the first line of its cell, and here it is line {line}: IPython reads a cell "
                "magic nowhere else. Move what stands above it below it, or into a cell of its own. Nothing was run."
            )


def _misplaced(lines: list[str]) -> int:
    """The line of a `%%distribute` that is not the cell's first; 0 if there is none, or another cell magic has it."""
    if lines[0].startswith("%%"):
        return 0
    return next((line for name, line in cell_magics(lines) if name == "distribute"), 0)


def _restore_first_line(filename: str, line: str) -> None:
    """Let tracebacks show the user's magic line, as a comment: whoever parses the cell's text must be able to."""
    entry = linecache.cache.get(filename)
    if entry is not None and len(entry) == 4 and entry[2] and "_distnb_local" in entry[2][0]:
        size, changed, lines, name = entry
        linecache.cache[filename] = (size, changed, [f"# %%distribute {line}\n", *lines[1:]], name)
