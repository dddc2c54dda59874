"""The membership of an elastic script, by random walks and in the cases that matter. No process is started."""

from __future__ import annotations

import random

import pytest

from distnb.cluster.generations import Generation
from distnb.cluster.local.elastic_members import Dismiss, ElasticMembers, End, Notify, Order, Publish, Start


@pytest.fixture(autouse=True)
def _validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_VALIDATE", "1")


def _members(n: int = 3, minimum: int = 2, ready: bool = True) -> ElasticMembers:
    members = ElasticMembers([f"cpu:{seat}" for seat in range(n)], minimum, 60.0)
    if ready:
        for number in range(n):
            assert members.ready(number, now=0.0) == []
    return members


def _published(orders: list[Order]) -> Generation:
    (generation,) = [order.generation for order in orders if isinstance(order, Publish)]
    return generation


def test_the_others_continue_and_a_new_process_joins() -> None:
    members = _members()
    left = _published(members.killed(1, now=10.0))
    assert (left.number, left.members, left.devices, left.lost) == (1, (0, 2), ("cpu:0", "cpu:2"), (1,))
    assert members.tick(now=10.5) == []
    assert members.deadline == 11.0
    assert members.tick(now=11.0) == [Start(number=3, seat=1)]
    joined = _published(members.ready(3, now=15.0))
    assert (joined.number, joined.members, joined.devices) == (2, (0, 2, 3), ("cpu:0", "cpu:2", "cpu:1"))


def test_too_few_wait_and_the_script_ends_after_the_limit() -> None:
    members = _members(2)
    waiting = _published(members.killed(0, now=10.0))
    assert (waiting.number, waiting.lost) == (0, (0,))  # the member that is left learns of the loss
    assert members.tick(now=11.0) == [Start(number=2, seat=0)]
    assert members.deadline == 70.0
    assert members.tick(now=70.0) == [End(0, "Fewer than 2 processes were left for 60 s.")]


def test_a_late_process_is_enough() -> None:
    members = _members(2)
    members.killed(0, now=10.0)
    members.tick(now=11.0)
    assert _published(members.ready(2, now=69.0)).members == (1, 2)
    assert members.deadline is None


@pytest.mark.parametrize("ready", [[], [0, 1]])
def test_a_loss_before_all_are_ready_ends_the_script(ready: list[int]) -> None:
    members = _members(ready=False)
    for number in ready:
        members.ready(number, now=0.0)
    assert members.killed(2, now=1.0) == [End(2)]


def test_errors_of_members_end_the_script_and_errors_of_new_processes_do_not() -> None:
    members = _members()
    members.killed(0, now=0.0)
    members.tick(now=1.0)
    assert members.failed(3, now=2.0) == []
    assert members.tick(now=100.0) == [Start(number=4, seat=0)]
    assert members.failed(1, now=101.0) == [End(1)]


def test_processes_that_end_again_and_again_are_not_started_for_ever() -> None:
    members = _members(2)
    members.killed(1, now=0.0)
    for number, now in ((2, 10.0), (3, 20.0)):
        assert members.tick(now=now) == [Start(number=number, seat=1)]
        assert members.killed(number, now=now) == []
    members.tick(now=30.0)
    notice, end = members.killed(4, now=31.0)
    assert isinstance(notice, Notify)
    assert end == End(4, "Fewer than 2 processes were left and no other can be started.")


def test_the_last_members_loss_ends_the_script_although_new_processes_set_up() -> None:
    members = _members(2, minimum=1)
    members.killed(0, now=0.0)
    members.tick(now=1.0)
    (end,) = members.killed(1, now=2.0)
    assert isinstance(end, End)
    assert "has the state of the training in memory" in end.reason


def test_after_the_training_a_loss_is_a_failure_and_new_processes_are_dismissed() -> None:
    members = _members()
    members.killed(0, now=0.0)
    members.tick(now=1.0)
    published, dismissed = members.done(1, now=2.0)
    assert isinstance(published, Publish)
    assert published.generation.finished
    assert dismissed == Dismiss((3,))
    assert members.done(2, now=2.0) == []
    assert members.killed(2, now=3.0) == [End(2)]


def test_the_script_ends_when_all_members_have() -> None:
    members = _members()
    assert members.succeeded(0, now=1.0) == members.succeeded(1, now=1.0) == []
    assert members.succeeded(2, now=1.0) == [End(None)]


@pytest.mark.parametrize("seed", range(30))
def test_random_walks_keep_the_invariants(seed: int) -> None:
    rng, now = random.Random(seed), 0.0
    members = _members(4, minimum=rng.randint(1, 4))
    running, last = set(range(4)), members.published
    for _ in range(60):
        now += rng.choice([0.1, 1.0, 5.0])
        number = rng.choice(sorted(running))
        event = rng.choice(["ready", "ready", "killed", "tick", "tick"])
        orders = members.tick(now=now) if event == "tick" else getattr(members, event)(number, now=now)
        if event == "killed":
            running.discard(number)
        if any(isinstance(order, End) for order in orders):
            return
        running |= {order.number for order in orders if isinstance(order, Start)}
        published = members.published
        assert published.number - last.number in (0, 1)
        assert set(published.members) <= running
        # Members keep their order, and new ones come last, so that rank 0 has the state.
        stayed = [each for each in last.members if each in published.members]
        assert list(published.members[: len(stayed)]) == stayed
        last = published
