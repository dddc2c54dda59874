"""`breakpoint()` in a notebook stops there, with a prompt below the cell.

ipykernel loads debugpy, whose hook stops only while the front end's own debugger is attached, and else does nothing:
a user's `breakpoint()` is passed over in silence. So that hook stays for as long as a debugger is attached; otherwise
IPython's own debugger answers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Breakpoints"]


class Breakpoints:
    """Chooses who answers `breakpoint()` in this process."""

    def __init__(self) -> None:
        self._theirs: Callable[..., Any] | None = None

    def choose(self) -> None:
        """To be called as each cell begins: a debugger is attached and detached between them."""
        debugpy = sys.modules.get("debugpy")
        if sys.breakpointhook is _prompt:
            if debugpy is not None and debugpy.is_client_connected():
                self.restore()
        elif debugpy is not None and not debugpy.is_client_connected() and _is_debugpys(sys.breakpointhook):
            self._theirs, sys.breakpointhook = sys.breakpointhook, _prompt

    def restore(self) -> None:
        """Put back what was there."""
        if sys.breakpointhook is _prompt and self._theirs is not None:
            sys.breakpointhook = self._theirs


def _is_debugpys(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("debugpy")


def _prompt(*args: Any, **keywords: Any) -> Any:
    if "PYTHONBREAKPOINT" in os.environ:
        return sys.__breakpointhook__(*args, **keywords)  # noqa: T100  (it is what the variable asks for)
    from IPython.core.debugger import set_trace

    set_trace(sys._getframe(1), *args, **keywords)
    return None
