"""Seed 002, the multi-worker setup: two workers train, the chief saves, an evaluator evaluates its checkpoints."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.tasks import Tasks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

# One program for all roles. The workers' directories differ, but for the chief's, which the evaluator reads.
DATA = """
from pathlib import Path
from sklearn.datasets import load_digits

EPOCHS = 3
images, labels = load_digits(return_X_y=True)
images, labels = torch.from_numpy(images) / 16, torch.from_numpy(labels)
"""
TORCH = """
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

SAVED = {"epoch-*": f"epoch-{EPOCHS - 1}"}

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

def train(strategy, own):
    model = make_or_restore(strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    def step(batch):
        loss = distnb.nn.compute_average_loss(F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    checkpoint = distnb.Checkpoint(model=model)
    accuracies = {}
    dataset = strategy.distribute_dataset(DataLoader(TensorDataset(images[:300], labels[:300]), batch_size=64))
    for epoch in range(EPOCHS):
        for batch in dataset:
            strategy.run(step, args=(batch,))
        path = checkpoint.write(own / f"epoch-{epoch}")
        accuracies[f"epoch-{epoch}"] = evaluate(strategy, model)["accuracy"]
    return path, accuracies
"""
KERAS = """
import keras

SAVED = {"epoch-*.keras": f"epoch-{EPOCHS}.keras", "state": "state"}  # by ModelCheckpoint, and a distnb.Checkpoint
VALIDATION = images[300:400], labels[300:400]

def make_or_restore(strategy, path=None):
    with strategy.scope():
        if path is not None and path.suffix == ".keras":
            return keras.models.load_model(path)
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(16, "tanh", dtype="float64"), keras.layers.Dense(10, dtype="float64")]
        model = keras.Sequential([keras.Input((64,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(2e-2), loss, metrics=["accuracy"])
    if path is not None:
        distnb.Checkpoint(model=model).restore(path)
    return model

def evaluate(strategy, model):
    return model.evaluate(*VALIDATION, batch_size=30, verbose=0, return_dict=True)

def train(strategy, own):
    model = make_or_restore(strategy)
    saves = keras.callbacks.ModelCheckpoint(own / "epoch-{epoch}.keras")
    shows = distnb.keras.TensorBoard(own / "logs")
    history = model.fit(
        images[:300], labels[:300], batch_size=64, epochs=EPOCHS, validation_data=VALIDATION, verbose=0,
        callbacks=[saves, shows],
    ).history["val_accuracy"]
    path = distnb.Checkpoint(model=model).write(own / "state")
    return path, {f"epoch-{epoch + 1}.keras": history[epoch] for epoch in range(EPOCHS)} | {"state": history[-1]}
"""
ROLES = """
shared = Path("shared")
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker":
    strategy = distnb.MultiWorkerMirroredStrategy()
    own = shared if distnb.is_chief() else Path(f"local-{strategy.cluster_resolver.task_id}")
    path, accuracies = train(strategy, own)
    report(chief=distnb.is_chief(), accuracies=accuracies, path=path, own=own.exists())
else:
    strategy = distnb.MirroredStrategy()  # on one machine, without communication
    lines = []
    for pattern, last in SAVED.items():
        lines += distnb.evaluate_checkpoints(
            shared, lambda path: evaluate(strategy, make_or_restore(strategy, path)), last=last, pattern=pattern,
            timeout_s=120, poll_s=0.05,
        )
    report(lines=lines, log=(shared / "evaluations.jsonl").read_text(), lasts=list(SAVED.values()))
"""


@pytest.mark.parametrize(
    "program", [pytest.param(TORCH, id="loop"), pytest.param(KERAS, id="keras", marks=pytest.mark.soak)]
)
def test_an_evaluator_evaluates_checkpoints_of_the_chief(program: str) -> None:
    words = {"evaluator 0": [sys.executable, "-m", "distnb", "run", "SCRIPT", "-n", "1"]}
    with Tasks(DATA + program + ROLES, ["worker 0", "worker 1", "evaluator 0"], command=words) as tasks:
        chief, worker, evaluator = (task.check().reported for task in tasks.wait(120))
    assert (chief["chief"], worker["chief"]) == (True, False)
    assert chief["path"] == worker["path"], "each passes a different path, and the chief's is used"
    assert (chief["own"], worker["own"]) == (True, False)
    assert chief["accuracies"] == worker["accuracies"]
    assert chief["accuracies"][evaluator["lasts"][-1]] > 0.7
    # Which ones it had the time for is its own affair; the last ones are among them.
    assert {line["checkpoint"] for line in evaluator["lines"]} >= set(evaluator["lasts"])
    for line in evaluator["lines"]:
        assert line["results"]["accuracy"] == chief["accuracies"][line["checkpoint"]]
    assert [json.loads(line) for line in evaluator["log"].splitlines()] == evaluator["lines"]
