"""What the session wants of whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["FrontEnd"]


class FrontEnd:
    """What a front end does for the session (`Session`, whose file knows this one). A plain script's shows nothing."""

    live: Callable[[dict[str, Any], tuple[int, int]], None] | None = None
    """Takes the values of `distnb.live` in the notebook's process; None: they go to the terminal."""

    def follow(self, session: Any) -> None:
        """A session has started, or the last one has ended (None)."""

    def session_for(self, strategy: Any) -> Any:
        """The session on which a strategy runs, started if there is none; None for the running one."""
        return None

    def catch_up(self) -> None:
        """Show all that replicas wrote: an error of theirs is about to be raised, and is to stand below."""

    def callers_lines(self, error: BaseException) -> list[str]:
        """The lines that show where the notebook's own code called what failed with this error."""
        return []

    def module_version(self, name: str) -> object:
        """Which version of its file a module has, where the front end reloads modules; None where it knows of none."""
        return None
