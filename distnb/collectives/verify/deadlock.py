"""Replicas that wait for each other in different process groups.

Each group's verifier compares what was called in that group. Two replicas of which one waits in the whole group and
the other in a subgroup match in both, and would wait for ever. So who waits long tells in the log of the whole group
for whom it waits, and looks whether a chain of such waits comes back to itself.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from distnb.collectives.verify.collective_log import CollectiveLog, CollectiveWait
from distnb.errors import CollectiveMismatchError

__all__ = ["DeadlockDetector"]

_PATIENCE_S: Final = 0.15


class DeadlockDetector:
    """The waits of all replicas of a program, in the log of their default group."""

    def __init__(self, log: CollectiveLog) -> None:
        self._log = log
        self._thread: int | None = None
        self._several_threads = False
        self._cycle: dict[int, CollectiveWait] = {}
        self._since = 0.0

    def issued(self) -> None:
        """This thread issued a collective. Where several threads do so, one that waits tells nothing of the others."""
        if self._thread != threading.get_ident():
            self._several_threads = self._thread is not None
            self._thread = threading.get_ident()

    def begin_program(self) -> None:
        """Threads are counted anew in each program."""
        self._thread, self._several_threads = None, False
        self.stop()

    def stop(self) -> None:
        """This replica waits no longer."""
        if self._log.wait_of(self._log.me) is not None:
            self._log.set_wait(None)
            self._log.tell_soon()
        self._cycle = {}

    def wait(self, wait: CollectiveWait) -> None:
        """This replica waits, in a collective or to connect a group. Called every 100 ms or so.

        Raises:
            CollectiveMismatchError: One of those that it waits for waits, directly or by way of others, for this one.
        """
        if self._several_threads or not wait.absent:
            self.stop()
            return
        self._log.set_wait(wait)
        cycle = self._find_cycle()
        # The same for a while: what others tell may be about to change, or take its time to come here.
        if cycle != self._cycle:
            self._cycle, self._since = cycle, time.monotonic()
        elif cycle and time.monotonic() - self._since >= (_PATIENCE_S if self._log.shared else 4 * _PATIENCE_S):
            told = "; ".join(f"replica {rank} in {cycle[rank].text}" for rank in sorted(cycle))
            raise CollectiveMismatchError(
                f"The replicas wait for each other in different process groups: {told}. "
                "Every replica must call the collectives of all groups that it is in in the same order."
            )

    def _find_cycle(self) -> dict[int, CollectiveWait]:
        """The waits by which this replica waits for itself; empty if it does not.

        In one group nobody waits for who is further than himself. A cycle there is of news that are overtaken, or that
        no longer come: the others' machine may be lost, which is told by who watches over it.
        """
        me = self._log.me
        waits = {rank: wait for rank in range(self._log.size) if (wait := self._log.wait_of(rank)) is not None}

        def follow(rank: int, path: tuple[int, ...]) -> tuple[int, ...]:
            for other in waits[rank].absent:
                if other == me:
                    return path
                if other in waits and other not in path and (found := follow(other, (*path, other))):
                    return found
            return ()

        cycle = {rank: waits[rank] for rank in (follow(me, (me,)) if me in waits else ())}
        return cycle if len({wait.group for wait in cycle.values()}) > 1 else {}
