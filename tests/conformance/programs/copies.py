"""Copies of models: moving averages, target networks, states that are saved and loaded."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.conformance.prelude import mse, rows, strategy, train, whole
from tests.conformance.program import program


@program()
def moving_average_by_hand():
    with strategy.scope():
        model, average = nn.Linear(3, 2), nn.Linear(3, 2)
        average.load_state_dict(model.state_dict())
        average.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model), "average": whole(average)}


@program(
    cases={
        "mean": {"averaging": "{}"},
        "ema": {"averaging": "{'multi_avg_fn': torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)}"},
    }
)
def averaged_model(averaging):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        average = AveragedModel(model, **eval(averaging))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)

    def evaluate(batch):
        x, y = batch
        with torch.no_grad():
            return mse(average(x), y)

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"losses": train(evaluate, rows(8, 3), rows(8, 2, seed=2)), "model": whole(model, average.module)}


class Scaled(nn.Module):
    """A model with two units, a shared layer, statistics, and a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 2)
        self.again = self.head
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.scale * self.again(self.norm(x))


_UNITS = {"one": {}, "several": {"under": ("sharded",), "options": {"min_size": "0"}}}


@program(cases=_UNITS)
def copies_of_a_model_with_an_optimizer():
    with strategy.scope():
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        other = copy.deepcopy(model)
        second = torch.optim.Adam(other.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        for trained, steps in ((model, optimizer), (other, second)):
            steps.zero_grad()
            mse(trained(x), y).backward()
            steps.step()
        average.update_parameters(model)

    def evaluate(batch):
        x, y = batch
        with torch.no_grad():
            return mse(average(x), y)

    train(step, rows(10, 3), rows(10, 2, seed=2))
    losses = train(evaluate, rows(8, 3), rows(8, 2, seed=2))
    with strategy.scope():
        best = copy.deepcopy(other)
    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"losses": losses, "models": whole(model, other, average, best)}


@program()
def copy_made_in_a_step():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        with torch.no_grad():
            before = copy.deepcopy(model)
        optimizer.step()
        with torch.no_grad():
            return mse(before(x), y) - mse(model(x), y)

    return {"gains": train(step, rows(10, 3), rows(10, 2, seed=2)), "model": whole(model)}


@program()
def deep_copy_as_a_target():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        target = copy.deepcopy(model)
        target.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        with torch.no_grad():
            wanted = y + 0.5 * target(x)
        optimizer.zero_grad()
        mse(model(x), wanted).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    with strategy.scope():
        target.load_state_dict(model.state_dict())
    train(step, rows(10, 3, seed=3), rows(10, 2, seed=4))
    return {"models": whole(model, target)}


@program()
def deep_copy_after_training():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    with strategy.scope():
        best = copy.deepcopy(model.state_dict())
    train(step, rows(10, 3), rows(10, 2, seed=2))
    with strategy.scope():
        model.load_state_dict(best)
    return {"model": whole(model)}


@program()
def optimizer_state_loaded():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    with strategy.scope():
        state = optimizer.state_dict()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        optimizer.load_state_dict(state)
    train(step, rows(10, 3, seed=3), rows(10, 2, seed=4))
    return {"model": whole(model)}
