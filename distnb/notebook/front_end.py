"""The interface between a session and its front end."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distnb.wire.messages import InputRequest

if TYPE_CHECKING:
    from distnb.notebook.namespace.module_watch import FileVersion
    from distnb.views.runs import History
    from distnb.views.watch import Watch

__all__ = ["FrontEnd", "ask_here"]


def ask_here(asks: InputRequest) -> str:
    """Ask the user for a line at this process's keyboard; a kernel asks its front end."""
    sys.stdout.write(asks.text)
    sys.stdout.flush()
    return getpass.getpass(asks.prompt) if asks.hidden else input(asks.prompt)


@dataclass(frozen=True)
class FrontEnd:
    """The functions of a front end that the session calls. The defaults are those of a plain script.

    Attributes:
        live: Draws values of `distnb.live` in the notebook's process. None prints them in the terminal.
        follow: Called with a session that has started, or with None when the last one has ended.
        session_for: Returns the session on which a strategy runs, started if none runs; None for the running session.
        catch_up: Shows all output of the replicas before an error of theirs is raised, so that the error is below it.
        callers_lines: Returns the lines where the notebook's own code called the operation that failed.
        ask: Asks the user for a line on the main thread. Raises EOFError at the end of the input.
        watch: Shows an object, such as a coordinator, in the cell that uses it. Called with the object, and a function
            that creates its `Watch`.
        module_version: Returns the version of the file that a module was loaded from; None if the front end does not
            reload modules.
        history: The runs that the front end drew.
    """

    live: Callable[[dict[str, Any], tuple[int, int], str], None] | None = None
    follow: Callable[[Any], None] = lambda session: None
    session_for: Callable[[Any], Any] = lambda strategy: None
    catch_up: Callable[[], None] = lambda: None
    callers_lines: Callable[[BaseException], list[str]] = lambda error: []
    ask: Callable[[InputRequest], str] = ask_here
    watch: Callable[[Any, Callable[[Any], Watch]], None] = lambda subject, make: None
    module_version: Callable[[str], FileVersion | None] = lambda name: None
    history: History | None = None
