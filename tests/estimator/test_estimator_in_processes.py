"""The Estimator on several replicas: killed and restarted, with an evaluator, in cells, with whole batches each."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.kernel import Notebook
from tests.support.ranks import run_ranks
from tests.support.tasks import Tasks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

MODEL = """
import os, signal
import torch
import distnb
from distnb.estimator import Estimator, EstimatorSpec, EvalSpec, RunConfig, TrainSpec, train_and_evaluate

X = torch.linspace(-1, 1, 7)[:, None]

def model_fn(features, labels, mode):
    layer = torch.nn.Linear(features.shape[1], 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9)
    return EstimatorSpec(mode, layer, torch.nn.MSELoss(reduction="none"), optimizer)

def input_fn():
    return [(X, 3 * X)] * 20
"""

KILLED = (
    MODEL
    + """
strategy = distnb.MirroredStrategy()

def dies():
    for number, batch in enumerate(input_fn()):
        if number == 14 and distnb.is_chief():
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch

def trained(folder, data):
    torch.manual_seed(0)
    config = RunConfig(train_distribute=strategy, save_checkpoints_steps=3)
    estimator = Estimator(model_fn, os.path.join({folder!r}, folder), config)
    before = estimator.latest_checkpoint()
    estimator.train(data, max_steps=20)
    return before, [float(each) for each in estimator.predict(input_fn)][:7]

result = trained("whole", input_fn), trained("halves", {data})
"""
)


def test_a_killed_script_resumes_when_it_is_started_again(tmp_path: Path) -> None:
    def run(data: str, name: str) -> str:
        return KILLED.format(folder=str(tmp_path), data=data).replace('"whole"', repr(name))

    first = run_ranks(run("dies", "whole"), 2, timeout_s=100)
    assert first[0].returncode == -signal.SIGKILL
    assert first[1].returncode != 0, "it does not wait forever"
    for rank in run_ranks(run("input_fn", "again"), 2, timeout_s=100):
        (fresh, whole), (before, went_on) = rank.check().result
        assert fresh is None
        assert Path(before).name in ("ckpt-6", "ckpt-9", "ckpt-12")
        assert went_on == pytest.approx(whole, abs=1e-6), "with the optimizer's momentum"


OTHERS = (
    MODEL
    + """
rows, caught = [], []

class Watched(torch.nn.Linear):
    def forward(self, features):
        rows.append(len(features))
        return super().forward(features)

def watching(features, labels, mode):
    torch.manual_seed(0)
    layer = Watched(1, 1)
    return EstimatorSpec(
        mode, layer, torch.nn.MSELoss(reduction="none"), torch.optim.SGD(layer.parameters(), lr=0.1), predictions=None
    )

def trained(data, **options):
    rows.clear()
    estimator = Estimator(watching, config=RunConfig(train_distribute=distnb.MirroredStrategy(
        gradient_reduction=options.pop("gradients", "sum")), **options)).train(data)
    seen = list(rows)
    return seen, estimator.evaluate(lambda: [(X, 3 * X)] * 3)["loss"], [float(each) for each in estimator.predict(lambda: list(X.split(2)))]

three = lambda: [(x, 3 * x) for x in X.split(3)]  # 3, 3, 1
outside = distnb.metrics.MeanAbsoluteError()
try:
    Estimator(lambda features, labels, mode: EstimatorSpec(
        mode, torch.nn.Linear(1, 1), torch.nn.MSELoss(reduction="none"), eval_metric_ops={"error": outside}
    ), config=RunConfig(train_distribute=distnb.MirroredStrategy())).evaluate(three)
except distnb.errors.OptionError as error:
    caught.append(str(error))
result = {
    "global": trained(three),
    "mean": trained(three, gradients="mean"),
    "each": trained(three, batch_is_per_replica=True),
    "loader": trained(lambda: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X, 3 * X), batch_size=3), batch_is_per_replica=True),
    "fewer": trained(lambda: [(X[:6], 3 * X[:6]), (X[6:], 3 * X[6:])]),
    "caught": caught,
}
"""
)


def test_global_and_per_replica_batches_give_the_expected_sizes() -> None:
    first, second = (rank.check().result for rank in run_ranks(OTHERS, 2))
    assert (first["global"][0], second["global"][0]) == ([2, 2, 1], [1, 1, 0])
    assert (first["each"][0], second["each"][0]) == ([3, 1], [3, 0])
    assert first["global"][1:] == second["global"][1:]
    assert first["mean"][1:] == second["mean"][1:]
    assert first["mean"][2] == pytest.approx(first["global"][2], abs=1e-6)
    # Two batches of 3 make one step, like a batch of 6. The third batch is a step alone.
    assert first["each"][2] == pytest.approx(first["fewer"][2], abs=1e-6)
    assert first["loader"] == first["each"]
    assert first["each"][1] == pytest.approx(first["fewer"][1], rel=1e-5)
    assert len(first["each"][2]) == 7
    assert abs(first["each"][2][0] - first["global"][2][0]) > 1e-3, "fewer steps"
    assert "outside model_fn" in first["caught"][0]


TASKS = (
    MODEL
    + """
strategy = distnb.MultiWorkerMirroredStrategy()
torch.manual_seed(0)
config = RunConfig(train_distribute=strategy, save_checkpoints_steps=5)
estimator = Estimator(model_fn, "shared", config)
results = train_and_evaluate(estimator, TrainSpec(input_fn, max_steps=12), EvalSpec(input_fn, steps=2))
own = estimator.evaluate(input_fn, steps=2)
refused = ""
try:
    per_replica = RunConfig(train_distribute=strategy, batch_is_per_replica=True)
    Estimator(model_fn, "other", per_replica).train(input_fn)
except distnb.errors.OptionError as error:
    refused = str(error)
report(results=results, own=own, refused=refused)
"""
)


def test_workers_train_and_an_evaluator_evaluates() -> None:
    with Tasks(TASKS, ["worker 0", "worker 1", "evaluator 0"]) as tasks:
        chief, worker, evaluator = (task.check().reported for task in tasks.wait(120))
    assert chief["results"] is worker["results"] is None
    assert chief["own"] == worker["own"]
    assert evaluator["results"] == evaluator["own"]
    assert evaluator["results"]["global_step"] == 12
    assert evaluator["results"]["loss"] == pytest.approx(chief["own"]["loss"], rel=1e-5)
    assert "input_context" in chief["refused"]
    assert "input_context" in worker["refused"]
    assert evaluator["refused"] == "", "it has one replica"


def test_an_estimator_trains_in_cells_of_both_kinds(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"FOLDER = {str(tmp_path)!r}" + MODEL)
    making = "config = RunConfig(train_distribute=strategy)\nestimator = Estimator(model_fn, FOLDER, config)\n"
    notebook.run("%%distribute mirrored\n" + making + "results = estimator.train(input_fn).evaluate(input_fn)")
    # The Estimator in the notebook represents those of the replicas.
    assert notebook.value("estimator.evaluate(input_fn)['loss'] == results['loss']") is True
    assert notebook.value("len(list(estimator.predict(lambda: [X])))") == 7
    # The notebook's own Estimator runs on the replicas; under the default strategy it runs here.
    notebook.run("strategy = distnb.MirroredStrategy()\n" + making + "estimator.train(input_fn)")
    assert notebook.value("estimator.latest_checkpoint()") == str(tmp_path / "ckpt-40")
    turns = "train_and_evaluate(estimator, TrainSpec(input_fn, 50), EvalSpec(input_fn)) == estimator.evaluate(input_fn)"
    assert notebook.value(turns) is True
    notebook.run("there, rows = estimator.evaluate(input_fn), list(estimator.predict(lambda: list(X.split(3))))")
    here = notebook.run(
        "strategy = distnb.get_strategy()\n" + making + "own = estimator.evaluate(input_fn)\n"
        "expected = list(estimator.predict(lambda: [X]))\n"
        "print(abs(own['loss'] - there['loss']) < 1e-6, torch.allclose(torch.stack(rows), torch.stack(expected)))"
    )
    assert here.stdout == "True True\n"
