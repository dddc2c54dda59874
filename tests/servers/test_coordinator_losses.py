"""Closures whose workers are lost, replaced or stopped: each ends once, and nothing waits forever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

import distnb
from distnb.coordinator import ClusterCoordinator, RemoteValue
from distnb.errors import ClosureCancelled, NoClusterError, OptionError, ServerLost
from distnb.notebook import engines as session_engines
from distnb.notebook.compose import current, require
from distnb.servers.server_messages import Create, Describe
from tests.servers.test_coordinator import while_waiting
from tests.support import processes
from tests.support.processes import wait_until
from tests.support.sessions import pids_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
_WITHIN_S = 40.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    distnb.start(workers=2, ps=2)
    yield
    distnb.stop()


@pytest.fixture
def coordinator(cluster: None) -> Iterator[ClusterCoordinator]:
    yield ClusterCoordinator(distnb.ParameterServerStrategy())
    if (session := current()) is not None:
        processes.OF_MODULE.update(pids_of(session))


def whoami() -> int:
    return os.getpid()


def test_closures_of_a_killed_worker_run_elsewhere(coordinator: ClusterCoordinator) -> None:
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
    assert 1 <= coordinator.status().retried - before <= 3
    status = coordinator.status()
    assert status.workers[0].state == "lost"
    assert sum(each.done for each in status.workers) == status.done
    require().restart(missing=True)
    assert coordinator.status().workers[0].state == "idle"
    found = coordinator.fetch([coordinator.schedule(slow, args=(made,)) for _ in range(6)])
    assert len({pid for _, pid in found}) == 2
    assert all(own == pid for own, pid in found)


def test_without_workers_a_notice_appears_and_work_resumes_when_one_joins(
    coordinator: ClusterCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    for row in require().status()[:2]:
        os.kill(row.pid, signal.SIGKILL)
    wait_until(lambda: all(each.state == "lost" for each in coordinator.status().workers), _WITHIN_S)
    values = [coordinator.schedule(whoami) for _ in range(5)]
    assert capsys.readouterr().err.count("no worker is there to run them") == 1
    require().restart([0])
    coordinator.join()
    assert len(set(coordinator.fetch(values))) == 1
    require().restart(missing=True)
    assert len({coordinator.schedule(lambda: (time.sleep(0.05), os.getpid())[1]) for _ in range(4)}) == 4
    coordinator.join()


def test_a_restart_of_busy_workers_loses_no_closure(coordinator: ClusterCoordinator) -> None:
    values = [coordinator.schedule(lambda n: (time.sleep(0.05), n)[1], args=(n,)) for n in range(12)]
    require().restart([0, 1])
    assert coordinator.fetch(values) == list(range(12))


def test_a_lost_server_is_an_error_at_once_until_it_is_replaced(coordinator: ClusterCoordinator) -> None:
    servers = coordinator._link.servers
    create = Create(shard=(1, 0), name="v", value=torch.ones(2))
    servers.exchange({0: [create], 1: [create]})
    assert coordinator.schedule(whoami).fetch() in {row.pid for row in require().status()[:2]}
    running = coordinator.schedule(time.sleep, args=(60,))
    wait_until(lambda: running.state == "running", _WITHIN_S)
    os.kill(require().status()[3].pid, signal.SIGKILL)
    with pytest.raises(ServerLost, match=r"Parameter server 1 .*checkpoint"):
        coordinator.join()
    with pytest.raises(ClosureCancelled, match="Parameter server 1"):
        running.fetch()
    for _ in range(2):
        with pytest.raises(ServerLost, match="Parameter server 1"):
            coordinator.schedule(whoami)
    with pytest.raises(ServerLost):
        servers.exchange({1: [Describe()]})
    assert coordinator.status().lost_servers == (1,)
    require().restart(missing=True)
    with pytest.raises(ServerLost, match="Its replacement is empty"):
        coordinator.schedule(whoami)
    coordinator.recover(lambda: None)
    assert servers.exchange({0: [Describe()], 1: [Describe()]})[1] == ((),)
    assert coordinator.schedule(whoami).fetch()
    coordinator.join()


def test_workers_are_added_and_removed_while_closures_run(coordinator: ClusterCoordinator) -> None:
    session, strategy = require(), coordinator.strategy
    session.restart(missing=True)
    with strategy.scope():
        total = distnb.Variable(0.0)

    def add(seconds: float) -> int:
        time.sleep(seconds)
        total.assign_add(1.0)
        return os.getpid()

    def workers() -> int:
        return len({task for task in session.tasks.values() if task.computes})

    assert session.resize(1).removed == (1,)
    assert workers() == 1
    values = [coordinator.schedule(add, args=(0.4,)) for _ in range(8)]
    assert session.resize(workers=3, ps=2).added == (1, 4)
    assert {str(session.tasks[engine]) for engine in (1, 4)} == {"worker 1", "worker 2"}
    wait_until(lambda: sum(each.state == "running" for each in coordinator.status().workers) == 3, _WITHIN_S)
    coordinator.join()
    assert len(set(coordinator.fetch(values))) == 3
    assert float(total) == 8.0
    before = coordinator.status().retried
    values = [coordinator.schedule(add, args=(0.4,)) for _ in range(6)]
    wait_until(lambda: sum(each.state == "running" for each in coordinator.status().workers) == 3, _WITHIN_S)
    session.resize(1)
    coordinator.join()
    assert len(set(coordinator.fetch(values))) <= 3
    assert coordinator.status().retried > before
    assert [each.worker for each in coordinator.status().workers] == [0]
    assert float(total) == 14.0
    session.resize(2)
    with pytest.raises(OptionError, match="ps=1: the cluster has 2 parameter servers, and their number is fixed"):
        session.resize(2, ps=1)
    with pytest.raises(OptionError, match="give one of the two"):
        session.resize(2, workers=2)


def test_a_worker_that_is_added_later_is_one_more_pipeline(coordinator: ClusterCoordinator) -> None:
    def pipeline(context: distnb.InputContext) -> list[tuple[int, int]]:
        return [(context.input_pipeline_id, context.num_input_pipelines)] * 100

    session = require()
    batches = iter(coordinator.create_per_worker_dataset(pipeline))
    session.resize(3)

    def read(batches: Iterator[tuple[int, int]]) -> tuple[int, int]:
        time.sleep(0.2)
        return next(batches)

    found = coordinator.fetch([coordinator.schedule(read, args=(batches,)) for _ in range(9)])
    assert set(found) == {(0, 2), (1, 2), (2, 3)}


def test_the_end_of_the_cluster_ends_a_join(coordinator: ClusterCoordinator) -> None:
    value: RemoteValue = coordinator.schedule(time.sleep, args=(60,))
    while_waiting(coordinator, distnb.stop)
    with pytest.raises(NoClusterError, match="was stopped"):
        coordinator.join()
    with pytest.raises(ClosureCancelled, match="the cluster was stopped"):
        value.fetch()
    with pytest.raises(NoClusterError):
        coordinator.schedule(whoami)


def test_closures_reach_workers_over_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    make = session_engines.Switchboard
    monkeypatch.setattr(
        session_engines, "Switchboard", lambda path, **given: make(path, **{**given, "host": "127.0.0.1"})
    )
    distnb.start(workers=2, ps=1)
    try:
        coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())
        values = [coordinator.schedule(lambda x: x * 2, args=(torch.full((50_000,), float(n)),)) for n in range(200)]
        assert [value[0].item() for value in coordinator.fetch(values)] == [2.0 * n for n in range(200)]
        slow = [coordinator.schedule(lambda n: (time.sleep(0.05), n)[1], args=(n,)) for n in range(12)]
        os.kill(require().status()[0].pid, signal.SIGKILL)
        assert coordinator.fetch(slow) == list(range(12))
        require().restart(missing=True)
        pids = coordinator.fetch([coordinator.schedule(lambda: (time.sleep(0.1), os.getpid())[1]) for _ in range(6)])
        assert len(set(pids)) == 2
    finally:
        distnb.stop()
