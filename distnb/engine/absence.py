"""The behaviour of an engine whose connection to the notebook ends, which a feature may replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distnb import features

if TYPE_CHECKING:
    from distnb.cluster.connection import Connection
    from distnb.engine.agent import Agent

__all__ = ["Absence", "absence_of"]


class Absence:
    """The behaviour of an engine while no notebook is connected. This one ends with its notebook, and does nothing.

    Attributes:
        is_followed: Whether the engine stays, and follows the ends and beginnings of its connection.
        lasts: Whether no notebook is there.
        ends_programs: Whether a program that runs when the notebook ends is ended.
        unseen: The first program that ran when the notebook had gone; 0 if there is none.
        kept: The latest program of which events are kept; 0 if there is none.
    """

    is_followed = lasts = ends_programs = False
    unseen = kept = 0

    def begin(self, running: tuple[int, int] | None) -> None:
        """Begin the absence, in which this (program, replica) may run."""

    def program_began(self, program: int) -> None:
        """Note that a program begins."""

    def keep(self, events: Sequence[Any]) -> None:
        """Keep events, which are also sent unless the absence lasts."""

    def meet(self, send: Callable[[list[Any]], None]) -> None:
        """Introduce this engine to a notebook that has connected."""

    def follow(self, order: Any, engine: int) -> Sequence[Any]:
        """Follow an order of a kind that only this object knows. Return events to send."""
        return ()

    def add_programs(self, agent: Agent) -> None:
        """Add kinds of programs to the agent, with which a notebook resumes."""


def absence_of(connection: Connection, hello: Callable[[], Any], reconnect: Callable[[], None]) -> Absence:
    """Return the behaviour that the cluster's owner has chosen (`Connection.on_disconnect`).

    Args:
        connection: The connection to the cluster.
        hello: Returns the message that introduces this engine to the next notebook.
        reconnect: Connects to that notebook for programs, once it has connected for control.
    """
    if not connection.on_disconnect:
        return Absence()
    found: Absence = features.require("clusters that stay", "absence")(connection.on_disconnect, hello, reconnect)
    return found
