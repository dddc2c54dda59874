"""The state of a program on each of its engines (replied, died, given up on), and the outcome of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distnb.topology import Team
from distnb.wire.messages import Reply
from distnb.wire.planned import PlannedReply

__all__ = ["Outcome", "oldest_awaiting"]

_PRECEDENCE = (
    "error",
    "interrupted",
    "aborted",
)  # an abort follows from another replica's error or the user's interrupt


class Outcome:
    """The state of a program on each engine that runs it: of a team's program, or of a closure on one worker.

    Attributes:
        program: The program's number.
        engines: The engines that run it, in replica order.
        team: The team of these engines; None for a closure on a worker of one engine.
        replies: The replies by engine, in order of arrival: a `Reply` or a `PlannedReply` each.
        died: The exit status of each engine that died before it replied.
        stuck: The engines that did not follow the order to end. Their replies may still arrive.
        quiet: Whether an engine that succeeds reports that by its reply alone, without an event.
        unstoppable: Whether the user cannot end the program, which is short.
        interrupted: Whether the user ended the program.
    """

    def __init__(
        self,
        program: int,
        engines: tuple[int, ...],
        *,
        team: Team | None = None,
        quiet: bool = True,
        unstoppable: bool = False,
    ) -> None:
        self.program = program
        self.engines = engines
        self.team = team
        self.replies: dict[int, Any] = {}
        self.died: dict[int, str] = {}
        self.stuck: set[int] = set()
        self.quiet = quiet
        self.unstoppable = unstoppable
        self.interrupted = self._failed = self._given_up = False
        self._missing = set(engines)

    def receive(self, engine: int, reply: Reply | PlannedReply) -> None:
        """Accept a reply, also of an engine that was given up on."""
        self.replies[engine] = reply
        self.died.pop(engine, None)
        self.stuck.discard(engine)
        self._missing.discard(engine)
        self._failed = self._failed or reply.status != "ok"

    def mark_lost(self, engine: int, exit_status: str | None) -> None:
        """Stop waiting for an engine's reply.

        Args:
            exit_status: The engine's exit status if it died; None if it did not follow the order to end.
        """
        if exit_status is None:
            self.stuck.add(engine)
            self._given_up = True
        else:
            self.died[engine] = exit_status
        self._missing.discard(engine)

    def awaits(self, engine: int) -> bool:
        """Return whether an engine runs the program and has not replied."""
        return engine in self.engines and engine not in self.replies

    @property
    def complete(self) -> bool:
        """True if every engine has replied, died, or been given up on."""
        return not self._missing

    @property
    def ok(self) -> bool:
        """True if no replica failed."""
        return not (self._failed or self.died or self.stuck)

    @property
    def stopped(self) -> bool:
        """True if the user ended the program, and it did not catch the interrupt and end without an error."""
        return self.interrupted and not (self.ok and any(reply.caught for reply in self.replies.values()))

    @property
    def left_group_whole(self) -> bool:
        """True if the next program can use the same process group. An order to end the program ends the group, too."""
        return self.ok and not (self.interrupted or self._given_up)

    def results(self, team: Team) -> dict[int, Any]:
        """Return the results by replica, or {} if a replica was ended before it had opened the snapshot.

        In that case all values are sent again.
        """
        found = {team.rank_of(engine): reply.value for engine, reply in self.replies.items() if reply.value is not None}
        return found if len(found) == len(self.replies) else {}

    def decisive(self) -> tuple[Reply, tuple[Reply, ...]]:
        """Return the reply that decides how the program ended, and the other replies if it succeeded.

        Every engine has replied. An error takes precedence over an interrupt, and an interrupt over an abort.
        """
        first, *others = [self.replies[engine] for engine in self.engines]
        if self._failed:
            failed = [reply for reply in (first, *others) if reply.status != "ok"]
            return min(failed, key=lambda reply: _PRECEDENCE.index(reply.status)), ()
        return first, tuple(others)


def oldest_awaiting(outcomes: Iterable[Outcome], engine: int) -> Outcome | None:
    """Return the oldest program to which an engine has not replied: engines run programs, and reply, in order."""
    return min((each for each in outcomes if each.awaits(engine)), key=lambda each: each.program, default=None)
