"""The `%%distribute` cell magic: reads its line, and hands the cell to the session."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from distnb.errors import OptionError
from distnb.magics.cell_request import read_request
from distnb.magics.cell_text import check_no_nested_magic, check_syntax, padded
from distnb.magics.commands import DISTRIBUTE, asks_for_help
from distnb.magics.local_cell import StrategyName
from distnb.magics.tracebacks import presented, without_frames
from distnb.notebook.output.wording import cell_name
from distnb.options import StrategySpec

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from distnb.notebook.session import Session
    from distnb.widgets.front import Front

__all__ = ["CellRunner"]


class CellRunner:
    """Runs distributed cells of one shell; `ensure` gives the running session, or starts one that suits a strategy."""

    def __init__(
        self, shell: InteractiveShell, front: Front, name: StrategyName, ensure: Callable[..., Session]
    ) -> None:
        self._shell = shell
        self._front = front
        self._name = name
        self._ensure = ensure
        self._raw_cell = ""

    def cell_begins(self, raw_cell: str) -> None:
        """IPython begins to run this cell."""
        self._raw_cell = raw_cell

    def distribute(self, line: str, cell: str) -> None:
        """Run a `%%distribute` cell."""
        if asks_for_help(line):
            print(DISTRIBUTE.format_help())
            return
        with presented():
            request = read_request(line, self._shell.user_ns)
            source = padded(self._raw_cell, line, cell)
            check_no_nested_magic(cell, source.count("\n") - cell.count("\n") + 1)
            if not cell.strip():
                raise OptionError(f"%%distribute {request.word}: the cell is empty below its first line.")
        if request.local:
            # The magic was called as a function: the input transformer has not seen this cell.
            result = self._shell.run_cell(f"%%distribute {line}\n{cell}", store_history=False)
            result.raise_error()
        else:
            filename, text = self._filename(), self._transformed(source)
            with without_frames(self._shell):
                check_syntax(text, filename, self._shell.compile.flags)
            # IPython holds a single magic call as the cell's text. Functions that come back from the replicas have
            # their lines in this one: for tracebacks, inspect, and replicas that they are sent to later.
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
            with presented():
                session = self._ensure(request.spec)
                self._name.bind(request.spec)
                self._front.name_cell(request.word)
                self._run(session, source, request.spec, filename, in_scope=False)

    def run_in_scope(self, source: str, spec: StrategySpec, filename: str) -> None:
        """Run the body of a top-level `with strategy.scope():` on the replicas."""
        self._front.name_cell(spec.kind)
        self._run(self._ensure(), source, spec, filename, in_scope=True)

    def _run(self, session: Session, source: str, spec: StrategySpec, filename: str, *, in_scope: bool) -> None:
        # IPython's counter may be one further already.
        label = cell_name(filename, self._shell) or f"Cell In[{self._shell.execution_count}]"
        try:
            session.run_cell(source, spec, filename=filename, label=label, in_scope=in_scope)
        finally:
            # All that the replicas wrote stands in the cell before its error does.
            self._front.flush()

    def _transformed(self, source: str) -> str:
        """Python's syntax for IPython's, line for line; IPython itself would strip empty lines at the top."""
        return "\n" * (len(source) - len(source.lstrip("\n"))) + str(self._shell.transform_cell(source))

    def _filename(self) -> str:
        """What the notebook's debugger and tracebacks call the running cell: its frame is below all others'."""
        found, frame = "", sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if self._shell.compile.format_code_name(frame.f_code.co_filename) is not None:
                found = frame.f_code.co_filename
        raw = self._raw_cell
        return found or str(self._shell.compile.get_code_name(raw, raw, self._shell.execution_count))


CellRunner.distribute.__doc__ = DISTRIBUTE.format_help()  # what `%%distribute?` shows
