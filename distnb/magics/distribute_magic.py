"""The `%%distribute` cell magic, which passes the cell to the session, or makes it an ordinary cell.

Under `default` and `one_device` an input transformer removes the magic line before IPython turns the cell into a magic
call. Everything then works as in an ordinary cell: plain objects, breakpoint() and %debug, top-level await, tracebacks
with the cell's own lines. A call that binds the name `strategy` replaces the magic line, or follows the cell's
`from __future__` imports.
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

from distnb.compat.ipython_internals import name_cell, numbers_of_cells
from distnb.errors import OptionError, StartError
from distnb.frames import cell_name
from distnb.magics.cell_request import CellRequest, read_request
from distnb.magics.cell_text import check_no_nested_magic, check_syntax, lines_above, padded, transformed
from distnb.magics.commands import AUTODISTRIBUTE, DISTRIBUTE, asks_for_help
from distnb.magics.tracebacks import presented
from distnb.notebook import compose as sessions
from distnb.notebook.output.profiles import profile_folder
from distnb.options import StrategySpec
from distnb.strategies import class_of, resolve
from distnb.wire.messages import UsersFunction

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.notebook.running.cells import CellTimes
    from distnb.notebook.session import Session
    from distnb.widgets.front import Front

__all__ = ["DistributeMagic"]

_MAGIC = re.compile(r"%%distribute(?:[ \t]+(?P<line>.*))?$")
_ENTER = "get_ipython()._distnb_local"


class DistributeMagic(ast.NodeTransformer):
    """The runner of one shell's `%%distribute` cells.

    `ensure` returns the running session, or starts one that suits a strategy. The name `strategy`, and other names of
    the strategy (`coordinator`), remain bound after the cell, unless they were the user's own before.
    """

    has_side_effects = False  # IPython reads this of every transformer

    def __init__(self, shell: InteractiveShell, front: Front, ensure: Callable[..., Session]) -> None:
        self._shell = shell
        self._front = front
        self._ensure = ensure
        self._raw_cell = ""
        self._auto = ""  # the text after %%distribute for cells without a magic
        self._copies = ExitStack()
        self._ours: dict[str, Any] = {}  # the values that we bound to names
        self._users: dict[str, Any] = {}  # the values of these names before

    def cell_begins(self, raw_cell: str) -> None:
        """Record the text of a cell that IPython begins to run."""
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
        self._front.name_cell(request.word, here=request.local)
        self._front.draw(each_wait=request.timeline, run=request.name, quiet=request.quiet)

    def leave(self) -> None:
        """End the cell: restore the user's values of the names that it bound."""
        self._copies.close()
        for name, value in self._users.items():
            if self._shell.user_ns.get(name) is self._ours[name]:
                self._shell.user_ns[name] = value
                del self._ours[name]  # the same object may be the user's own in the next cell
        self._users.clear()

    # -- on replicas -----------------------------------------------------------------------------------------------

    def distribute(self, line: str, cell: str) -> None:
        """Run a `%%distribute` cell."""
        if asks_for_help(line):
            print(DISTRIBUTE.format_help())
            return
        with presented():
            request = read_request(line, self._shell.user_ns)
            above = lines_above(self._raw_cell, cell)
            source = padded(1 if above is None else above, line, cell)
            if not cell.strip():
                raise OptionError(f"%%distribute {request.word}: the cell is empty below its first line.")
        if request.local:
            # The magic was called as a function: the input transformer has not seen this cell.
            result = self._shell.run_cell(f"%%distribute {line}\n{cell}", store_history=False)
            result.raise_error()
        else:
            filename = self._filename() if above is not None else self._name_of_text(source)
            text = transformed(source, filename, self._shell)
            with presented():
                check_no_nested_magic(text)
            check_syntax(text, filename, self._shell)
            # To IPython the cell's text is a single magic call. Functions that come from the replicas need the lines of
            # this text: for tracebacks, for `inspect`, and for replicas that receive the functions later.
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
            with presented():
                profile = profile_folder(request.profile) if request.profile else None
                session = self._ensure(request.spec, request.only)
                self._names(request)
                watched = {"only": request.only, "detailed": request.timeline, "profile": profile}
                try:
                    self._run(session, source, request.spec, filename, **watched)
                finally:
                    if request.time and session.cells.latest_times is not None:
                        print(_in_words(session.cells.latest_times))

    def run_in_scope(self, source: str, spec: StrategySpec, filename: str, function: UsersFunction | None) -> None:
        """Run a `with strategy.scope():` block of an ordinary cell, or of a function in one, on the replicas."""
        self._front.name_cell(spec.kind, whole=False)
        self._run(self._ensure(), source, spec, filename, in_scope=True, function=function)

    def _run(self, session: Session, source: str, spec: StrategySpec, filename: str, **how: Any) -> None:
        # IPython's counter may be one ahead already.
        label = cell_name(filename, self._shell) or f"Cell In[{self._shell.execution_count}]"
        try:
            session.cells.run(source, spec, filename=filename, label=label, **how)
        finally:
            # All output of the replicas comes before the error in the cell.
            self._front.flush()

    def _filename(self) -> str:
        """Return the name of the running cell in the debugger and in tracebacks, from the bottom frame."""
        found, frame, cells = "", sys._getframe(), numbers_of_cells(self._shell.compile)
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_filename in cells:
                found = frame.f_code.co_filename
        raw = self._raw_cell
        return found or str(self._shell.compile.get_code_name(raw, raw, self._shell.execution_count))

    def _name_of_text(self, source: str) -> str:
        """Return the file name of a text that is not the running cell's, since a cell calls the magic as a function.

        Tracebacks give the text the name of the cell.
        """
        compiler, count = self._shell.compile, self._shell.execution_count
        name = str(compiler.get_code_name(source, source, count))
        number = cell_name(self._filename(), self._shell).removeprefix("Cell In[").removesuffix("]")
        name_cell(compiler, name, int(number) if number.isdigit() else count)
        return name

    # -- in the notebook -------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Install the transformer before the one that makes magic calls."""
        shell: Any = self._shell
        transforms = shell.input_transformer_manager.cleanup_transforms
        names = [getattr(transform, "__name__", "") for transform in transforms]
        transforms.insert(names.index("cell_magic") if "cell_magic" in names else len(transforms), self)
        shell.ast_transformers.append(self)
        shell._distnb_local = self.enter

    def __call__(self, lines: list[str]) -> list[str]:
        """Transform a cell. IPython calls this for every cell, and for completions."""
        match = _MAGIC.match(lines[0].rstrip()) if lines else None
        if match is None:
            return [f"%%distribute {self._auto}\n", *lines] if self._auto and _is_program(lines) else lines
        line = match["line"] or ""
        if asks_for_help(line) or not "".join(lines[1:]):
            return [lines[0], "\n"]  # for a cell without a body, IPython would raise before it calls the magic
        try:
            request = read_request(line, self._shell.user_ns)
        except (OptionError, StartError):
            return lines  # the magic itself raises the error
        if not request.local or not "".join(lines[1:]).strip():
            return lines
        return [f"{_ENTER}({line!r})\n", *lines[1:]]

    def visit_Module(self, tree: ast.Module) -> ast.Module:
        """Put the call after the cell's `from __future__` imports. IPython calls this for every cell."""
        futures = [
            place
            for place, node in enumerate(tree.body)
            if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ]
        if futures and ast.unparse(tree.body[0]).startswith(_ENTER):
            tree.body.insert(futures[-1], tree.body.pop(0))
        return tree

    def enter(self, line: str) -> None:
        """Begin a local cell: bind its names."""
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
                # Objects on the engines are copied for the cell. The names are bound to the handles again at its end.
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
                    f"%autodistribute {line}: its cells would run in the notebook's own process. Use %autodistribute "
                    "off for that, or %%distribute default to bind `strategy` in one cell."
                )
            else:
                self._auto = line

    def refuse_line_magic(self, line: str) -> None:
        """Raise OptionError for a magic line that is not the first of its cell, or that has only one %.

        IPython treats such a line as a line magic.
        """
        with presented():
            raise OptionError(
                "%%distribute must be the first line of its cell, with two %: IPython reads a cell magic nowhere else. "
                "If there are lines above it, they have run. Move them below it, or into a cell of their own."
            )


DistributeMagic.distribute.__doc__ = DISTRIBUTE.format_help()  # shown by `%%distribute?`
DistributeMagic.autodistribute.__doc__ = AUTODISTRIBUTE.format_help()


def _is_program(lines: list[str]) -> bool:
    """Return whether a cell is Python, rather than a command to IPython."""
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return bool(code) and code[0].lstrip()[0] not in "%!?" and not code[-1].rstrip().endswith("?")


def _in_words(times: CellTimes) -> str:
    """Return the breakdown of a cell's time in words."""
    slowest, fastest = max(times.running, default=0.0), min(times.running, default=0.0)
    ran = f"{slowest:.3f} s" if len(times.running) < 2 else f"{fastest:.3f} to {slowest:.3f} s"
    sent, merged = f"{times.packing:.3f} s to send the cell", f"{times.merging:.3f} s to merge the results"
    return f"{times.total:.3f} s: {sent}, {ran} on the replicas, {merged}"


def _restore_first_line(filename: str, line: str) -> None:
    """Make tracebacks show the user's magic line as a comment, so that the cell's text can be parsed."""
    entry = linecache.cache.get(filename)
    if entry is not None and len(entry) == 4 and entry[2] and "_distnb_local" in entry[2][0]:
        size, _, lines, name = entry
        linecache.cache[filename] = (size, None, [f"# %%distribute {line}\n", *lines[1:]], name)
