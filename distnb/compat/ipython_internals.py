"""Private names of IPython, and the differences between its versions: tracebacks, cells' names, and modules.

IPython 7 is the version of Colab and Kaggle. Their kernel is also older than the package `comm`, by which a widget
reaches the pages, so the widgets of a replica are shown as text.
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Callable
from typing import Any

import IPython
from IPython.core.ultratb import AutoFormattedTB, SyntaxTB

from distnb.compat.versions import private_names

with private_names("IPython"):
    from IPython.core.compilerop import CachingCompiler
    from IPython.core.interactiveshell import InteractiveShell

    # Looked up by name, because a kernel's shell overrides the method to send the lines to the notebook.
    _show_lines = InteractiveShell._showtraceback.__name__
    _note_error: Any = InteractiveShell._get_exc_info

HAS_COMM = importlib.util.find_spec("comm") is not None
BaseComm: Any = importlib.import_module("comm.base_comm").BaseComm if HAS_COMM else object

__all__ = [
    "HAS_COMM",
    "BaseComm",
    "autoreloaded",
    "cell_number",
    "compact_modules",
    "draw_notes",
    "error_drawer",
    "has_parent_by_thread",
    "name_cell",
    "number_cells",
    "numbers_of_cells",
    "redirect_errors",
    "show_lines",
]

_COLOURS: dict[str, Any] = {"theme_name": "neutral"} if IPython.version_info >= (9,) else {"color_scheme": "Neutral"}
_IS_7 = IPython.version_info < (8,)


def has_parent_by_thread(shell: InteractiveShell) -> bool:
    """Return whether each thread has a parent of its own. In old kernels, all have that of the latest request."""
    return isinstance(getattr(type(shell), "parent_header", None), property)


# -- errors ------------------------------------------------------------------------------------------------------------


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


def error_drawer(error: BaseException, mode: str) -> Any:
    """Return IPython's drawer of an error's traceback, in colours, in a mode of %xmode."""
    drawer = SyntaxTB(**_COLOURS) if isinstance(error, SyntaxError) else AutoFormattedTB(mode=mode, **_COLOURS)
    draw_notes(drawer)
    return drawer


def draw_notes(drawer: Any) -> None:
    """Make a drawer of tracebacks draw the notes of an error, which IPython 7 does not know."""
    if not _IS_7:
        return
    draw = drawer.structured_traceback

    def draw_with_notes(kind: Any, error: Any, *args: Any, **keywords: Any) -> list[str]:
        return [*draw(kind, error, *args, **keywords), *map(str, getattr(error, "__notes__", ()))]

    drawer.structured_traceback = draw_with_notes
    # IPython draws a SystemExit with this. IPython 7 fails if the SystemExit has a cause.
    drawer.get_exception_only = lambda kind, error: [
        line.rstrip("\n") for line in traceback.format_exception_only(kind, error)
    ]


# -- cells' names ------------------------------------------------------------------------------------------------------


def numbers_of_cells(compiler: CachingCompiler) -> dict[str, int]:
    """Return the number of each cell, by the file name of its code."""
    numbers: dict[str, int] = vars(compiler).setdefault("_filename_map", {})
    return numbers


def name_cell(compiler: CachingCompiler, filename: str, number: int) -> None:
    """Make tracebacks call a file "Cell In[number]"."""
    numbers_of_cells(compiler)[filename] = number


def cell_number(compiler: CachingCompiler, filename: str) -> int | None:
    """Return the number of the cell whose code has this file name; None for other files."""
    return numbers_of_cells(compiler).get(filename)


def number_cells(shell: InteractiveShell) -> None:
    """Make IPython 7 record the number of each cell, and keep the texts that we put into `linecache`, as later ones do.

    It puts its own texts back at each check: of a %%distribute cell, the call of the magic.
    """
    compiler: Any = shell.compile
    if not _IS_7 or "_filename_map" in vars(compiler):
        return
    check = linecache.checkcache
    history, cache = shell.history_manager, compiler.cache
    earlier = zip(history.input_hist_raw, history.input_hist_parsed, strict=True) if history is not None else ()
    for number, (raw, parsed) in enumerate(earlier):
        name_cell(compiler, compiler.get_code_name(raw, f"{parsed}\n", number), number)

    def cache_and_number(transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        name: str = cache(transformed_code, number, raw_code)
        name_cell(compiler, name, number)
        return name

    def check_and_keep(filename: str | None = None) -> None:
        kept = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
        check(filename)
        linecache.cache.update(kept)

    compiler.cache = cache_and_number
    linecache.checkcache = check_and_keep


# -- modules -----------------------------------------------------------------------------------------------------------


class _Module:
    """A module, as a kernel sees it that notes the files in which its debugger does not stop."""

    __slots__ = ("__file__",)

    def __init__(self, file: str) -> None:
        self.__file__ = file


class _System:
    """The module `sys`, as ipykernel's kernel sees it."""

    def __init__(self) -> None:
        files = [getattr(module, "__file__", None) for module in sys.modules.values()]
        self.modules = {number: _Module(_copy(file)) for number, file in enumerate(files) if isinstance(file, str)}

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def compact_modules() -> None:
    """Copy the names and files of the loaded modules into adjacent memory, once, before the process is forked.

    A forked process copies each page that it writes to, and Python writes to an object to count a reference. When a
    shell starts, IPython notes the names of all modules, and ipykernel their files. In a process with thousands of
    modules that copied 12 MB.
    """
    ipkernel: Any = importlib.import_module("ipykernel.ipkernel")
    if isinstance(ipkernel.sys, _System):
        return
    for name in list(sys.modules):
        sys.modules[_copy(name)] = sys.modules.pop(name)
    ipkernel.sys = _System()


def _copy(text: str) -> str:
    return text.encode().decode()


def autoreloaded(shell: InteractiveShell, name: str, file: str | None) -> tuple[float | None, bool] | None:
    """Return the time of a module's file that %autoreload has loaded; None if the extension is not loaded.

    The second item is whether %autoreload changes only the definitions whose text has changed. IPython 7 does not.
    """
    reloader = getattr(shell.magics_manager.registry.get("AutoreloadMagics"), "_reloader", None)
    if reloader is None:
        return None
    time = reloader.modules_mtimes.get(name)
    patcher = getattr(reloader, "deduper_reloader", None)
    patches = patcher is not None and patcher.enabled and not reloader.autoload_obj
    return None if reloader.failed.get(file) == time else time, patches
