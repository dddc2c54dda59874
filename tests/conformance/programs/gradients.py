"""Gradients: of all, some and no replicas; sparse, hooked, accumulated; of several models and passes."""

from __future__ import annotations

import torch
from torch import nn

import distnb
from tests.conformance.prelude import mse, rows, strategy, train, whole
from tests.conformance.program import EVERYWHERE, program


@program(under=EVERYWHERE)
def one_model():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"losses": losses, "model": whole(model)}


class Branches(nn.Module):
    """Two layers, of which a replica may use one."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, uses):
        return sum(getattr(self, name)(x).square().sum() for name in uses)


@program(by_slices=True)
def used_on_some_replicas():
    with strategy.scope():
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        uses = ("left",) if distnb.replica_id() == 0 else ("left", "right")
        loss = model(x, uses) / 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = train(step, rows(12, 3), batch_size=6)
    return {"losses": losses, "model": whole(model)}
