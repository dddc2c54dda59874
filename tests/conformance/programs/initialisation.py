"""Initial values: constructors that read what they wrote, tied and shared values, random numbers afterwards."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from tests.conformance.prelude import mse, rows, strategy, train, whole
from tests.conformance.program import program

_CHANGES = {
    "symmetric": "w.copy_((w + w.T) / 2)",
    "triangle": "w.copy_(w.tril())",
    "softmax": "w.copy_(w.softmax(dim=1))",
    "qr": "w.copy_(torch.linalg.qr(w)[0])",
    "where": "w.copy_(torch.where(w > 0, w, -w))",
    "scaled": "w.mul_(1 / w.norm())",
    "bias from weight": "self.layer.bias.copy_(w.sum(dim=1))",
    "item": "w.fill_(w[0, 0].item())",
    "orthogonal": "nn.init.orthogonal_(w)",
    "truncated": "nn.init.trunc_normal_(w, std=0.1)",
    "numpy": "w.copy_(torch.as_tensor(np.random.default_rng(3).normal(size=(3, 3))))",
    "rows": "w[1:].zero_()",
    "data": "w.data = torch.eye(3)",
    "apply": "self.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Linear) else None)",
}


class Changed(nn.Module):
    """A layer whose constructor changes its weight."""

    def __init__(self, change):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        w = self.layer.weight
        with torch.no_grad():
            exec(change, {"w": w, "self": self, "torch": torch, "nn": nn, "np": np})

    def forward(self, x):
        return self.layer(x)


@program(cases={name: {"change": text} for name, text in _CHANGES.items()})
def constructor_that_reads_what_it_wrote(change):
    with strategy.scope():
        model = Changed(change)
        drawn = torch.rand(2).tolist()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    initial = whole(model)
    train(step, rows(8, 3), rows(8, 3, seed=2))
    return {"initial": initial, "drawn": drawn, "model": whole(model)}


class Adapter(nn.Module):
    """A frozen layer and the difference from it, made of its singular vectors."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        u, s, v = torch.linalg.svd(base.weight.detach())
        self.down, self.up = nn.Parameter(v[:1] * s[0].sqrt()), nn.Parameter(u[:, :1] * s[0].sqrt())
        with torch.no_grad():
            self.base.weight -= self.up @ self.down

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


@program()
def residual_adapter():
    with strategy.scope():
        model = Adapter(nn.Linear(3, 3))
        optimizer = torch.optim.SGD([model.down, model.up], lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(8, 3), rows(8, 3, seed=2))
    return {"model": whole(model)}


_PARAMETRIZED = {
    "weight_norm": "nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))",
    "orthogonal": "nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))",
}


@program(cases={name: {"make": text} for name, text in _PARAMETRIZED.items()})
def parametrized_layers(make):
    with strategy.scope():
        model = eval(make)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(8, 3), rows(8, 3, seed=2))
    return {"model": whole(model)}


@program()
def numbers_drawn_after_the_scope():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        other = nn.TransformerEncoderLayer(4, 2, 8)
        numbers = [torch.rand(1).item(), torch.randn(1).item()]
    numbers += torch.rand(2).tolist()
    return {"numbers": numbers, "models": whole(model, other)}


@program()
def several_random_generators():
    random.seed(3)
    np.random.seed(3)
    with strategy.scope():
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.copy_(torch.as_tensor(np.random.rand(2, 3)))
            model.bias.fill_(random.random())
    return {"model": whole(model)}


@program()
def changed_after_it_was_made():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(3))
            model[1].weight.copy_(model[0].weight * 2)
        nn.init.constant_(model[0].bias, 0.25)
    return {"model": whole(model)}


@program()
def made_by_copying():
    with strategy.scope():
        layer = nn.Linear(3, 3)
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
        )
        other = nn.Linear(3, 3)
        other.load_state_dict(layer.state_dict())
    return {"models": whole(layer, model, other)}
