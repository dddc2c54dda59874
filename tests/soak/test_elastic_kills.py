"""An elastic script whose processes are killed at random moments: its weights are those of a run without losses."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]

_KILLS = 6
_TRAIN = """
import sys, time, torch, distnb
strategy = distnb.MirroredStrategy()
torch.manual_seed(3)
x = torch.randn(480, 5)
with strategy.scope():
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
data = strategy.distribute_dataset(torch.utils.data.DataLoader(rows, batch_size=12, shuffle=True))

def step(batch):
    inputs, targets = batch
    optimizer.zero_grad()
    distnb.nn.compute_average_loss((model(inputs) - targets).square().mean(1)).backward()
    optimizer.step()

def train(commit):
    print("train", flush=True)
    while data.epoch < 60:
        for number, batch in enumerate(data):
            strategy.run(step, (batch,))
            if number % 3 == 0:
                commit()
            time.sleep(float(sys.argv[1]))

distnb.elastic(train, distnb.Checkpoint(model=model, optimizer=optimizer, data=data))
if distnb.is_chief():
    torch.save(model.state_dict(), "result.pt")
"""


def _weights(folder: Path, *options: str, pause_s: str) -> tuple[dict[str, torch.Tensor], int]:
    """Return the final weights, and the number of processes that a thread killed meanwhile."""
    (folder / "train.py").write_text(_TRAIN)
    words = [sys.executable, "-m", "distnb", "run", *options, "train.py", pause_s]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        assert launcher.stdout is not None
        killer = _Killer(psutil.Process(launcher.pid))
        for line in launcher.stdout:
            if "left" in line:
                killer.may_kill.clear()  # the only process that has the state
            elif "processes train" in line or ("train" in line and "--min" in options and not killer.is_alive()):
                killer.may_kill.set()
                if killer.ident is None:
                    killer.start()
    assert launcher.returncode == 0
    return torch.load(folder / "result.pt"), killer.kills


class _Killer(threading.Thread):
    """A thread that kills processes of a script at random moments, if another one has the state, too."""

    def __init__(self, launcher: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._launcher = launcher
        self.may_kill = threading.Event()
        self.kills = 0

    def run(self) -> None:
        rng = random.Random(1)
        while self.kills < _KILLS:
            self.may_kill.wait()
            time.sleep(rng.uniform(0.5, 4.0))
            try:
                children = [each for each in self._launcher.children() if "script_replica" in " ".join(each.cmdline())]
            except psutil.Error:
                return
            if self.may_kill.is_set() and children:
                os.kill(rng.choice(children).pid, signal.SIGKILL)
                self.kills += 1


def test_random_kills_leave_the_weights(tmp_path: Path) -> None:
    for name in ("without", "with"):
        (tmp_path / name).mkdir()
    expected, _ = _weights(tmp_path / "without", "-n", "1", pause_s="0")
    found, killed = _weights(tmp_path / "with", "--min", "2", "--max", "3", pause_s="0.01")
    assert killed > 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
