"""The ownership of a cluster, in the cases that matter and by random walks against a model. No process is started."""

from __future__ import annotations

import random

import pytest

from distnb.detached.ownership import EndCluster, Grant, Order, Ownership, Refuse, Release

A, B, C, D = range(4)
LIMIT = "it reached its limit"


@pytest.fixture(autouse=True)
def _validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_VALIDATE", "1")


def _owned(ends: float | None = None) -> Ownership:
    """Return a cluster that A has started and owns."""
    owned = Ownership(A, "a", ends, LIMIT)
    assert owned.started(now=0.0) == []
    return owned


def test_the_owner_leaves_and_the_next_client_is_granted() -> None:
    owned = _owned()
    assert owned.connected(B, "b", False, now=1.0) == [Refuse(B, "owned", "a")]
    assert owned.left(A, now=2.0) == []
    assert (owned.owner, owned.who) == (None, "")
    assert owned.connected(B, "b", False, now=3.0) == [Grant(B)]
    assert (owned.owner, owned.who) == (B, "b")


def test_a_taker_is_granted_when_the_owner_has_left() -> None:
    owned = _owned()
    assert owned.connected(B, "b", True, now=1.0) == [Release(A, "b")]
    assert owned.deadline == 16.0
    assert owned.left(A, now=2.0) == [Grant(B)]
    assert owned.deadline is None


def test_of_two_takers_the_first_is_granted_and_the_other_refused() -> None:
    owned = _owned()
    assert owned.connected(B, "b", True, now=1.0) == [Release(A, "b")]
    assert owned.connected(C, "c", True, now=1.0) == [], "the owner was asked already"
    assert owned.left(A, now=2.0) == [Grant(B), Refuse(C, "taken", "b")]
    assert owned.connected(C, "c", True, now=3.0) == [Release(B, "c")]


def test_a_taker_that_has_gone_is_never_granted() -> None:
    owned = _owned()
    owned.connected(B, "b", True, now=1.0)
    assert owned.left(B, now=2.0) == []
    assert owned.left(A, now=3.0) == []
    assert owned.connected(C, "c", False, now=4.0) == [Grant(C)]


def test_an_owner_that_is_silent_refuses_its_takers_and_may_leave_later() -> None:
    owned = _owned()
    owned.connected(B, "b", True, now=1.0)
    assert owned.tick(now=15.9) == []
    assert owned.tick(now=16.0) == [Refuse(B, "silent", "a")]
    assert owned.connected(C, "c", True, now=20.0) == [], "it will leave as soon as it can"
    assert owned.left(A, now=21.0) == [Grant(C)]


def test_a_cluster_that_starts_ends_with_its_owner_and_cannot_be_taken() -> None:
    starting = Ownership(A, "a")
    assert starting.connected(B, "b", True, now=1.0) == [Refuse(B, "starting", "a")]
    (end,) = starting.left(A, now=2.0)
    assert isinstance(end, EndCluster)
    assert starting.connected(B, "b", False, now=3.0) == [Refuse(B, "ended", end.why)]


def test_the_time_limit_ends_the_cluster_and_refuses_takers() -> None:
    owned = _owned(ends=10.0)
    owned.connected(B, "b", True, now=1.0)
    assert owned.deadline == 10.0
    assert owned.tick(now=10.0) == [Refuse(B, "ended", LIMIT), EndCluster(LIMIT)]
    assert owned.owner == A, "it is notified of the end"
    assert (owned.stopped("again", now=11.0), owned.left(A, now=11.0), owned.deadline) == ([], [], None)


class _Model:
    """The view of the clients: those that are connected, that wait for an answer, and that own the cluster."""

    def __init__(self, owned: Ownership) -> None:
        self.owned = owned
        self.connected = {A}
        self.owners = {A}
        self.waiting: dict[int, float] = {}
        self.asked_to_leave: set[int] = set()
        self.started = self.ended = False

    def follow(self, orders: list[Order], now: float) -> None:
        for order in orders:
            if isinstance(order, EndCluster):
                assert not self.ended
                self.ended = True
                continue
            client = order.client
            assert client in self.connected, "an order to a client that has gone"
            if isinstance(order, Release):
                assert self.started, "the owner of a cluster that starts would end it"
                assert self.owners == {client}
                assert client not in self.asked_to_leave
                self.asked_to_leave.add(client)
                continue
            asked = self.waiting.pop(client)  # each request is answered once
            assert now - asked <= 15.0
            if isinstance(order, Grant):
                assert not self.owners
                assert not self.ended
                self.owners = {client}

    def left(self, client: int) -> None:
        self.connected.discard(client)
        self.waiting.pop(client, None)
        self.owners.discard(client)


@pytest.mark.parametrize("seed", range(200))
def test_random_connections_takes_deaths_and_stops(seed: int) -> None:
    rng, now, number = random.Random(seed), 0.0, A
    ends = rng.choice([None, 100.0])
    owned = Ownership(A, "0", ends, LIMIT)
    model = _Model(owned)
    for _ in range(80):
        step = rng.choice([0.0, 1.0, 6.0])
        if owned.deadline is not None:  # the caller never sleeps for longer
            step = min(step, owned.deadline - now)
        now += step
        event = rng.choices(
            ["connect", "take", "leave", "owner leaves", "tick", "start", "stop"], [8, 16, 10, 4, 8, 8, 0.2]
        )[0]
        if event in ("connect", "take"):
            number += 1
            model.connected.add(number)
            model.waiting[number] = now
            free = not (model.owners or model.ended)
            orders = owned.connected(number, str(number), event == "take", now=now)
            assert not free or orders == [Grant(number)]
        elif event in ("leave", "owner leaves") and model.connected:
            client = rng.choice(sorted((event == "owner leaves" and model.owners) or model.connected))
            model.left(client)
            orders = owned.left(client, now=now)
        elif event == "start":
            model.started = True
            orders = owned.started(now=now)
        elif event == "stop":
            orders = owned.stopped("stopped", now=now)
        else:
            orders = owned.tick(now=now)
        model.follow(orders, now)
        if not model.ended:
            assert model.started or model.owners, "nobody would end a cluster that starts"
            assert {owned.owner} == (model.owners or {None})
            assert ends is None or now < ends or event != "tick"
        assert not model.ended or not model.waiting
        assert not model.waiting or model.owners == model.asked_to_leave & model.connected
    # Whatever happened, each taker gets its answer in time.
    while model.waiting:
        now = owned.deadline or pytest.fail("takers would wait for ever")
        model.follow(owned.tick(now=now), now)
