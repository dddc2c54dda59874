"""Closures whose workers are lost, replaced or stopped: each ends once, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

import distnb
from distnb.coordinator import ClusterCoordinator, RemoteValue
from distnb.errors import ClosureCancelled, NoClusterError
from distnb.notebook.compose import require
from tests.multiprocess.coordinators import OnTwoWorkers
from tests.processes import wait_until

pytestmark = pytest.mark.timeout(120)
_WITHIN_S = 40.0


@pytest.fixture
def coordinator() -> Iterator[ClusterCoordinator]:
    distnb.start(2)
    try:
        yield ClusterCoordinator(OnTwoWorkers())
    finally:
        distnb.stop()


def whoami() -> int:
    return os.getpid()


def test_a_killed_workers_closures_run_elsewhere(coordinator: ClusterCoordinator) -> None:
    made = coordinator.create_per_worker_value(lambda: os.getpid())

    def slow(own: int) -> tuple[int, int]:
        time.sleep(0.05)
        return own, os.getpid()

    before = coordinator.status().retried
    values = [coordinator.schedule(slow, args=(made,)) for _ in range(30)]
    wait_until(lambda: sum(value.ended for value in values) >= 4, _WITHIN_S)
    os.kill(require().status()[0].pid, signal.SIGKILL)
    coordinator.join()
    found = coordinator.fetch(values)
    assert all(own == pid for own, pid in found)
    assert len({pid for _, pid in found}) == 2
    assert 1 <= coordinator.status().retried - before <= 2
    assert coordinator.status().workers[0].state == "lost"
    require().restart(missing=True)
    assert coordinator.status().workers[0].state == "idle"
    found = coordinator.fetch([coordinator.schedule(slow, args=(made,)) for _ in range(6)])
    assert len({pid for _, pid in found}) == 2
    assert all(own == pid for own, pid in found)


def test_with_all_workers_gone_it_says_so_and_goes_on_when_one_comes(
    coordinator: ClusterCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in require().status():
        os.kill(row.pid, signal.SIGKILL)
    wait_until(lambda: all(each.state == "lost" for each in coordinator.status().workers), _WITHIN_S)
    values = [coordinator.schedule(whoami) for _ in range(5)]
    assert capsys.readouterr().err.count("no worker is there") == 1
    require().restart([0])
    coordinator.join()
    assert len(set(coordinator.fetch(values))) == 1
    require().restart(missing=True)
    assert len({coordinator.schedule(lambda: (time.sleep(0.05), os.getpid())[1]) for _ in range(4)}) == 4
    coordinator.join()


def test_a_restart_of_busy_workers_loses_nothing(coordinator: ClusterCoordinator) -> None:
    values = [coordinator.schedule(lambda n: (time.sleep(0.05), n)[1], args=(n,)) for n in range(12)]
    require().restart()
    assert coordinator.fetch(values) == list(range(12))


def test_the_end_of_the_cluster_ends_a_join(coordinator: ClusterCoordinator) -> None:
    value: RemoteValue = coordinator.schedule(time.sleep, args=(60,))
    threading.Timer(0.3, distnb.stop).start()
    with pytest.raises(NoClusterError, match="was stopped"):
        coordinator.join()
    with pytest.raises(ClosureCancelled, match="the cluster was stopped"):
        value.fetch()
    with pytest.raises(NoClusterError):
        coordinator.schedule(whoami)
