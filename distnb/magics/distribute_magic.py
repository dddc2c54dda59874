"""The `%%distribute` cell magic: hands the cell to the session, or makes an ordinary one of it.

Under `default` and `one_device` an input transformer takes the magic line away before IPython makes a magic call of the
cell. So everything is as in any cell: plain objects, breakpoint() and %debug, top-level await, tracebacks with the
cell's own lines. In the place of the magic line stands a call that binds the name `strategy`; behind
`from __future__` imports, where there are some.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from distnb.errors import OptionError, StartError
from distnb.magics.cell_request import CellRequest, read_request
from distnb.magics.cell_text import check_no_nested_magic, check_syntax, padded, transformed
from distnb.magics.commands import AUTODISTRIBUTE, DISTRIBUTE, asks_for_help
from distnb.magics.tracebacks import presented
from distnb.notebook import compose as sessions
from distnb.notebook.output.profiles import profile_folder
from distnb.notebook.output.wording import cell_name
from distnb.options import StrategySpec
from distnb.strategies import class_of, resolve
from distnb.wire.messages import UsersFunction

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.notebook.session import CellTimes, Session
    from distnb.widgets.front import Front

__all__ = ["DistributeMagic"]

_MAGIC = re.compile(r"%%distribute(?:[ \t]+(?P<line>.*))?$")
_ENTER = "get_ipython()._distnb_local"


class DistributeMagic(ast.NodeTransformer):
    """Runs `%%distribute` cells of one shell; `ensure` gives the running session, or starts one that suits a strategy.

    The name `strategy`, and others of the strategy's (`coordinator`), stay bound after the cell, unless they were the
    user's own before.
    """

    has_side_effects = False  # IPython's question to a transformer

    def __init__(self, shell: InteractiveShell, front: Front, ensure: Callable[..., Session]) -> None:
        self._shell = shell
        self._front = front
        self._ensure = ensure
        self._raw_cell = ""
        self._auto = ""  # what stands after %%distribute in cells that have no magic
        self._copies = ExitStack()
        self._ours: dict[str, Any] = {}  # what the names were bound to
        self._users: dict[str, Any] = {}  # what they were before

    def cell_begins(self, raw_cell: str) -> None:
        """IPython begins to run this cell."""
        self._raw_cell = raw_cell

    def _names(self, request: CellRequest) -> None:
        user_ns, strategy = self._shell.user_ns, resolve(request.spec)
        names: dict[str, Any] = {"strategy": strategy}
        for name, place in strategy.cell_names.items():
            names[name] = resolve_name(place)(strategy)
        for name, value in names.items():
            if name in user_ns and (name not in self._ours or user_ns[name] is not self._ours[name]):
                self._users[name] = user_ns[name]
            self._ours[name] = user_ns[name] = value
        self._front.name_cell(request.word)
        self._front.draw(each_wait=request.timeline, run=request.name, quiet=request.quiet)

    def leave(self) -> None:
        """The cell ended: what the user had called by our names is called so again."""
        self._copies.close()
        for name, value in self._users.items():
            if self._shell.user_ns.get(name) is self._ours[name]:
                self._shell.user_ns[name] = value
                del self._ours[name]  # the very object may be the user's own, and is not ours in the next cell
        self._users.clear()

    # -- on replicas -----------------------------------------------------------------------------------------------

    def distribute(self, line: str, cell: str) -> None:
        """Run a `%%distribute` cell."""
        if asks_for_help(line):
            print(DISTRIBUTE.format_help())
            return
        with presented():
            request = read_request(line, self._shell.user_ns)
            source = padded(self._raw_cell, line, cell)
            if not cell.strip():
                raise OptionError(f"%%distribute {request.word}: the cell is empty below its first line.")
        if request.local:
            # The magic was called as a function: the input transformer has not seen this cell.
            result = self._shell.run_cell(f"%%distribute {line}\n{cell}", store_history=False)
            result.raise_error()
        else:
            filename = self._filename()
            text = transformed(source, filename, self._shell)
            with presented():
                check_no_nested_magic(text)
            check_syntax(text, filename, self._shell)
            # IPython holds a single magic call as the cell's text. Functions that come back from the replicas have
            # their lines in this one: for tracebacks, inspect, and replicas that they are sent to later.
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
            with presented():
                profile = profile_folder(request.profile) if request.profile else None
                session = self._ensure(request.spec)
                self._names(request)
                watched = {"only": request.only, "detailed": request.timeline, "profile": profile}
                try:
                    self._run(session, source, request.spec, filename, **watched)
                finally:
                    if request.time and session.latest_times is not None:
                        print(_told(session.latest_times))

    def run_in_scope(self, source: str, spec: StrategySpec, filename: str, function: UsersFunction | None) -> None:
        """Run a `with strategy.scope():` of an ordinary cell, or of a function of one, on the replicas."""
        self._front.name_cell(spec.kind)
        self._run(self._ensure(), source, spec, filename, in_scope=True, function=function)

    def _run(self, session: Session, source: str, spec: StrategySpec, filename: str, **how: Any) -> None:
        # IPython's counter may be one further already.
        label = cell_name(filename, self._shell) or f"Cell In[{self._shell.execution_count}]"
        try:
            session.run_cell(source, spec, filename=filename, label=label, **how)
        finally:
            # All that the replicas wrote stands in the cell before its error does.
            self._front.flush()

    def _filename(self) -> str:
        """What the notebook's debugger and tracebacks call the running cell: its frame is below all others'."""
        found, frame = "", sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if self._shell.compile.format_code_name(frame.f_code.co_filename) is not None:
                found = frame.f_code.co_filename
        raw = self._raw_cell
        return found or str(self._shell.compile.get_code_name(raw, raw, self._shell.execution_count))

    # -- in the notebook -------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put the transformer before the one that makes magic calls."""
        shell: Any = self._shell
        transforms = shell.input_transformer_manager.cleanup_transforms
        names = [getattr(transform, "__name__", "") for transform in transforms]
        transforms.insert(names.index("cell_magic") if "cell_magic" in names else len(transforms), self)
        shell.ast_transformers.append(self)
        shell._distnb_local = self.enter

    def __call__(self, lines: list[str]) -> list[str]:
        """Transform a cell; called by IPython for every cell, also for completions."""
        match = _MAGIC.match(lines[0].rstrip()) if lines else None
        if match is None:
            return [f"%%distribute {self._auto}\n", *lines] if self._auto and _is_program(lines) else lines
        line = match["line"] or ""
        if asks_for_help(line) or not "".join(lines[1:]):
            return [lines[0], "\n"]  # of a cell without a body IPython would complain before the magic hears of it
        try:
            request = read_request(line, self._shell.user_ns)
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
        filename = sys._getframe(1).f_code.co_filename
        _restore_first_line(filename, line)
        text = "".join(linecache.getlines(filename))
        with presented():
            check_no_nested_magic(text)
            request = read_request(line, self._shell.user_ns)
            if class_of(request.spec.kind).needs_engines:
                self._ensure(request.spec)
            self._names(request)
            session = sessions.current()
            if session is not None:
                # What lives on the engines is worked on as copies; the names are the handles again when the cell ends.
                self._copies.enter_context(session.namespace.localise(text))

    def autodistribute(self, line: str) -> None:
        """Run `%autodistribute STRATEGY …`, or `off`."""
        if asks_for_help(line):
            print(AUTODISTRIBUTE.format_help())
            return
        line = line.strip()
        with presented():
            if not line:
                now = f"Cells run under %%distribute {self._auto}." if self._auto else "Cells run in the notebook."
                print(f"{now} {AUTODISTRIBUTE.usage_line}, or off.")
            elif line == "off":
                self._auto = ""
            elif read_request(line, self._shell.user_ns).local:
                raise OptionError(
                    f"%autodistribute {line}: such cells run in the notebook's own process. %autodistribute off lets "
                    "cells run there; %%distribute default binds `strategy` in one cell."
                )
            else:
                self._auto = line

    def complain(self, line: str) -> None:
        """What IPython calls where the magic line is not the cell's first, or has one % only: a line magic to it."""
        with presented():
            raise OptionError(
                "%%distribute must be the first line of its cell, with two %: IPython reads a cell magic nowhere else. "
                "What stands above it has run. Move that below it, or into a cell of its own."
            )


DistributeMagic.distribute.__doc__ = DISTRIBUTE.format_help()  # what `%%distribute?` shows
DistributeMagic.autodistribute.__doc__ = AUTODISTRIBUTE.format_help()


def _is_program(lines: list[str]) -> bool:
    """Whether a cell is Python, and no command to IPython."""
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return bool(code) and code[0].lstrip()[0] not in "%!?" and not code[-1].rstrip().endswith("?")


def _told(times: CellTimes) -> str:
    """Where a cell's time went, in words."""
    slowest, fastest = max(times.running, default=0.0), min(times.running, default=0.0)
    ran = f"{slowest:.3f} s" if len(times.running) < 2 else f"{fastest:.3f} to {slowest:.3f} s"
    sent, taken = f"{times.packing:.3f} s to send it", f"{times.taking:.3f} s to take over"
    return f"{times.total:.3f} s: {sent}, {ran} on the replicas, {taken}"


def _restore_first_line(filename: str, line: str) -> None:
    """Let tracebacks show the user's magic line, as a comment: whoever parses the cell's text must be able to."""
    entry = linecache.cache.get(filename)
    if entry is not None and len(entry) == 4 and entry[2] and "_distnb_local" in entry[2][0]:
        size, changed, lines, name = entry
        linecache.cache[filename] = (size, changed, [f"# %%distribute {line}\n", *lines[1:]], name)
