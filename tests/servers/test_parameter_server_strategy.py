"""Training on real parameter servers: the numbers, the visible updates, and a lost server."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distnb
from distnb.coordinator import ClusterCoordinator
from distnb.errors import ProgramError, ServerLost
from distnb.notebook.compose import require
from tests.support import processes
from tests.support.processes import wait_until
from tests.support.sessions import pids_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    yield distnb.start(workers=2, ps=2)
    distnb.stop()


@pytest.fixture(scope="module")
def strategy(cluster: Any) -> Any:
    return distnb.ParameterServerStrategy()


@pytest.fixture(scope="module")
def coordinator(strategy: Any) -> ClusterCoordinator:
    return ClusterCoordinator(strategy)


def test_updates_of_several_workers_are_all_applied(strategy: Any, coordinator: ClusterCoordinator) -> None:
    """Run 200 closures that each add one, take a step of one, and count: none is lost or half applied."""
    with strategy.scope():
        counter = distnb.Variable(0, dtype=torch.int64)
        weight = nn.Parameter(torch.zeros(1000))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        seen = distnb.metrics.Sum()

    def closure() -> bool:
        counter.assign_add(1)
        weight.grad = torch.ones(1000)
        optimizer.step()
        seen.update(torch.tensor(1.0))
        return bool((weight == weight[0]).all())

    results = [coordinator.schedule(closure) for _ in range(200)]
    assert all(coordinator.fetch(results)), "a copy is never of two updates"
    coordinator.join()
    assert int(counter) == 200
    assert strategy.runtime.access.requests.read(
        strategy.runtime.access.represented.stored_of(weight)
    ).unique().tolist() == [-200.0]
    assert float(seen.compute()) == 200
    assert optimizer.iterations == 200
    assert {status.done > 0 for status in coordinator.status().workers} == {True}


def test_a_layer_may_be_replaced_while_functions_wait_that_use_it(
    strategy: Any, coordinator: ClusterCoordinator
) -> None:
    def forward(model: Any) -> int:
        time.sleep(0.01)
        return len(model(torch.ones(3)))

    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4))
    results = []
    for width in (4, 5, 6):
        results += [(width, coordinator.schedule(forward, args=(model,))) for _ in range(10)]
        with strategy.scope():
            model[0] = nn.Linear(3, width + 1)
        gc.collect()
    assert [value.fetch() for _, value in results] == [width for width, _ in results]
    coordinator.join()


def test_a_whole_program_runs_in_its_scope(strategy: Any, coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    """Check that the servers have the scope's objects by the first closure, `run` or step that needs them."""
    x = torch.ones(2, 2)

    def trained(schedule: Any, run: Any) -> list[list[float]]:
        torch.manual_seed(0)
        body = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
        seen = []

        def step() -> list[float]:
            optimizer.zero_grad()
            loss = body(x).sum()
            loss.backward()
            optimizer.step()
            return [loss.item()]

        seen += [schedule(step), schedule(step), run(step), step()]
        whole = nn.Sequential(body, nn.Linear(2, 1))
        another = torch.optim.SGD(whole.parameters(), lr=0.1)
        seen.append(schedule(lambda: whole(x).flatten().tolist()))
        whole(x).sum().backward()
        another.step()  # of a model that no closure has seen yet
        whole.append(nn.Linear(1, 1))
        seen.append(run(lambda: whole(x).flatten().tolist()))
        return seen

    with strategy.scope():
        found = trained(lambda fn: coordinator.schedule(fn).fetch(), strategy.run)
    expected = trained(lambda fn: fn(), lambda fn: fn())
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other)


def test_a_change_in_place_on_a_worker_is_an_error(strategy: Any, coordinator: ClusterCoordinator) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)

    def closure() -> None:
        with torch.no_grad():
            model.weight.zero_()

    coordinator.schedule(closure)
    with pytest.raises(ProgramError, match="changed weight in place on a worker"):
        coordinator.join()


def test_variables_are_restored_after_a_server_is_lost(
    cluster: Any, strategy: Any, coordinator: ClusterCoordinator, tmp_path: Path
) -> None:
    with strategy.scope():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        value = distnb.Variable(5.0)
    manager = distnb.CheckpointManager(distnb.Checkpoint(model=model, optimizer=optimizer, value=value), tmp_path)

    def closure() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).pow(2).sum().backward()
        optimizer.step()
        value.assign_add(1)

    def train() -> Any:
        for _ in range(5):
            coordinator.schedule(closure)
        coordinator.join()
        state = {name: each.clone() for name, each in model.state_dict().items()}
        return state, float(value), optimizer.iterations

    train()
    manager.save()
    lost = next(row for row in cluster.status() if row.task == "ps 0")
    os.kill(lost.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(ServerLost, match=r"server 0 .*recover"):
            train()
    with pytest.raises(ServerLost, match="recover"):
        coordinator.recover(manager)
    wait_until(lambda: "SIGKILL" in next(row for row in require().status() if row.task == "ps 0").state, 20, "its end")
    assert cluster.restart(missing=True) == (lost.engine,)
    processes.OF_MODULE.update(pids_of(cluster))
    with pytest.raises(ServerLost, match="replacement is empty"):
        coordinator.schedule(closure)
    coordinator.recover(manager)
    assert float(value) == 10
    assert optimizer.iterations == 5
    again = train()
    manager.checkpoint.restore(manager.latest_checkpoint)
    expected = train()
    assert again[1:] == expected[1:] == (15, 10)
    # The order of two workers is arbitrary, so only the weights are equal, approximately.
    assert torch.allclose(again[0]["weight"], expected[0]["weight"], atol=0.2)


def test_modes_are_sent_with_each_closure(coordinator: ClusterCoordinator) -> None:
    def modes() -> Any:
        return torch.get_default_dtype(), torch.is_grad_enabled()

    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            first = coordinator.schedule(modes)
    finally:
        torch.set_default_dtype(torch.float32)
    later = [coordinator.schedule(modes) for _ in range(6)]
    assert first.fetch() == (torch.float64, False)
    assert coordinator.fetch(later) == [(torch.float32, True)] * 6


def test_servers_use_the_current_environment_and_modules(
    cluster: Any, coordinator: ClusterCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use an optimizer of a user's module, and an environment variable, both newer than the cluster."""
    (tmp_path / "late_optimizers.py").write_text(
        "import os\nimport torch\nBACKEND = os.environ['LATE_BACKEND']\n\n\nclass Late(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n        super().step(closure)\n"
        "        for group in self.param_groups:\n            for each in group['params']:\n"
        "                self.state[each]['backend'] = BACKEND\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LATE_BACKEND", "torch")
    module = importlib.import_module("late_optimizers")
    with coordinator.strategy.scope():
        weight = nn.Parameter(torch.zeros(3))
        optimizer = module.Late([weight], lr=1.0)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["backend"] == "torch"
    monkeypatch.delitem(sys.modules, "late_optimizers")
