"""Checkpoints of parameter servers: restored under other strategies and other numbers of servers, and vice versa."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import distnb
from distnb.partitioners import FixedShardsPartitioner
from tests.support.ranks import run_ranks
from tests.tf_programs.matrix import WAYS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

# Two steps, a checkpoint, and two more. All earlier checkpoints are restored, and training continues equally from each.
PROGRAM = """
import os
import torch
import distnb

IDS = torch.arange(24).reshape(8, 3) % 7
WANTED = torch.linspace(-1, 1, 8, dtype=torch.float64)

class Training:
    def __init__(self, strategy, seed, coordinator=None):
        torch.manual_seed(seed)
        self.strategy, self.coordinator = strategy, coordinator
        with strategy.scope():
            self.model = torch.nn.Sequential(
                torch.nn.EmbeddingBag(7, 4, dtype=torch.float64), torch.nn.Linear(4, 4, dtype=torch.float64),
                torch.nn.BatchNorm1d(4, dtype=torch.float64), torch.nn.Linear(4, 1, dtype=torch.float64),
            )
            self.adam = torch.optim.Adam([*self.model[0].parameters(), *self.model[1].parameters()], lr=0.05)
            self.sgd = torch.optim.SGD(self.model[3].parameters(), lr=0.05, momentum=0.9)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.sgd, 3, 0.1)
            self.count = distnb.Variable(0, dtype=torch.int64)
            self.table = distnb.Variable(torch.zeros(7, 2, dtype=torch.float64))
        self.model[2].eval()
        self.checkpoint = distnb.Checkpoint(
            model=self.model, optimizers=[self.adam, self.sgd], schedule=self.schedule,
            variables=dict(count=self.count, table=self.table),
        )

    def go_on(self, steps):
        model, optimizers, wanted = self.model, (self.adam, self.sgd), WANTED
        def train(batch):
            loss = distnb.nn.compute_average_loss((model(batch[0])[:, 0] - batch[1]) ** 2)
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            for each in optimizers:
                each.step()
        for _ in range(steps):
            if self.coordinator is None:
                dataset = torch.utils.data.TensorDataset(IDS, WANTED)
                for batch in self.strategy.distribute_dataset(torch.utils.data.DataLoader(dataset, batch_size=8)):
                    self.strategy.run(train, args=(batch,))
            else:
                self.coordinator.schedule(train, args=((IDS, WANTED),))
                self.coordinator.join()
            self.schedule.step()
            self.count.assign_add(1)
            self.table.assign_add(torch.ones(7, 2, dtype=torch.float64))

    def state(self):
        kept = [each.state_dict()["state"][0] for each in (self.adam, self.sgd)]
        weights = {name: each.tolist() for name, each in self.model.state_dict().items()}
        return dict(
            weights=weights, adam=[float(kept[0]["step"]), kept[0]["exp_avg"].tolist()],
            sgd=kept[1]["momentum_buffer"].tolist(), lr=self.sgd.param_groups[0]["lr"], count=int(self.count),
            table=self.table.read_value().tolist(),
        )

def run(strategy, folder, way, others, coordinator=None):
    result = {"restored": {}}
    for other in others:
        again = Training(strategy, 5, coordinator)
        again.go_on(1)
        again.checkpoint.restore(os.path.join(folder, other))
        again.go_on(2)
        result["restored"][other] = again.state()
    training = Training(strategy, 3, coordinator)
    training.go_on(2)
    path = training.checkpoint.write(os.path.join(folder, way))
    training.go_on(2)
    before = training.state()
    with strategy.scope():
        others = {
            "optimizers": [torch.optim.SGD(training.adam.param_groups[0]["params"], lr=0.1), training.sgd],
            "model": torch.nn.Sequential(torch.nn.EmbeddingBag(6, 4, dtype=torch.float64), torch.nn.Linear(4, 2)),
            "variables": {"count": training.count, "table": distnb.Variable(torch.zeros(6, 2, dtype=torch.float64))},
        }
    for name, other in others.items():
        try:
            distnb.Checkpoint(schedule=training.schedule, **{name: other}).restore(path)
            raise AssertionError(f"{name} was restored")
        except distnb.errors.CheckpointMismatchError as error:
            assert f"  {name}" in str(error), error
    assert training.state() == before
    return result | {"state": before}
"""


@contextmanager
def servers(count: int) -> Iterator[Any]:
    distnb.start(workers=1, ps=count)
    try:
        yield
    finally:
        distnb.stop()


def trained(way: str, folder: str, others: list[str]) -> dict[str, Any]:
    if not way.startswith("servers"):
        text = f"{PROGRAM}\nresult = run({WAYS[way].made}, {folder!r}, {way!r}, {others!r})"
        results = [each.check().result for each in run_ranks(text, WAYS[way].replicas, timeout_s=120)]
        assert all(each == results[0] for each in results)
        return dict(results[0])
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(int(way[-1])))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(PROGRAM, names)
    return dict(names["run"](strategy, folder, way, others, distnb.coordinator.ClusterCoordinator(strategy)))


def close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(one == pytest.approx(other, abs=1e-9))


@pytest.mark.filterwarnings("error:for 0.weight")
def test_shards_are_restored_into_other_numbers_and_strategies(tmp_path: Path) -> None:
    with servers(3):
        check(tmp_path, ["servers_1", "mirrored_2", "servers_3"])


@pytest.mark.soak
@pytest.mark.filterwarnings("error:for 0.weight")
def test_every_pair_of_strategies_exchanges_checkpoints(tmp_path: Path) -> None:
    """Restore under every strategy; the first one again for what the last ones saved."""
    ways = ["servers_1", "servers_3", "servers_2", "default", "mirrored_2", "central_2", "servers_1"]
    check(tmp_path, ways, clusters_of_their_own=True)


def check(folder: Path, ways: list[str], *, clusters_of_their_own: bool = False) -> None:
    """Restore in each way what the earlier ones saved."""
    saved: list[str] = []
    expected: Any = None
    for way in ways:
        again = way in saved
        own = servers(int(way[-1])) if clusters_of_their_own and way.startswith("servers") else nullcontext()
        with own:
            others = [f"../{each}" if again else each for each in saved]
            result = trained(way, str(folder / ("again" if again else "")), others)
        expected = expected or result["state"]
        assert expected["count"] == 4
        assert close(result["state"], expected), way
        for other, state in result["restored"].items():
            assert close(state, expected), f"saved under {other}, restored under {way}"
        saved.append(way)
