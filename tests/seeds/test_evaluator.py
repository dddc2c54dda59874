"""Seed 002, the multi-worker setup: two workers train, the chief saves, an evaluator evaluates what it saved."""

from __future__ import annotations

import json
import sys

import pytest

from tests.tasks import Tasks

pytestmark = pytest.mark.timeout(150)

# One program for all roles. The workers' directories differ, but for the chief's, which the evaluator reads.
PROGRAM = """
from pathlib import Path
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3
shared = Path("shared")
images, labels = load_digits(return_X_y=True)
images, labels = torch.from_numpy(images) / 16, torch.from_numpy(labels)

def make_or_restore(strategy, path=None):
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)).double()
    if path is not None:
        distnb.Checkpoint(model=model).restore(path)
    return model

def evaluate(strategy, model):
    dataset = strategy.distribute_dataset(TensorDataset(images[300:400], labels[300:400]), batch_size=30)
    def hits(batch):
        return (model(batch[0]).argmax(dim=1) == batch[1]).double()
    right = [strategy.reduce("sum", strategy.run(hits, args=(batch,)), axis=0).item() for batch in dataset]
    return {"accuracy": sum(right) / 100}

def train(strategy):
    model = make_or_restore(strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    def step(batch):
        loss = distnb.nn.compute_average_loss(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    own = shared if distnb.is_chief() else Path(f"local-{strategy.cluster_resolver.task_id}")
    checkpoint = distnb.Checkpoint(model=model)
    accuracies = {}
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(images[:300], labels[:300]), batch_size=64))
    for epoch in range(EPOCHS):
        for batch in dataset:
            strategy.run(step, args=(batch,))
        path = checkpoint.write(own / f"epoch-{epoch}")
        accuracies[f"epoch-{epoch}"] = evaluate(strategy, model)["accuracy"]
    tell(chief=distnb.is_chief(), accuracies=accuracies, path=path, own=own.exists())

if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker":
    train(distnb.MultiWorkerMirroredStrategy())
else:
    strategy = distnb.MirroredStrategy()  # on one machine, with nobody to communicate with
    lines = distnb.evaluate_checkpoints(
        shared, lambda path: evaluate(strategy, make_or_restore(strategy, path)), last=f"epoch-{EPOCHS - 1}",
        pattern="epoch-*", timeout_s=120, poll_s=0.05,
    )
    tell(lines=lines, log=(shared / "evaluations.jsonl").read_text())
"""


def test_workers_a_chief_that_saves_and_an_evaluator() -> None:
    words = {"evaluator 0": [sys.executable, "-m", "distnb", "run", "SCRIPT", "-n", "1"]}
    with Tasks(PROGRAM, ["worker 0", "worker 1", "evaluator 0"], command=words) as tasks:
        chief, worker, evaluator = (task.check().told for task in tasks.wait(120))
    assert (chief["chief"], worker["chief"]) == (True, False)
    assert chief["path"] == worker["path"], "each gives a path of its own: the chief's counts"
    assert (chief["own"], worker["own"]) == (True, False)
    assert chief["accuracies"] == worker["accuracies"]
    assert chief["accuracies"]["epoch-2"] > 0.7
    # Which ones it had the time for is its own affair; the last one is among them.
    assert evaluator["lines"][-1]["checkpoint"] == "epoch-2"
    for line in evaluator["lines"]:
        assert line["results"]["accuracy"] == chief["accuracies"][line["checkpoint"]]
    assert [json.loads(line) for line in evaluator["log"].splitlines()] == evaluator["lines"]
