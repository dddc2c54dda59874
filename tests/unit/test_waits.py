"""Replicas that wait for each other, as one of them sees it on the board."""

from __future__ import annotations

import time

import pytest

from distnb.collectives.group.waiting import Waits
from distnb.collectives.verify.collective_log import CollectiveLog, Wait
from distnb.errors import CollectiveMismatchError


def told_by_both(mine: str, others: str) -> None:
    """Replica 0 waits for replica 1, of which the last that was heard is that it waits for replica 0."""
    memory = bytearray(CollectiveLog.nbytes(2))
    CollectiveLog(memory, 1, 2).set_wait(Wait(f"{others}#4", (0,), "all_reduce"))
    waits, until = Waits(CollectiveLog(memory, 0, 2)), time.monotonic() + 0.5
    while time.monotonic() < until:
        waits.on(mine, 5, [1], "all_reduce")
        time.sleep(0.01)


def test_in_two_groups() -> None:
    with pytest.raises(CollectiveMismatchError, match="wait for each other in different process groups"):
        told_by_both("whole", "part")


def test_in_one_group_that_is_stale_news() -> None:
    told_by_both("whole", "whole")
