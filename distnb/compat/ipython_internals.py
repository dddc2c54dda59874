"""Private names of IPython: its shell's tracebacks, its cells' names, and autoreload's records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distnb.compat.versions import private_names

with private_names("IPython"):
    from IPython.core.compilerop import CachingCompiler
    from IPython.core.interactiveshell import InteractiveShell

    # Looked up by name, because a kernel's shell overrides the method to send the lines to the notebook.
    _show_lines = InteractiveShell._showtraceback.__name__
    _note_error: Any = InteractiveShell._get_exc_info

__all__ = ["autoreloader", "name_cell", "redirect_errors", "show_lines"]


def show_lines(shell: InteractiveShell, found: tuple[Any, Any, Any], lines: list[str]) -> None:
    """Show an error (type, value, traceback) as some lines. It becomes the latest one, for %tb and %debug."""
    _note_error(shell, found)
    getattr(shell, _show_lines)(*found[:2], lines)


def redirect_errors(shell: InteractiveShell, write: Callable[[str], bool]) -> None:
    """Redirect the errors that a shell shows to `write`. If it returns False, the shell shows them itself."""
    show = getattr(shell, _show_lines)

    def show_lines_of(kind: type, error: BaseException, lines: list[str]) -> None:
        if not write("\n".join(lines) + "\n"):
            show(kind, error, lines)

    setattr(shell, _show_lines, show_lines_of)


def name_cell(compiler: CachingCompiler, filename: str, number: int) -> None:
    """Make tracebacks call a file "Cell In[number]"."""
    compiler._filename_map[filename] = number


def autoreloader(shell: InteractiveShell) -> Any:
    """Return %autoreload's record of modules, or None if the extension is not loaded."""
    return getattr(shell.magics_manager.registry.get("AutoreloadMagics"), "_reloader", None)
