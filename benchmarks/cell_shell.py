"""An IPython shell in this process with distnb loaded: benchmarks run cells without a front end's delays."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["Cells"]


class Cells:
    """An IPython shell that runs cells as a notebook would, and raises their errors.

    Args:
        extensions: The extensions for `%load_ext`.
    """

    def __init__(self, *extensions: str) -> None:
        self.shell: Any = InteractiveShell.instance()
        for name in extensions:
            self.shell.run_line_magic("load_ext", name)

    def run(self, source: str) -> None:
        """Run one cell, and discard its output."""
        with redirect_stdout(io.StringIO()):
            result = self.shell.run_cell(source, store_history=False)
        result.raise_error()

    def value(self, name: str) -> Any:
        """Return the value of a variable of the notebook."""
        return self.shell.user_ns[name]
