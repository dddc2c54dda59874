"""Replicas that wait for each other in different process groups.

Each group's ledger compares what was called in that group. Two replicas of which one waits in the whole group and the
other in a subgroup match in both, and would wait for ever. So who waits long tells on the board for whom it waits, and
looks whether a chain of such waits comes back to itself.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from distnb.collectives.verify.collective_log import CollectiveLog, Wait
from distnb.errors import CollectiveMismatchError

__all__ = ["Waits"]

_PATIENCE_S: Final = 0.15


class Waits:
    """The waits of all replicas of a program, on the board of their default group.

    Args:
        board: That board.
    """

    def __init__(self, board: CollectiveLog) -> None:
        self._board = board
        self._thread: int | None = None
        self._several_threads = False
        self._seen: dict[int, Wait] = {}
        self._since = 0.0

    def issued(self) -> None:
        """A collective was issued by this thread. Where several do so, one that waits tells nothing of the others."""
        if self._thread != threading.get_ident():
            self._several_threads = self._thread is not None
            self._thread = threading.get_ident()

    def begin_program(self) -> None:
        """Threads are counted anew in each program."""
        self._thread, self._several_threads = None, False
        self.over()

    def over(self) -> None:
        """This replica waits no longer."""
        if self._board.wait_of(self._board.me) is not None:
            self._board.set_wait(None)
            self._board.tell_soon()
        self._seen = {}

    def on(self, group: str, number: int, absent: list[int], text: str) -> None:
        """This replica waits, in a collective or to connect a group. Called every 100 ms or so.

        Args:
            group, number: Which collective of which group.
            absent: The replicas that have not come to it.
            text: What this replica does, for people.

        Raises:
            CollectiveMismatchError: One of those waits, directly or by way of others, for this one.
        """
        if self._several_threads or not absent:
            self.over()
            return
        me, board = self._board.me, self._board
        board.set_wait(Wait(f"{group}#{number}", tuple(absent), text))
        circle = self._circle(me)
        # The same for a while: what others tell may be about to change, or take its time to come here.
        if circle != self._seen:
            self._seen, self._since = circle, time.monotonic()
        elif circle and time.monotonic() - self._since >= (_PATIENCE_S if board.shared else 4 * _PATIENCE_S):
            told = "; ".join(f"replica {rank} in {circle[rank].text}" for rank in sorted(circle))
            raise CollectiveMismatchError(
                f"The replicas wait for each other in different process groups: {told}. "
                "Every replica must call the collectives of all groups that it is in in the same order."
            )

    def _circle(self, me: int) -> dict[int, Wait]:
        """The waits by which this replica waits for itself; empty if it does not.

        In one group nobody waits for who is further than himself. A circle there is of news that are overtaken, or that
        no longer come: the others' machine may be lost, which is told by who watches over it.
        """
        waits = {rank: wait for rank in range(self._board.size) if (wait := self._board.wait_of(rank)) is not None}

        def follow(rank: int, path: tuple[int, ...]) -> tuple[int, ...]:
            for other in waits[rank].absent:
                if other == me:
                    return path
                if other in waits and other not in path:
                    found = follow(other, (*path, other))
                    if found:
                        return found
            return ()

        circle = {rank: waits[rank] for rank in follow(me, (me,))} if me in waits else {}
        return circle if len({wait.group for wait in circle.values()}) > 1 else {}
