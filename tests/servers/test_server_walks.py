"""Random walks of a coordinator, workers and servers in this process: late messages, kills, stops, cancellations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from distnb.servers.coordinator import coordinator, queue
from distnb.servers.variables import roles
from distnb.servers.variables.here import servers_here
from tests.support.server_walks import Walk
from tests.support.simulated_cluster import SimulatedCluster, SimulatedWaiter

SHORT = range(4)
LONG = range(4, 604)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], SimulatedCluster]]:
    made = []

    def make(seed: int) -> SimulatedCluster:
        for each in made:
            each.close()
        made[:] = [SimulatedCluster(seed, workers=2, servers=2)]
        SimulatedWaiter.world = made[0]
        monkeypatch.setattr(servers_here, "link", lambda: made[0].link)
        monkeypatch.setattr(servers_here, "access", None)
        monkeypatch.setattr(roles, "_runtimes", {})
        return made[0]

    monkeypatch.setattr(servers_here, "require", lambda resolver: None)
    monkeypatch.setattr(coordinator, "Waiter", SimulatedWaiter)
    monkeypatch.setattr(queue, "_PATIENCE_S", 0.0)
    yield make
    for each in made:
        each.close()


def walk(make: Callable[[int], SimulatedCluster], seed: int, length: int) -> None:
    torch.manual_seed(seed)
    story = None
    try:
        story = Walk(seed, make(seed))
        story.run(length)
    except BaseException as error:
        if story is not None:
            error.add_note(f"seed {seed}: " + ", ".join(story.story[-40:]))
        raise


@pytest.mark.parametrize("seed", SHORT)
def test_counts_are_exact_in_a_random_walk(simulated: Any, seed: int) -> None:
    walk(simulated, seed, 40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_counts_are_exact_in_many_random_walks(simulated: Any) -> None:
    for seed in LONG:
        walk(simulated, seed, 60)
