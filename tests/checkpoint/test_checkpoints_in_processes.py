"""Checkpoints saved under any strategy and number of replicas, restored under any other, with kills while saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel import Notebook
from tests.support.ranks import run_ranks
from tests.support.tasks import Tasks
from tests.tf_programs.matrix import WAYS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]
LIMIT_S = 120.0

# Half of an epoch, a checkpoint, the rest of the epoch, and another checkpoint. All earlier checkpoints are restored, and
# training continues equally from each.
TRAINING = """
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

X = torch.linspace(-1, 1, 22, dtype=torch.float64)[:, None] * torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
Y = (X * X).sum(1)

class Training:
    def __init__(self, seed):
        torch.manual_seed(seed)
        with strategy.scope():
            self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
            self.step = distnb.Variable(0, dtype=torch.int64)
            on_read = {{"synchronization": "on_read", "dtype": torch.float64}}
            self.seen = distnb.Variable(0.0, aggregation="sum", **on_read)
            self.level = distnb.Variable(0.0, aggregation="mean", **on_read)
            self.first = distnb.Variable(-1.0, aggregation="only_first_replica", **on_read)
            self.mean = distnb.metrics.Mean()
        loader = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True)
        # The default strategy leaves a DataLoader unchanged, which does not report its position.
        reader = distnb.OneDeviceStrategy("cpu:0") if strategy is distnb.get_strategy() else strategy
        self.dataset = reader.distribute_dataset(loader)
        self.checkpoint = distnb.Checkpoint(
            model=self.model, optimizer=self.optimizer, schedule=self.schedule, data=self.dataset, mean=self.mean,
            variables={{"step": self.step, "counts": [self.seen, self.level, self.first]}},
        )

    def train(self, batch):
        loss = distnb.nn.compute_average_loss((self.model(batch[0])[:, 0] - batch[1]) ** 2)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seen.assign_add(float(len(batch[0])))
        self.level.assign(2.0)
        self.mean.update(batch[1])
        self.first.assign(float(distnb.replica_id()))

    def go_on(self, steps):
        while steps:
            for batch in self.dataset:
                strategy.run(self.train, args=(batch,))
                self.step.assign_add(1)
                self.schedule.step()
                steps -= 1
                if not steps:
                    break

    def state(self):
        flat = [each.detach().clone() for each in self.model.parameters()]
        numbers = [self.step.item(), self.seen.item(), self.level.item(), self.first.item(), round(float(self.mean.compute()), 5)]
        return [each.tolist() for each in flat], numbers, self.optimizer.param_groups[0]["lr"]

def others_of(training):
    with strategy.scope():
        yield "model", torch.nn.Linear(2, 3)
        yield "optimizer", torch.optim.SGD(training.model.parameters(), lr=0.1)
        yield "variables", {{"step": training.mean}}

result = {{"restored": {{}}}}
for other in {others}:
    again = Training(seed=5)
    again.go_on(1)
    again.checkpoint.restore(os.path.join({folder!r}, other))
    again.go_on(6)
    result["restored"][other] = again.state()
training = Training(seed=3)
training.go_on(2)
path = training.checkpoint.write(os.path.join({folder!r}, {way!r}))
if {way!r} != "default":
    try:
        strategy.run(lambda: training.checkpoint.write(path + "-in-a-replica"))
        result["refused"] = False
    except RuntimeError as error:
        result["refused"] = "replica context" in str(error)
    managed = os.path.join({folder!r}, {way!r} + "-managed")
    try:
        strategy.run(distnb.CheckpointManager(training.checkpoint, managed).save)
        result["refused"] = False
    except RuntimeError as error:
        result["refused"] &= "replica context" in str(error) and not os.path.exists(managed)
    strategy.run(lambda: training.checkpoint.restore(path))  # allowed
    for name, other in others_of(training):
        before = training.state()
        try:
            distnb.Checkpoint(**{{"data": training.dataset, "mean": training.mean, name: other}}).restore(path)
            result["refused"] = False
        except distnb.errors.CheckpointError as error:
            result["refused"] &= name in str(error) and training.state() == before
else:
    training.checkpoint.restore(path)
training.go_on(6)
result["path"], result["state"] = path, training.state()
"""
ORDER = ("default", "mirrored_2", "central_2", "mirrored_3", "multi_worker_2", "one_device", "default", "mirrored_2")


def trained(way: str, folder: Path, others: list[str]) -> list[dict[str, Any]]:
    made = WAYS[way]
    text = f"import distnb\nstrategy = {made.made}\n" + TRAINING.format(folder=str(folder), way=way, others=others)
    if not made.workers:
        return [each.check().result for each in run_ranks(text, made.replicas, timeout_s=LIMIT_S)]
    with Tasks(text + "\nreport(**result)\n", [f"worker {index}" for index in range(made.replicas)]) as tasks:
        return [task.check().reported for task in tasks.wait(LIMIT_S)]


def close(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(one == pytest.approx(other, abs=1e-9))


@pytest.mark.soak  # tests/conformance/test_pauses.py restores under other strategies
def test_every_strategy_restores_checkpoints_of_any_other(tmp_path: Path) -> None:
    """Restore under each strategy what the earlier ones saved. The first two run again after all others."""
    expected: Any = None
    saved: list[str] = []
    for way in ORDER:
        results = trained(
            way,
            tmp_path / ("again" if way in saved else ""),
            [f"../{each}" if way in saved else each for each in saved],
        )
        for result in results:
            weights, numbers, rate = result["state"]
            expected = expected or (weights, [8, numbers[1], 2.0, 0.0, numbers[4]], rate)
            assert close(result["state"], expected), way
            assert result.get("refused", True), way
            for other, state in result["restored"].items():
                assert close(state, expected), f"saved under {other}, restored under {way}"
            assert result["path"] == results[0]["path"]
        saved.append(way)
    names = [
        name
        for each in WAYS
        for name in json.loads((tmp_path / "default/checkpoint.json").read_text())["holds"]["tree"]
    ]
    assert {"model", "optimizer", "schedule", "data", "mean", "variables"} == set(names)
    assert not list(tmp_path.glob("*in-a-replica")), "a refused save leaves no file"


PIPELINES = """
from torch.utils.data import DataLoader
strategy = distnb.MultiWorkerMirroredStrategy()
def make(context):
    torch.manual_seed(10 + context.input_pipeline_id)  # each worker shuffles data of its own
    order = torch.randperm(8) + 100 * context.input_pipeline_id
    return DataLoader(order, batch_size=2)
dataset = strategy.distribute_datasets_from_function(make)
def read(batches):
    return [batch.component(distnb.replica_id()).tolist() for batch in batches]
iterator = iter(dataset)
first = read([next(iterator)])
path = distnb.Checkpoint(data=dataset).write({path!r})
rest = read(iterator)
again = strategy.distribute_datasets_from_function(make)
distnb.Checkpoint(data=again).restore(path)
report(first=first, rest=rest, again=read(again))
"""


def test_each_worker_resumes_its_own_data(tmp_path: Path) -> None:
    with Tasks(PIPELINES.replace("{path!r}", repr(str(tmp_path / "one"))), ["worker 0", "worker 1"]) as tasks:
        reported = [task.check().reported for task in tasks.wait(LIMIT_S)]
    for number, worker in enumerate(reported):
        assert worker["again"] == worker["rest"]
        assert len(worker["rest"]) == 3
        read = [each for batch in worker["first"] + worker["rest"] for each in batch]
        assert sorted(read) == [100 * number + each for each in range(8)]


# -- in a notebook -------------------------------------------------------------------------------------------------------

MADE = """
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    count = distnb.Variable(0.0, synchronization="on_read", aggregation="sum")
def step():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    count.assign_add(1.0)
"""
STATE = "[model.weight.detach().numpy().tolist(), count.item(), optimizer.state_dict()['state'][0]['step'].item()]"


@pytest.fixture(scope="module")
def cells(notebook: Notebook, tmp_path_factory: pytest.TempPathFactory) -> Notebook:
    folder = tmp_path_factory.mktemp("checkpoints")
    notebook.run(f"import os, torch, distnb\nFOLDER = {str(folder)!r}\nstrategy = distnb.MirroredStrategy()")
    return notebook


def test_ordinary_cells_save_and_restore_objects_on_the_replicas(cells: Notebook) -> None:
    cells.run(MADE)
    cells.run("strategy.run(step)\ncheckpoint = distnb.Checkpoint(model=model, optimizer=optimizer, more=[count])")
    cells.run("path = checkpoint.save(os.path.join(FOLDER, 'ordinary'))\nsaved = " + STATE)
    assert cells.value("os.path.basename(path)") == "ordinary-1"
    assert cells.value("saved[1:]") == [2.0, 1.0], "the sum of both replicas' counts"
    cells.run("strategy.run(step)\nchanged = " + STATE + "\ncheckpoint.restore(path)\nrestored = " + STATE)
    assert cells.value("changed != saved and restored == saved") is True
    # In a distributed cell the same object does the same, on the replicas.
    said = cells.run(
        f"%%distribute mirrored\nstrategy.run(step)\nafter = {STATE}\ncheckpoint.restore(path)\nagain = {STATE}\n"
        "print(again == saved, after == changed)"
    )
    assert "[0-1] True True" in said.stdout
    # It also works without a strategy.
    cells.run(
        "%%distribute default\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.Adam(model.parameters(), lr=0.1)\n"
        "count = distnb.Variable(0.0, synchronization='on_read', aggregation='sum')\n"
        f"distnb.Checkpoint(model=model, optimizer=optimizer, more=[count]).restore(path)\nalone = {STATE}"
    )
    assert cells.value("alone == saved") is True


def test_replicas_save_together_and_fail_together(cells: Notebook) -> None:
    cells.run("%%distribute mirrored\n" + MADE + "checkpoint = distnb.Checkpoint(model=model)")
    cells.run("%%distribute mirrored\nwhere = checkpoint.write(os.path.join(FOLDER, f'of-{distnb.replica_id()}'))")
    assert cells.value("where").endswith("of-0"), "each may give another path: the chief's counts"
    ran = cells.try_run("%%distribute mirrored\ncheckpoint.write(where)")
    assert ran.error_name == "OptionError"
    assert "exists already" in ran.error_text
    ran = cells.try_run("%%distribute mirrored\ncheckpoint.restore(FOLDER)")
    assert ran.error_name == "CheckpointError"
    assert "not a checkpoint of distnb" in ran.error_text
    ran = cells.try_run("%%distribute mirrored\nif distnb.is_chief():\n    checkpoint.write(where + 'x')", timeout_s=60)
    assert ran.status == "error", "the other replicas did not call it"
    ran = cells.try_run("%%distribute mirrored\nstrategy.run(lambda: checkpoint.write(where + 'y'))")
    assert ran.error_name == "ContextError"
    ran = cells.try_run("%%distribute mirrored\ndistnb.Checkpoint(lr=0.1)")
    assert ran.error_name == "OptionError"
    assert "distnb.Variable" in ran.error_text
    assert cells.run("%%distribute mirrored\ncheckpoint.restore(where)\nprint('works')").stdout == "[0-1] works\n"
    ran = cells.try_run("with strategy.scope():\n    os.mkdir(os.path.join(FOLDER, 'by-both'))")
    assert ran.error_name == "FileExistsError"
    assert "All 2 replicas run this code" in ran.traceback


def test_an_ordinary_cell_restores_all_replica_objects_or_none(cells: Notebook) -> None:
    cells.run(MADE)
    cells.run(
        "with strategy.scope():\n    mean = distnb.metrics.Mean()\n    narrow = torch.nn.Linear(3, 1)\n"
        "    sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n    schedule = torch.optim.lr_scheduler.StepLR(sgd, 3)\n"
        "strategy.run(step)\nstrategy.run(lambda: mean.update(float(distnb.replica_id())))\n"
        "path = distnb.Checkpoint(model=model, optimizer=optimizer, mean=mean, schedule=schedule).save("
        f"os.path.join(FOLDER, 'all'))\nsaved = {STATE}\nstrategy.run(step)\nstrategy.run(lambda: mean.update(5.0))\n"
        f"changed = {STATE}"
    )
    for name, other in (("model", "narrow"), ("optimizer", "sgd"), ("mean", "model"), ("schedule", "optimizer")):
        given = "dict(model=model, optimizer=optimizer, mean=mean, schedule=schedule) | {" + f"{name!r}: {other}" + "}"
        ran = cells.try_run(f"distnb.Checkpoint(**({given})).restore(path)")
        assert ran.error_name == "CheckpointMismatchError", (name, ran.error_text)
        assert f"\n  {name}: " in ran.error_text
        assert cells.value(f"{STATE} == changed and round(float(mean.compute()), 3)") == 2.75
    cells.run("status = distnb.Checkpoint(model=model, optimizer=optimizer, mean=mean).restore(path)")
    assert cells.value(f"{STATE}[::2] == saved[::2] and float(mean.compute())") == 0.5
    assert cells.value("status.unused") == ("schedule",)


def test_distributed_and_ordinary_cells_save_into_one_folder(cells: Notebook) -> None:
    save = (
        "weights = torch.ones(2)\nmanager = distnb.CheckpointManager(distnb.Checkpoint(weights=weights), "
        "os.path.join(FOLDER, 'both'))\nwhere = manager.save(wait=False)\nprint(os.path.basename(where))"
    )
    for number, word in enumerate(("default", "mirrored", "default", "mirrored"), 1):
        assert f"ckpt-{number}" in cells.run(f"%%distribute {word}\n{save}").stdout


def test_a_thread_writes_while_cells_run(cells: Notebook) -> None:
    cells.run(
        "%%distribute mirrored\n" + MADE + "manager = distnb.CheckpointManager(distnb.Checkpoint(model=model), "
        "os.path.join(FOLDER, 'managed'), max_to_keep=2)\n"
        "for _ in range(4):\n    strategy.run(step)\n    manager.save(wait=False)\nbefore = model.weight.detach().numpy().tolist()"
    )
    cells.run("%%distribute mirrored\nstrategy.run(step)\nmanager.wait()\nused = manager.restore_or_initialize()")
    assert cells.value("model.weight.detach().numpy().tolist() == before") is True
    assert cells.value("[os.path.basename(each) for each in manager.checkpoints]") == ["ckpt-3", "ckpt-4"]
    assert cells.value("sorted(os.listdir(os.path.join(FOLDER, 'managed')))") == ["ckpt-3", "ckpt-4"]
    assert cells.value("used == distnb.latest_checkpoint(os.path.join(FOLDER, 'managed'))") is True


def test_a_dead_engine_is_replaced_and_training_continues(cells: Notebook) -> None:
    cells.run("%%distribute mirrored\n" + MADE + "checkpoint = distnb.Checkpoint(model=model, optimizer=optimizer)")
    cells.run("%%distribute mirrored\nstrategy.run(step)\nkept = checkpoint.write(os.path.join(FOLDER, 'kept'))")
    cells.run(f"saved = {STATE}")
    ran = cells.try_run(
        "%%distribute mirrored\nimport signal\nstrategy.run(step)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert ran.error_name == "EngineDied"
    cells.run("%distnb restart --missing", timeout_s=60)
    cells.run("%%distribute mirrored\n" + MADE)
    cells.run("distnb.Checkpoint(model=model, optimizer=optimizer).restore(kept)")
    assert cells.value(f"{STATE}[::2] == saved[::2]") is True
