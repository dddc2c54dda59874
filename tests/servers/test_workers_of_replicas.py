"""Workers with two replicas each: a step equals one process's step, and replicas fail and come back together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distnb
from distnb.coordinator import ClusterCoordinator
from distnb.errors import MeanLossError, OptionError
from distnb.partitioners import FixedShardsPartitioner
from tests.support import processes
from tests.support.processes import wait_until
from tests.support.sessions import pids_of

os.environ.setdefault("KERAS_BACKEND", "torch")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    yield distnb.start(workers=2, ps=2, replicas_per_worker=2)
    distnb.stop()


@pytest.fixture(scope="module")
def strategy(cluster: Any) -> Any:
    return distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2))


@pytest.fixture(scope="module")
def coordinator(strategy: Any) -> ClusterCoordinator:
    return ClusterCoordinator(strategy)


def test_each_worker_is_a_team_of_replicas(cluster: Any, strategy: Any, coordinator: ClusterCoordinator) -> None:
    assert [row.task for row in cluster.status()] == ["worker 0", "worker 0", "worker 1", "worker 1", "ps 0", "ps 1"]
    assert strategy.num_replicas_in_sync == 2
    # The first program may be one that is not a closure, which runs on all workers' replicas.
    assert distnb.MirroredStrategy().run(lambda: strategy.num_replicas_in_sync) == 4

    def who() -> Any:
        both = strategy.run(lambda: distnb.replica_id())
        return torch.distributed.get_world_size(), both, [distnb.replica_id()]

    results = [coordinator.schedule(who) for _ in range(8)]
    for size, both, first in coordinator.fetch(results):
        assert (size, both.values, first) == (2, (0, 1), [0]), "a result has all components; its value is replica 0's"
    assert {each.done > 0 for each in coordinator.status().workers} == {True}
    assert distnb.MirroredStrategy().run(lambda: strategy.num_replicas_in_sync) == 4
    assert coordinator.schedule(lambda: strategy.num_replicas_in_sync).fetch() == 2


@pytest.mark.parametrize("sparse", [False, True])
def test_workers_of_replicas_train_like_one_process(
    strategy: Any, coordinator: ClusterCoordinator, sparse: bool
) -> None:
    """Use a sharded table, some of whose rows only one replica uses, and an uneven last batch."""

    def build() -> Any:
        torch.manual_seed(3)
        table = nn.Embedding(50, 8, sparse=sparse)
        dense = nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
        kind = torch.optim.SGD if sparse else torch.optim.Adam
        return table, dense, kind([*table.parameters(), *dense.parameters()], lr=0.05)

    drawn = torch.Generator().manual_seed(0)
    ids, wanted = torch.randint(0, 50, (29, 4), generator=drawn), torch.randn(29, 1, generator=drawn)
    batches = [(ids[begin : begin + 8], wanted[begin : begin + 8]) for begin in range(0, 29, 8)]

    table, dense, optimizer = build()
    expected = []
    for one_ids, one_wanted in batches * 3:
        optimizer.zero_grad()
        loss = ((dense(table(one_ids)) - one_wanted) ** 2).mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    with strategy.scope():
        its_table, its_dense, its_optimizer = build()
        seen = distnb.metrics.Sum()

    def step(batch: Any) -> Any:
        own_ids, own_wanted = batch
        its_optimizer.zero_grad()
        loss = distnb.nn.compute_average_loss(((its_dense(its_table(own_ids)) - own_wanted) ** 2).squeeze(1))
        loss.backward()
        its_optimizer.step()
        seen.update(torch.tensor(float(len(own_ids))))
        return loss

    def closure(iterator: Any) -> float:
        losses = strategy.run(step, args=(next(iterator),))
        return float(strategy.reduce("sum", losses, axis=None))

    def dataset() -> Any:
        def endless() -> Iterator[Any]:
            while True:
                yield from batches

        return strategy.distribute_dataset(endless())

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    # One after another: the iterator's worker takes them all.
    found = [coordinator.fetch(coordinator.schedule(closure, args=(iterator,))) for _ in expected]
    assert found == pytest.approx(expected, rel=1e-4)
    coordinator.join()
    assert its_optimizer.iterations == len(expected)
    assert float(seen.compute()) == 29 * 3
    ours, plain = its_dense.state_dict(), dense.state_dict()
    torch.testing.assert_close({name: ours[name] for name in plain}, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.as_tensor(its_table.state_dict()["weight"]), table.weight.data, rtol=1e-4, atol=1e-5
    )


def worker_of() -> int:
    from distnb.servers.coordinator.references import current_worker

    return current_worker()


def test_variables_are_assigned_once(strategy: Any, coordinator: ClusterCoordinator) -> None:
    with strategy.scope():
        outside, nothing = distnb.Variable(0.0), distnb.Variable(0.0)
        total = distnb.Variable(0.0, aggregation="sum")
        rows = distnb.Variable(torch.zeros(4, 2), aggregation="sum")

    def inside() -> None:
        total.assign_add(1.0 + distnb.replica_id())
        rows.scatter_add(torch.tensor([distnb.replica_id()]), torch.ones(1, 2))

    def closure() -> None:
        outside.assign_add(1.0)
        strategy.run(inside)

    for _ in range(6):
        coordinator.schedule(closure)
    coordinator.join()
    assert (float(outside), float(total)) == (6.0, 18.0)
    assert rows.numpy().tolist() == [[6.0, 6.0], [6.0, 6.0], [0.0, 0.0], [0.0, 0.0]]
    coordinator.schedule(lambda: strategy.run(lambda: nothing.assign(1.0)))
    with pytest.raises(OptionError, match="aggregation"):
        coordinator.join()


def test_a_model_may_change_and_keras_metrics_count_the_rows_of_each_replica(
    strategy: Any, coordinator: ClusterCoordinator
) -> None:
    keras = pytest.importorskip("keras")
    torch.manual_seed(3)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 2))
        mean = keras.metrics.Mean()
    plain = nn.Sequential(nn.Linear(3, 2))
    plain.load_state_dict(model.state_dict())
    batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))  # the same one on both workers

    def train(optimizer: Any, expected: Any) -> None:
        def step(x: Any) -> None:
            optimizer.zero_grad()
            distnb.nn.compute_average_loss(model(x).square().mean(dim=1)).backward()
            optimizer.step()
            mean.update_state(x.sum(dim=1))

        iterator = iter(coordinator.create_per_worker_dataset(lambda: strategy.distribute_dataset([batch] * 2)))
        for _ in range(2):
            coordinator.fetch(coordinator.schedule(lambda it: strategy.run(step, args=(next(it),)), args=(iterator,)))
            expected.zero_grad()
            plain(batch).square().mean().backward()
            expected.step()

    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(optimizer, torch.optim.SGD(plain.parameters(), lr=0.1))
    plain[0] = nn.Linear(3, 4)
    with strategy.scope():
        model[0] = nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.load_state_dict(model.state_dict())
    train(optimizer, torch.optim.SGD(plain.parameters(), lr=0.1))
    coordinator.join()
    for name, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-6), name
    assert float(mean.count) == 20
    assert float(mean.result()) == pytest.approx(float(batch.sum(dim=1).mean()), abs=1e-6)


def test_a_failing_replica_ends_the_closure(strategy: Any, coordinator: ClusterCoordinator) -> None:
    def closure() -> None:
        if distnb.replica_id() == 1:
            raise KeyError("only here")
        torch.distributed.barrier()

    coordinator.schedule(closure)
    with pytest.raises(KeyError, match="only here"):
        coordinator.join()
    assert coordinator.fetch([coordinator.schedule(lambda: 1) for _ in range(4)]) == [1] * 4

    with strategy.scope():
        weight = nn.Parameter(torch.ones(3))

    coordinator.schedule(lambda: strategy.run(lambda: (weight * torch.ones(4, 3)).mean().backward()))
    with pytest.raises(MeanLossError):
        coordinator.join()


def test_a_killed_replica_ends_its_worker_and_the_closure_runs_elsewhere(
    cluster: Any, strategy: Any, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    """Check that its worker is lost, the closure runs elsewhere and counts once, and the whole worker comes back."""
    with strategy.scope():
        counter = distnb.Variable(0.0)
        weight = nn.Parameter(torch.zeros(5))
        optimizer: Any = torch.optim.SGD([weight], lr=1.0)
    began = tmp_path / "began"

    def inside() -> None:
        optimizer.zero_grad()
        (weight.sum() / distnb.get_strategy().num_replicas_in_sync).backward()
        optimizer.step()

    def closure(slow: bool) -> None:
        counter.assign_add(1.0)
        strategy.run(inside)
        if slow and not began.exists():
            torch.distributed.barrier()
            if distnb.replica_id() == 0:
                began.write_text(str(worker_of()))
            time.sleep(60)

    coordinator.schedule(closure, args=(True,))
    wait_until(lambda: began.exists() and bool(began.read_text()), 30)
    lost = int(began.read_text())
    victim = 2 * lost + 1  # its second replica
    os.kill(cluster.status()[victim].pid, signal.SIGKILL)
    coordinator.join()
    assert float(counter) == 1.0
    assert optimizer.iterations == 1
    assert weight.tolist() == [-1.0] * 5
    assert [each.state for each in coordinator.status().workers].count("lost") == 1

    values = coordinator.create_per_worker_value(lambda: iter(range(1000)))
    for _ in range(4):
        coordinator.schedule(lambda it: next(it), args=(values,))
    coordinator.join()
    cluster.restart(missing=True)
    processes.OF_MODULE.update(pids_of(cluster))
    wait_until(lambda: all(each.state != "lost" for each in coordinator.status().workers), 30)

    def both(it: Any) -> Any:
        strategy.run(inside)
        return strategy.run(lambda: next(it)), worker_of()

    found = coordinator.fetch([coordinator.schedule(both, args=(values,)) for _ in range(8)])
    assert {worker for _, worker in found} == {0, 1}
    assert all(isinstance(number, int) for number, _ in found), "both replicas of a worker are at the same place"
    coordinator.join()
    assert optimizer.iterations == 9
    assert weight.tolist() == [-9.0] * 5
