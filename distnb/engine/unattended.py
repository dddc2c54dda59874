"""What a replica answers where a person would be asked: it has no keyboard, no front end, and no cluster of its own."""

from __future__ import annotations

import builtins
import pdb  # noqa: T100  (to say that there is none)
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["install"]


def install(shell: InteractiveShell) -> None:
    """Give a replica's shell these answers."""
    shell.user_ns["exit"] = shell.user_ns["quit"] = _end_cell
    shell.set_hook("show_in_pager", _show_in_cell, 0)
    builtins.input, sys.breakpointhook = _no_input, _no_debugger
    set_trace = pdb.Pdb.set_trace

    def no_trace(debugger: pdb.Pdb, *args: Any, **keywords: Any) -> Any:
        if debugger.use_rawinput:  # else it has a connection of its own, as remote debuggers have
            _no_debugger()
        return set_trace(debugger, *args, **keywords)

    pdb.Pdb.set_trace = no_trace  # type: ignore[assignment, method-assign]
    shell.magics_manager.register_function(_no_cluster, "line", "distnb")
    if shell.extension_manager is not None:
        shell.extension_manager.loaded.add("distnb")  # `%load_ext distnb` in a distributed cell says that it is there


def _end_cell(code: object = None) -> None:
    """Ends this replica's part of the cell, never the engine."""
    raise SystemExit(code)


def _show_in_cell(shell: InteractiveShell, data: Any, start: int, screen_lines: int) -> None:
    """What `name?` tells: the pager belongs to the notebook's front end."""
    print(data["text/plain"] if isinstance(data, dict) else data)


def _no_input(prompt: object = "") -> str:
    raise RuntimeError(
        f"input({prompt!r}) was called on a replica, and a replica has no keyboard. Ask in an ordinary cell and use "
        "the answer's name in the distributed one."
    )


def _no_debugger(*args: object, **keywords: object) -> None:
    raise RuntimeError(
        "A debugger was called on a replica, by breakpoint() or the like, and a replica has no keyboard. Run the same "
        "cell under %%distribute default: there it runs in the notebook, and breakpoint() and %debug work."
    )


def _no_cluster(line: str) -> None:
    raise RuntimeError(
        f"%distnb {line.strip()} was run on a replica, and it is the notebook that has the engines. Write it in a cell "
        "of its own, without %%distribute."
    )
