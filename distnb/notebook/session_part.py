"""The extension point of the session, "session parts": parts that only some programs need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distnb.cluster.engine_owner import EngineOwner
    from distnb.notebook.engines import Engines
    from distnb.notebook.front_end import FrontEnd

__all__ = ["Ask", "SessionPart"]

Ask = Callable[[Sequence[int], Callable[[int, Any], Any]], dict[int, Any]]


class SessionPart:
    """A part of a session with processes, channels or programs of its own. `Session.part` creates it at its first use.

    Args:
        engines: The session's engines.
        ask: Runs a program on some engines, and returns the values of the replies by engine. Its arguments are the
            engines, and a function that creates the message from the program's number and team.
        front: Returns the front end that shows the session.
        open_error: Opens a packed exception.
    """

    def __init__(
        self, engines: Engines, ask: Ask, front: Callable[[], FrontEnd], open_error: Callable[[Any], Any]
    ) -> None:
        self._engines = engines
        self._ask = ask
        self._front = front
        self._open_error = open_error

    @classmethod
    def is_needed(cls, owner: EngineOwner) -> bool:
        """Return whether every program on the engines of this owner needs the part. The default is False."""
        return False

    def begin(self, user_ns: Mapping[str, object]) -> None:
        """Begin a session with engines that need the part; `user_ns` has the notebook's variables."""

    def enlist(self, engines: Iterable[int]) -> None:
        """Use engines that have just started. The caller holds the session's turn."""

    def leave(self, engines: Iterable[int], how: str) -> None:
        """Release engines that are about to be replaced or removed. `how` says how they end."""

    def forget(self, engines: Iterable[int]) -> None:
        """Forget engines that were removed."""

    def user_interrupts(self) -> bool:
        """End the programs of this part at the user's request. Return False if none runs."""
        return False

    def work(self) -> Mapping[str, tuple[str, str]]:
        """Return the current work and the content of each task as texts for `%distnb status`, by the task's name."""
        return {}

    def close(self) -> None:
        """Free the part's resources when the cluster ends."""
