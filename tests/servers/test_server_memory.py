"""A table larger than any process may use trains, under limits that the kernel enforces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

PROGRAM = """
import json, os, resource
import torch, distnb
from distnb.notebook.compose import require

ROWS, WIDTH = 1 << 20, 64
TABLE = ROWS * WIDTH * 4  # bytes: 256 MB

def of_process(pid, name):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))

def limit(pid, nbytes):
    most = of_process(pid, "VmData") + nbytes
    resource.prlimit(pid, resource.RLIMIT_DATA, (most, most))

torch.set_num_threads(1)
distnb.start(workers=1, ps=4)
strategy = distnb.ParameterServerStrategy(variable_partitioner=distnb.partitioners.MinSizePartitioner(max_shards=4))
coordinator = distnb.coordinator.ClusterCoordinator(strategy)
with strategy.scope():  # what is loaded at first use is loaded
    warm = torch.nn.Sequential(torch.nn.EmbeddingBag(600, 8, mode="sum", sparse=True), torch.nn.Linear(8, 1))
    both = torch.optim.Adagrad(warm[0].parameters()), torch.optim.SGD(warm[1].parameters(), lr=0.1)

def step(model, optimizers, ids):
    losses = []
    for _ in range(4):
        for each in optimizers:
            each.zero_grad()
        loss = (model(ids)[:, 0] - 1).pow(2).mean()
        loss.backward()
        for each in optimizers:
            each.step()
        losses.append(loss.item())
    return losses

for _ in range(8):
    coordinator.schedule(step, args=(warm, both, torch.arange(600).reshape(20, 30)))
coordinator.join()

rows = require().status()
pids = {str(row.task): row.pid for row in rows} | {"coordinator": os.getpid()}
before = {name: of_process(pid, "VmRSS") for name, pid in pids.items()}
for name, pid in pids.items():
    # A quarter of the table, and as much that the optimizer keeps for it, and room to work.
    limit(pid, TABLE * 3 // 4 if name.startswith("ps") else TABLE // 2)

with strategy.scope():
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True), torch.nn.Linear(WIDTH, 1))
    optimizers = (
        torch.optim.Adagrad(model[0].parameters(), lr=0.05), torch.optim.SGD(model[1].parameters(), lr=1e-4),
    )
table = model[0].weight
batches = [torch.randint(0, ROWS, (64, 50), generator=torch.Generator().manual_seed(n)) for n in range(20)]
some = batches[0][0].sort().values
rows_before = distnb.nn.embedding_lookup(table, some).detach().clone()
losses = coordinator.fetch([coordinator.schedule(step, args=(model, optimizers, ids)) for ids in batches])
coordinator.join()
grown = {name: of_process(pid, "VmHWM") - before[name] for name, pid in pids.items()}

def whole():
    return float(torch.zeros(ROWS, WIDTH).sum())

refused = []
try:
    coordinator.schedule(whole)
    coordinator.join()
except RuntimeError as error:
    refused.append("allocate" in str(error))
try:
    table.read_value()
except RuntimeError as error:
    refused.append("allocate" in str(error))
print(json.dumps({
    "table": TABLE,
    "grown": grown,
    "losses": losses,
    "shards": [list(each.shape) for each in table.variables],
    "servers": len({each.device for each in table.variables}),
    "changed": bool((distnb.nn.embedding_lookup(table, some).detach() != rows_before).any(dim=1).all()),
    "iterations": [each.iterations for each in optimizers],
    "refused": refused,
}))
distnb.stop()
"""


@pytest.mark.soak
def test_a_table_larger_than_a_processs_memory_limit_trains(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["shards"] == [[1 << 18, 64]] * 4
    assert result["servers"] == 4
    assert result["changed"] is True
    assert result["iterations"] == [80, 80]
    assert all(each[-1] < each[0] / 2 for each in result["losses"])
    assert result["refused"] == [True, True], "the limits are in force: no process gets the whole table"
    for name, grown in result["grown"].items():
        # A server has its quarter with Adagrad's state; the others have only pieces and rows.
        assert grown < result["table"] * (3 if name.startswith("ps") else 1) // 4, result["grown"]
