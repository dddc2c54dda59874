"""The time limit that user code gives to a process group: `init_process_group(timeout=…)`, `new_group(timeout=…)`.

Without one a replica that is slow is waited for as long as it is alive. torch has a default limit of half an hour,
which it hands down as if the user had given it: that one is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import constants

from distnb.collectives.verify.verifier import Verifier
from distnb.errors import CollectiveError, OptionError

__all__ = ["TimeLimit", "out_of_time"]


class TimeLimit:
    """One group's limit, and the operations under way that it holds for.

    Attributes:
        seconds: The limit; None where there is none.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._under_way: dict[int, tuple[Any, float, float]] = {}  # number -> (work, limit, deadline)

    def set(self, timeout: timedelta | None) -> None:
        """Have this limit, or none, for the operations that begin from now on.

        Raises:
            OptionError: It is not positive.
        """
        if timeout in (None, constants.default_pg_timeout, constants.default_pg_nccl_timeout):
            self.seconds = None
            return
        if timeout.total_seconds() <= 0:
            raise OptionError(f"timeout={timeout!r}: a time limit for collectives must be positive.")
        self.seconds = timeout.total_seconds()

    def watch(self, number: int, inner: Any, limit_s: float | None = None) -> None:
        """An operation began.

        Args:
            number: The collective's number.
            inner: The backend's work; none while operations are coalesced.
            limit_s: A limit of its own.
        """
        limit_s = limit_s or self.seconds
        if limit_s is not None and inner is not None:
            self._under_way[number] = (inner, limit_s, time.monotonic() + limit_s)

    def forget(self) -> None:
        """Nothing is under way any more."""
        self._under_way = {}

    def overdue(self) -> tuple[int, float] | None:
        """An operation that should have ended by now, and the limit that it had; None if there is none."""
        now = time.monotonic()
        for number, (inner, limit_s, deadline) in list(self._under_way.items()):
            if inner.is_completed():
                self._under_way.pop(number, None)
            elif now > deadline:
                return number, limit_s
        return None


def out_of_time(
    ledger: Verifier | None, replicas: Sequence[int], number: int | None, limit_s: float
) -> CollectiveError:
    """The error for an operation that was not done in time: what it was, and who has not come to it.

    Args:
        ledger: What was called, where that is known.
        replicas: The replica id of each rank.
        number: Of the collective; None for a message.
        limit_s: How long the program gave it.
    """
    who, what = "", "The operation"
    if ledger is not None and number is not None:
        what = ledger.told(number)
        absent = ", ".join(str(replicas[rank]) for rank in ledger.absent(number))
        who = f" Not there yet: replica {absent}." if absent else ""
    return CollectiveError(
        f"{what} did not end within the time limit of {limit_s:g} s that the program gave it.{who} "
        "Give it a longer one, or none: replicas are then waited for as long as they are alive."
    )
