"""Redirection of a replica's `input()`, `breakpoint()`, `exit()` and pager, and the refusal of `%distnb` there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

from distnb.compat import patches
from distnb.engine.debugging import debugger
from distnb.engine.debugging.console import Console

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["install"]


def install(
    shell: InteractiveShell, console: Console, stop: Callable[[FrameType, str | None, Iterable[str]], None]
) -> None:
    """Install the redirections in a replica's shell.

    Args:
        stop: Opens a debugger's prompt in a frame, below a header and after some of the debugger's commands.
    """
    shell.user_ns["exit"] = shell.user_ns["quit"] = _end_cell
    shell.set_hook("show_in_pager", _show_in_cell, 0)
    patches.replace("builtins:input", console.input)
    patches.replace("getpass:getpass", console.getpass)

    def breakpoint_hook(*args: Any, **keywords: Any) -> Any:
        if "PYTHONBREAKPOINT" in os.environ:  # the user has chosen another debugger, or none
            return sys.__breakpointhook__(*args, **keywords)  # noqa: T100
        return stop_here(sys._getframe(1), *args, **keywords)

    def stop_here(frame: FrameType, *, header: str | None = None, commands: Iterable[str] | None = None) -> None:
        stop(frame, header, commands or ())

    sys.breakpointhook = breakpoint_hook
    debugger.redirect(stop)
    shell.magics_manager.register_function(_no_cluster, "line", "distnb")
    if shell.extension_manager is not None:
        shell.extension_manager.loaded.add("distnb")  # `%load_ext distnb` in a distributed cell reports it as loaded


def _end_cell(code: object = None) -> None:
    """End this replica's part of the cell, and not the engine."""
    raise SystemExit(code)


def _show_in_cell(shell: InteractiveShell, data: Any, start: int, screen_lines: int) -> None:
    """Print the text of `name?` in the cell, since the pager belongs to the notebook's front end."""
    print(data["text/plain"] if isinstance(data, dict) else data)


def _no_cluster(line: str) -> None:
    raise RuntimeError(
        f"%distnb {line.strip()} was run on a replica, but only the notebook manages the engines. Write it in a cell "
        "of its own, without %%distribute."
    )
