"""Central storage with replicas on accelerators: one copy of variables on the host, whatever computes with them.

The accelerators are the stand-in of `tests/stand_in_tpu`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import distnb
from tests.kernel import Notebook
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
CHIPS = {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "stand_in_tpu"))),
    "STAND_IN_TPU_CHIPS": "2",
    "CUDA_VISIBLE_DEVICES": "",
}

_TRAIN = """
import io

MAKE = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
}

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        self.scale = distnb.Variable(1.5)
        self.steps = distnb.Variable(0, aggregation="only_first_replica")

    def forward(self, inputs):
        return self.scale * self.layers(inputs)

def reloaded(state):
    file = io.BytesIO()
    torch.save({name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=False)

def train(strategy, name):
    torch.manual_seed(1)
    with strategy.scope():
        model = Scaled()
        optimizer = MAKE[name](model.parameters())
    model.eval()  # a batch's own statistics would differ with the number of replicas
    data = torch.linspace(-1, 1, 10 * 8, device="cpu").reshape(10, 8).sin()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(inputs):
        optimizer.zero_grad()
        loss = distnb.nn.compute_average_loss(model(inputs).square().sum(1), global_batch_size=10)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.steps.assign_add(1)
        return loss

    losses = []
    for epoch in range(4):
        for batch in strategy.distribute_dataset([data], batch_size=None):
            losses.append(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None).item())
        scheduler.step()
        if epoch == 1:  # changed in place, then saved and restored in mid-training
            with torch.no_grad():
                model.layers[0].weight.data.mul_(0.5)
            kept = reloaded(optimizer.state_dict())
            model.load_state_dict(reloaded(model.state_dict()))
            optimizer.load_state_dict(kept)
    strategy.assert_in_sync([model, optimizer])
    state = {
        (number, key): value.tolist()
        for number, kept in optimizer.state_dict()["state"].items() for key, value in kept.items()
    }
    return losses, {key: value.tolist() for key, value in model.state_dict().items()}, state
"""
