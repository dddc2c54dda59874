"""Seed 001, parameter servers: the page's custom loop and its snippets, on every kind of cluster that it names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers.test_server import free_addresses
from tests.support.kernel import Notebook
from tests.support.tasks import Tasks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

# Digits as bags of words: a word is a pixel's place and its brightness, so the model begins with a large table.
DATA = """
import torch, distnb
from torch.utils.data import DataLoader, TensorDataset
from sklearn.datasets import load_digits

WORDS, TRAINED = 64 * 17, 1500

def preprocess():
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).long() + 17 * torch.arange(64), torch.from_numpy(labels)

def dataset_fn(context):
    words, labels = (each[:TRAINED][context.input_pipeline_id :: context.num_input_pipelines] for each in preprocess())
    loader = DataLoader(TensorDataset(words, labels), batch_size=50, shuffle=True)
    while True:
        yield from loader
"""
MODEL = """
STEPS = 60
partitioner = distnb.partitioners.MinSizePartitioner(min_shard_bytes=16 << 10, max_shards=2)

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(WORDS, 32), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return model, optimizer, distnb.metrics.MulticlassAccuracy(num_classes=10, average="micro")
"""
EVALUATION = """
def evaluate(model):
    words, labels = preprocess()
    with torch.no_grad():
        return float((model(words[TRAINED:]).argmax(1) == labels[TRAINED:]).double().mean())
"""
PREPARE = """
distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn)
with strategy.scope():
    model, optimizer, accuracy = make()
    seen = distnb.Variable(0, dtype=torch.int64, name="seen")
checkpoint = distnb.Checkpoint(model=model, optimizer=optimizer)
manager = distnb.CheckpointManager(checkpoint, FOLDER, max_to_keep=2)
manager.restore_or_initialize()
initial_epoch = int(optimizer.iterations) // STEPS
"""
LOOP = """
def worker_fn(iterator):
    def replica_fn(words, labels):
        logits = model(words)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy.update(logits.detach(), labels)
        seen.assign_add(len(labels))
        return loss.detach()
    return strategy.run(replica_fn, args=next(iterator))

history = []
for epoch in range(initial_epoch, EPOCHS):
    iterator = iter(distributed_dataset)
    losses = [coordinator.schedule(worker_fn, args=(iterator,)) for _ in range(STEPS)]
    coordinator.join()
    history.append(float(accuracy.compute()))
    accuracy.reset()
    manager.save()
last_loss = float(sum(coordinator.fetch(losses)[-10:]) / 10)
found = dict(history=history, initial_epoch=initial_epoch, iterations=optimizer.iterations, seen=int(seen),
            evaluated=evaluate(model), last_loss=last_loss, shards=len(model[0].weight.variables))
"""


def check(found: dict[str, Any], begins: int, epochs: int) -> None:
    assert found["initial_epoch"] == begins
    assert found["iterations"] == epochs * 60
    assert found["seen"] == (epochs - begins) * 60 * 50
    assert len(found["history"]) == epochs - begins
    assert found["history"][-1] > 0.85
    assert found["evaluated"] > 0.7
    assert found["last_loss"] < 0.6
    assert found["shards"] == 2


# -- the custom loop ---------------------------------------------------------------------------------------------------

IN_PROCESS = """
import json, sys
CLUSTER = json.loads(sys.argv[1])
servers = [distnb.Server(CLUSTER, job, index) for job in CLUSTER for index in range(len(CLUSTER[job]))]
resolver = distnb.cluster_resolver.SimpleClusterResolver(CLUSTER)
strategy = distnb.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
assert strategy.cluster_resolver is resolver
coordinator = distnb.coordinator.ClusterCoordinator(strategy)
"""
BY_ROLE = """
from pathlib import Path
FOLDER, EPOCHS = "saved", 3
resolver = distnb.cluster_resolver.TFConfigClusterResolver()

def train():
    strategy = distnb.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = distnb.coordinator.ClusterCoordinator(strategy)
    names = globals() | dict(strategy=strategy, coordinator=coordinator)
    exec(PREPARE + LOOP, names)
    report(**names["found"])

def evaluated(path):
    model, *_ = make()
    distnb.Checkpoint(model=model).restore(path)
    return {"accuracy": evaluate(model)}

if resolver.task_type == "chief":
    train()
elif resolver.task_type == "evaluator":
    lines = distnb.evaluate_checkpoints(FOLDER, evaluated, last=f"ckpt-{EPOCHS}", timeout_s=100, poll_s=0.05)
    report(lines=lines)
else:
    server = distnb.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    server.join()
"""


@pytest.mark.soak  # tests/servers/test_roles_in_processes.py has such servers, the others have this training
def test_a_program_trains_with_servers_in_the_coordinators_process(tmp_path: Path) -> None:
    """Make them as TensorFlow's tutorial does, make everything again, and resume where the first training ended."""
    cluster = {"worker": free_addresses(2), "ps": free_addresses(2)}
    program = f"""{DATA + MODEL + EVALUATION + IN_PROCESS}
FOLDER, EPOCHS = {str(tmp_path / "saved")!r}, 2
{PREPARE + LOOP}
first, EPOCHS = found, 3
{PREPARE + LOOP}
distnb.stop()
for server in servers:
    server.stop()
    server.join()
print(json.dumps([first, found]))
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    own = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, str(script), json.dumps(cluster)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, again = json.loads(ended.stdout.splitlines()[-1])
    check(first, 0, 2)
    check(again, 2, 3)


@pytest.mark.soak  # tests/servers/test_roles_in_processes.py starts every task, too, and the cells below train the same
def test_one_program_runs_as_every_task(tmp_path: Path) -> None:
    """Run chief, workers, servers and an evaluator through TF_CONFIG."""
    names = ["chief 0", "worker 0", "worker 1", "ps 0", "ps 1", "evaluator 0"]
    program = DATA + MODEL + EVALUATION + f"PREPARE, LOOP = {PREPARE!r}, {LOOP!r}\n" + BY_ROLE
    with Tasks(program, names, env={"XDG_CACHE_HOME": str(tmp_path)}) as tasks:
        chief, evaluator = (tasks.end_of(name, 120).check().reported for name in ("chief 0", "evaluator 0"))
    check(chief, 0, 3)
    assert evaluator["lines"][-1]["checkpoint"] == "ckpt-3"
    assert evaluator["lines"][-1]["results"]["accuracy"] == chief["evaluated"]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Notebook(env={"OMP_NUM_THREADS": "1"}) as notebook:
        notebook.run("%distnb start --workers 2 --ps 3", timeout_s=120)
        notebook.run(f"FOLDER = {str(tmp_path_factory.mktemp('notebook'))!r}")
        notebook.run(DATA + MODEL + EVALUATION)
        yield notebook


def test_a_program_trains_in_cells_of_a_notebook(cells: Notebook) -> None:
    cells.run("EPOCHS = 2\n")
    cells.run(
        "strategy = distnb.ParameterServerStrategy(variable_partitioner=partitioner)\n"
        "coordinator = distnb.coordinator.ClusterCoordinator(strategy)"
    )
    cells.run(PREPARE)
    cells.run(LOOP)
    check(cells.value("found"), 0, 2)
    # A distributed cell of the same strategy goes on.
    cells.run("%%distribute strategy\nEPOCHS = 3\n" + PREPARE + LOOP)
    check(cells.value("found"), 2, 3)


def test_a_distributed_cell_has_a_strategy_and_a_coordinator(cells: Notebook) -> None:
    cells.run("%%distribute parameter_server\nEPOCHS, FOLDER = 2, FOLDER + '/cell'\npartitioner = None\n" + PREPARE)
    cells.run("%%distribute parameter_server\n" + LOOP)
    check(cells.value("found") | {"shards": 2}, 0, 2)


# -- its snippets ------------------------------------------------------------------------------------------------------


def test_variables_are_placed_on_servers_in_turn(cells: Notebook) -> None:
    cells.run("""%%distribute parameter_server
v1 = distnb.Variable(0.0)
with strategy.scope():
    v2, v3, v4, v5 = (distnb.Variable(value) for value in (1.0, 2.0, 3.0, 4.0))
devices = [each.device for each in (v2, v3, v4, v5)]
outside = str(v1.device)
""")
    devices = cells.value("devices")
    assert {*devices} == {f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(3)}
    assert devices[0] == devices[3]
    assert cells.value("outside") == "cpu"
    fresh = cells.run(
        "other = distnb.ParameterServerStrategy(variable_partitioner=distnb.partitioners.FixedShardsPartitioner(2))\n"
        "with other.scope():\n    v = distnb.Variable(1.0)\nprint(v.device)"
    )
    assert fresh.stdout.strip() == "/job:ps/replica:0/task:0/device:CPU:0"


def test_an_embedding_is_split_into_two_shards(cells: Notebook) -> None:
    cells.run("""
two = distnb.ParameterServerStrategy(
    variable_partitioner=distnb.partitioners.MinSizePartitioner(256 << 10, max_shards=2)
)
with two.scope():
    embedding = torch.nn.Embedding(1024, 1024)
    small = distnb.Variable(torch.arange(26.0).reshape(13, 2))
table = embedding.weight
""")
    assert cells.value("[tuple(each.shape) for each in table.variables]") == [(512, 1024)] * 2
    assert cells.value("all(isinstance(each, distnb.Variable) for each in table.variables)") is True
    assert cells.value("torch.equal(torch.ones(1024) * table, table.read_value())") is True
    rows = "distnb.nn.embedding_lookup(table, torch.tensor([[1, 1023], [512, 1]]))"
    assert cells.value(f"torch.equal({rows}, table.read_value()[torch.tensor([[1, 1023], [512, 1]])])") is True
    assert cells.value("type(small).__name__") == "ServerVariable", "small variables stay whole"
    cells.run("""
five = distnb.ParameterServerStrategy(variable_partitioner=distnb.partitioners.FixedShardsPartitioner(5))
with five.scope():
    rows = distnb.Variable(torch.arange(13))
""")
    assert cells.value("[each.tolist() for each in rows.variables]") == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10], [11, 12],
    ]  # fmt: skip
