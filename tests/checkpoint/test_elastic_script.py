"""`distnb.elastic` under torchrun's agent, which restarts processes that kill themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

_TRAIN = """
import os, sys, torch, distnb

strategy = distnb.MirroredStrategy()
torch.manual_seed(3)
x = torch.randn(240, 5)
with strategy.scope():
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    seen = distnb.Variable(0)
    mean = distnb.metrics.Mean()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
data = strategy.distribute_dataset(torch.utils.data.DataLoader(rows, batch_size=12, shuffle=True))

def end_once():
    if os.path.exists("wanted"):
        os.remove("wanted")
        os.kill(os.getpid(), 9)

def step(batch):
    inputs, targets = batch
    loss = distnb.nn.compute_average_loss((model(inputs) - targets).square().mean(1))
    if int(seen) == 9 and os.environ["RANK"] == "1":
        end_once()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean.update_state((model(inputs) - targets).detach().abs())

def train(commit):
    sys.stdout.write(f"train {strategy.num_replicas_in_sync} {int(seen)}\\n")
    while data.epoch < 2:
        for batch in data:
            strategy.run(step, (batch,))
            schedule.step()
            seen.assign_add(1)
            commit()
    return "trained"

checkpoint = distnb.Checkpoint(model=model, optimizer=optimizer, schedule=schedule, data=data, seen=seen, mean=mean)
directory = "commits" if len(sys.argv) > 1 else None
done = distnb.elastic(train, checkpoint, directory=directory)
# One write: torchrun starts Python with -u.
sys.stdout.write(f"{done} {int(seen)} {strategy.num_replicas_in_sync}\\n")
result = model.state_dict() | {"mean": torch.as_tensor(mean.result())}
if distnb.is_chief():
    torch.save(result, "result.pt")
"""


_AGENT = "torch.distributed.run --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-conf=last_call_timeout=1"


def _run(folder: Path, launcher: str, arguments: str, program: str = _TRAIN) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    logs = [f"--log-dir={folder / 'logs'}"] if "torch" in launcher else []
    words = [sys.executable, "-m", *launcher.split(), *logs, "train.py", *arguments.split()]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=150)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights of a run of one process without a loss."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = _run(folder, "distnb run -n 1", "")
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "result.pt")


@pytest.mark.soak  # test_elastic.py continues without an agent
def test_a_killed_process_is_replaced_and_the_weights_are_those_of_a_run_without_losses(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "wanted").touch()
    done = _run(tmp_path, f"{_AGENT} --nnodes=1:2 --rdzv-endpoint=127.0.0.1:0", "saved")
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "result.pt"), undisturbed, rtol=1e-5, atol=1e-6)
    starts = [line for line in done.stdout.splitlines() if line.startswith("train ")]
    assert starts == [f"train 2 {step}" for step in (0, 0, 9, 9)]
    assert done.stdout.count("trained 40 2") == 2
