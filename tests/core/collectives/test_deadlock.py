"""Replicas that wait for each other, as one of them sees it in the collective log."""

from __future__ import annotations

import time

import pytest

from distnb.collectives.verify.collective_log import CollectiveLog, CollectiveWait
from distnb.collectives.verify.deadlock import DeadlockDetector
from distnb.errors import CollectiveMismatchError


def report_from_both(mine: str, others: str) -> None:
    """Return the reports of both: replica 0 waits for replica 1, which waited for replica 0 when last seen."""
    memory = bytearray(CollectiveLog.nbytes(2))
    CollectiveLog(memory, 1, 2).set_wait(CollectiveWait(group=others, number=4, absent=(0,), text="all_reduce"))
    detector, until = DeadlockDetector(CollectiveLog(memory, 0, 2)), time.monotonic() + 0.5
    while time.monotonic() < until:
        detector.wait(CollectiveWait(group=mine, number=5, absent=(1,), text="all_reduce"))
        time.sleep(0.01)


def test_waits_in_two_groups_are_a_deadlock() -> None:
    with pytest.raises(CollectiveMismatchError, match="wait for each other in different process groups"):
        report_from_both("whole", "part")


def test_waits_in_one_group_are_outdated_reports() -> None:
    report_from_both("whole", "whole")


def test_a_cycle_is_found_once_it_lasts() -> None:
    memory = bytearray(CollectiveLog.nbytes(3))
    first, second, third = (DeadlockDetector(CollectiveLog(memory, rank, 3)) for rank in range(3))
    first.wait(CollectiveWait(group="whole", number=4, absent=(1,), text="a"))
    second.wait(CollectiveWait(group="part", number=2, absent=(2,), text="b"))
    third.wait(CollectiveWait(group="other part", number=1, absent=(0,), text="c"))
    first.wait(CollectiveWait(group="whole", number=4, absent=(1,), text="a"))
    time.sleep(0.25)
    with pytest.raises(CollectiveMismatchError, match="replica 0 in a; replica 1 in b; replica 2 in c"):
        first.wait(CollectiveWait(group="whole", number=4, absent=(1,), text="a"))


def test_a_wait_that_ends_breaks_the_cycle() -> None:
    memory = bytearray(CollectiveLog.nbytes(2))
    first, second = (DeadlockDetector(CollectiveLog(memory, rank, 2)) for rank in range(2))
    for _ in range(3):
        second.wait(CollectiveWait(group="part", number=2, absent=(0,), text="b"))
        first.wait(CollectiveWait(group="whole", number=4, absent=(1,), text="a"))
        second.stop()
        time.sleep(0.15)
        first.wait(CollectiveWait(group="whole", number=4, absent=(1,), text="a"))
