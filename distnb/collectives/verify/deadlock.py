"""Detection of replicas that wait for each other in different process groups.

Each group's verifier compares the calls in that group. If one replica waits in the whole group and the other in a
subgroup, the calls of both groups match, and both replicas would wait for ever. So a replica that waits for long
reports its wait in the log of the whole group, and looks for a chain of waits that leads back to itself.
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
    """A search for cycles among the waits of a program's replicas, in the log of their default group."""

    def __init__(self, log: CollectiveLog) -> None:
        self._log = log
        self._thread: int | None = None
        self._several_threads = False
        self._cycle: dict[int, CollectiveWait] = {}
        self._may_be_reported = True  # whether the log may have a wait of this replica
        self._since = 0.0

    def issued(self) -> None:
        """Note that this thread issued a collective. If several threads do, one thread's wait does not mean that all
        wait."""
        if self._thread != threading.get_ident():
            self._several_threads = self._thread is not None
            self._thread = threading.get_ident()

    def begin_program(self) -> None:
        """Count threads from zero again."""
        self._thread, self._several_threads = None, False
        if self._may_be_reported:
            self.stop()

    def stop(self) -> None:
        """Withdraw this replica's wait."""
        if not self._may_be_reported:
            return
        self._may_be_reported = False
        if self._log.wait_of(self._log.me) is not None:
            self._log.set_wait(None)
            self._log.send_soon()
        self._cycle = {}

    def wait(self, wait: CollectiveWait) -> None:
        """Report that this replica waits in a collective or to connect a group, and look for a cycle.

        A waiting replica calls this about every 100 ms.

        Raises:
            CollectiveMismatchError: A replica that this one waits for waits for this one, directly or through others.
        """
        if self._several_threads or not wait.absent:
            self.stop()
            return
        self._may_be_reported = True
        self._log.set_wait(wait)
        cycle = self._find_cycle()
        # Only a cycle that lasts counts, because a report may be about to change or to arrive.
        if cycle != self._cycle:
            self._cycle, self._since = cycle, time.monotonic()
        elif cycle and time.monotonic() - self._since >= (_PATIENCE_S if self._log.shared else 4 * _PATIENCE_S):
            waits = "; ".join(f"replica {rank} in {cycle[rank].text}" for rank in sorted(cycle))
            raise CollectiveMismatchError(
                f"The replicas wait for each other in different process groups: {waits}. "
                "Every replica must call the collectives of all groups that it is in in the same order."
            )

    def _find_cycle(self) -> dict[int, CollectiveWait]:
        """Return the cycle of waits that this replica is in; empty if there is none.

        Within one group no replica waits for one that is ahead of it. A cycle there consists of outdated reports, or of
        reports that no longer arrive because a machine is lost, which is detected elsewhere.
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
