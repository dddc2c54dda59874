"""Replicas on a third device type: a replacement for torch_tpu, a PrivateUse1 device written in Python.

It shows that the strategies' code works for any type of device that torch knows. It does not show that torch_tpu itself
works, because there is no TPU here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.chips import CHIPS
from tests.support.kernel import Notebook

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


TRAIN = """
import os
torch.manual_seed(0)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8, momentum=None), torch.nn.Linear(8, 1))
    recurrent = torch.nn.LSTM(4, 2)
    scale = distnb.Variable(1.5)
    optimizer = torch.optim.Adam([*model.parameters(), *recurrent.parameters(), scale], lr=0.1)
    steps = distnb.Variable(0, aggregation="only_first_replica")
    seen = distnb.Variable(0, synchronization="on_read", aggregation="sum")
x = torch.arange(96.0, device="cpu").reshape(24, 4).sin()
y = x.sum(1, keepdim=True)
data = torch.utils.data.TensorDataset(x, y)

def step(batch):
    inputs, targets = batch
    optimizer.zero_grad()
    model.eval()  # a batch's own statistics would differ with the number of replicas
    found = scale * model(inputs) + recurrent(inputs[None])[0].sum(2).T
    loss = distnb.nn.compute_average_loss((found - targets).pow(2).squeeze(1), global_batch_size=8)
    loss.backward()
    optimizer.step()
    steps.assign_add(1)
    seen.assign_add(len(inputs))
    return loss

history = tuple(
    strategy.reduce("sum", strategy.run(step, (batch,)), axis=None).item()
    for epoch in range(2) for batch in strategy.distribute_dataset(data, batch_size=8)
)
strategy.assert_in_sync([model, recurrent, scale, steps])
variables = (scale.item(), int(steps), int(seen), str(scale.device))
weight = model[2].weight.detach()
where = str(next(model.parameters()).device)
backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else ""
gathered = strategy.gather(strategy.run(lambda: torch.ones(2, device=where) * (1 + distnb.replica_id())), axis=0).tolist()
same, apart = torch.rand(2, device=where).tolist(), strategy.run(lambda: torch.rand(2, device=where))
apart = strategy.gather(apart, axis=0).tolist()
"""
SCRIPT = f"""
import json, sys
import distnb, torch
strategy = distnb.TPUStrategy()
{TRAIN}
environment = {{name: os.environ[name] for name in ("LOCAL_RANK", "TORCH_TPU_TOPOLOGY")}}
print(json.dumps([history, where, backend, gathered, same, apart, environment, strategy.worker_devices, variables]))

def on_the_way_back_to_python(done):
    import time
    for _ in range(300):
        time.sleep(0.001)

# What was saved on chips is loaded anywhere, without running code.
import io
saved = io.BytesIO()
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, saved)
for where_to in (None, "cpu"):
    saved.seek(0)
    loaded = torch.load(saved, map_location=where_to)
    assert torch.equal(loaded["model"]["2.weight"].cpu(), model[2].weight.cpu())
    assert str(loaded["model"]["2.weight"].device) == (where_to or where)
    model.load_state_dict(loaded["model"]), optimizer.load_state_dict(loaded["optimizer"])
strategy.assert_in_sync([model, optimizer])

# The interpreter ends while a thread of the backend comes and goes.
torch.distributed.all_reduce(torch.ones(2, device=where), async_op=True).get_future().then(on_the_way_back_to_python)
"""


def on_one_cpu() -> dict[str, Any]:
    import distnb

    # The same text, as a program on one device.
    found: dict[str, Any] = {"strategy": distnb.OneDeviceStrategy("cpu:0"), "torch": torch, "distnb": distnb}
    exec(TRAIN, found)
    return found


@pytest.mark.parametrize("own_backend", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_script_on_chips_computes_the_same_as_one_cpu(own_backend: bool, tmp_path: Path) -> None:
    import json

    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, **CHIPS} | ({"FAKE_TPU_C10D": "1"} if own_backend else {})
    command = [sys.executable, "-m", "distnb", "run", "--devices", "tpu", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = dict(line[1:].split("] ", 1) for line in done.stdout.splitlines() if line.startswith("["))
    replicas = [json.loads(lines[str(rank)]) for rank in range(2)]
    expected = on_one_cpu()
    for rank, (history, where, backend, gathered, same, apart, launch, names, variables) in enumerate(replicas):
        assert history == pytest.approx(expected["history"], rel=1e-5)
        assert (where, backend) == ("tpu:0", "tpu_dist" if own_backend else "gloo")
        assert gathered == [1.0, 1.0, 2.0, 2.0]
        assert same == replicas[0][4]
        assert apart[:2] != apart[2:]
        assert launch == {"LOCAL_RANK": str(rank), "TORCH_TPU_TOPOLOGY": "2,1,1"}
        assert names == ["tpu:0", "tpu:1"]
        assert variables == [pytest.approx(expected["scale"].item(), rel=1e-5), 6, 48, "tpu:0"]


@pytest.mark.soak  # the script trains on the same chips
def test_a_notebook_starts_its_engines_on_the_chips() -> None:
    with Notebook(env=CHIPS) as notebook:
        ran = notebook.run(f"%%distribute tpu\nimport torch, distnb\n{TRAIN}", timeout_s=180)
        assert "starting one on tpu" in ran.text
        notebook.run(
            "import distnb\nstrategy = distnb.TPUStrategy()\n"
            "again = [strategy.num_replicas_in_sync, strategy.worker_devices]\n"
            "weight = strategy.local_results(weight)[0]\n"
        )
        expected = on_one_cpu()
        assert notebook.value("history") == pytest.approx(expected["history"], rel=1e-5)
        weight, device = notebook.value("(weight.reshape(-1).tolist(), str(weight.device))")
        assert (weight, device) == (pytest.approx(expected["weight"].reshape(-1).tolist(), rel=1e-5), "cpu")
        expected_variables = (pytest.approx(expected["scale"].item(), rel=1e-5), 6, 48, "tpu:0")
        assert notebook.value("variables") == expected_variables
        assert notebook.value("(scale.item(), int(steps), int(seen))") == expected_variables[:3]
        assert notebook.value("(where, again)") == ("tpu:0", [2, ("tpu:0", "tpu:1")])
        # Variables are described, shown and fetched as variables; a lazy module gets its parameters on the chips.
        notebook.run(
            "with strategy.scope():\n"
            "    counted = distnb.Variable(10.0, synchronization='on_read', aggregation='sum')\n"
            "    lazy = torch.nn.LazyLinear(2)\n"
            "strategy.run(lambda: (counted.assign_add(1.0), lazy(torch.ones(1, 3))))\n"
            "strategy.assert_in_sync(lazy)\n"
        )
        assert notebook.value("float(counted)") == 22.0
        assert "22." in notebook.run("print(counted)").stdout
        kept = "[(type(each).__name__, float(each)) for each in strategy.local_results(counted)]"
        assert notebook.value(kept) == [("SyncOnReadVariable", 11.0)] * 2
        assert notebook.value("(str(lazy.weight.device), tuple(lazy.weight.shape))") == ("tpu:0", (2, 3))
