"""What the session wants of whoever shows it."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distnb.wire.messages import Asks

if TYPE_CHECKING:
    from distnb.coordinator.coordinator import ClusterCoordinator
    from distnb.notebook.views.runs import History

__all__ = ["FrontEnd", "ask_here"]


def ask_here(asks: Asks) -> str:
    """Ask the user for a line, where this process has its keyboard: a kernel asks its front end."""
    sys.stdout.write(asks.text)
    sys.stdout.flush()
    return getpass.getpass(asks.prompt) if asks.hidden else input(asks.prompt)


@dataclass(frozen=True)
class FrontEnd:
    """What a front end does for the session (`Session`, whose file knows this one). A plain script's shows nothing.

    Attributes:
        live: Takes the values of `distnb.live` in the notebook's process; None: they go to the terminal.
        follow: A session has started, or the last one has ended (None).
        session_for: The session on which a strategy runs, started if there is none; None for the running one.
        catch_up: Shows all that replicas wrote: an error of theirs is about to be raised, and is to stand below.
        callers_lines: The lines that show where the notebook's own code called what failed with an error.
        ask: Asks the user for a line, on the main thread. EOFError at the end of all input.
        watch: Shows, in the cell that runs, what a coordinator does until its closures have ended.
        module_version: Which version of its file a module has, where the front end reloads modules; None where it
            knows of none.
        history: The runs that it drew.
    """

    live: Callable[[dict[str, Any], tuple[int, int], str], None] | None = None
    follow: Callable[[Any], None] = lambda session: None
    session_for: Callable[[Any], Any] = lambda strategy: None
    catch_up: Callable[[], None] = lambda: None
    callers_lines: Callable[[BaseException], list[str]] = lambda error: []
    ask: Callable[[Asks], str] = ask_here
    watch: Callable[[ClusterCoordinator], None] = lambda coordinator: None
    module_version: Callable[[str], object] = lambda name: None
    history: History | None = None
