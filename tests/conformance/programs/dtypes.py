"""Dtypes, empty and scalar parameters, memory formats and mixed precision."""

from __future__ import annotations

import torch
from torch import nn

import distnb
from tests.conformance.prelude import mse, rows, strategy, train, whole
from tests.conformance.program import program


@program(dtype="float32", tolerance=1e-5)
def float32():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program(cases={"double": {"dtype": "float64"}, "bfloat16": {"dtype": "bfloat16"}}, dtype="float32", tolerance=0.03)
def converted_after_it_was_made(dtype):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    with strategy.scope():
        model.to(getattr(torch, dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x.to(getattr(torch, dtype))).float(), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model.float())}


class Several(nn.Module):
    """Layers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4, dtype=torch.float32)
        self.third = nn.Linear(4, 2, dtype=torch.complex128)

    def forward(self, x):
        return self.third(self.second(self.first(x).float()).to(torch.complex128)).abs()


@program(tolerance=1e-5)
def several_dtypes():
    with strategy.scope():
        model = Several()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    state = model.state_dict()
    return {
        "model": {
            name: torch.view_as_real(value).tolist() if value.is_complex() else value.tolist()
            for name, value in state.items()
        }
    }


class Scalars(nn.Module):
    """A layer with scalar and empty parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.empty = nn.Parameter(torch.zeros(0, 2))

    def forward(self, x):
        return self.layer(x) * self.scale + self.shift + self.empty.sum()


@program(cases={name: {"optimizer_name": name} for name in ("SGD", "Adam")})
def scalar_and_empty_parameters(optimizer_name):
    with strategy.scope():
        model = Scalars()
        optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


class OneNumber(nn.Module):
    """A module with one scalar."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.slope * x


@program()
def one_scalar():
    with strategy.scope():
        model = OneNumber()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        mse(model(x), 2 * x).backward()
        optimizer.step()

    train(step, rows(10, 1))
    return {"model": whole(model)}


class Transposed(nn.Module):
    """A layer whose weight is a transposed view."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.arange(6.0).reshape(3, 2) / 10).t())

    def forward(self, x):
        return x @ self.weight.t()


@program()
def non_contiguous_parameters():
    with strategy.scope():
        model = Transposed()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program()
def channels_last():
    with strategy.scope():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(model(x).square().mean(dim=(1, 2, 3))).backward()
        optimizer.step()

    train(step, rows(6, 3 * 36).reshape(6, 3, 6, 6))
    return {"model": whole(model)}


@program(dtype="float32", tolerance=0.02)
def autocast():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        optimizer.zero_grad()
        mse(output.float(), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


class WithBuffers(nn.Module):
    """A layer with buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("offset", torch.tensor([3, 4]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.layer(x) * self.mask + self.offset * self.scratch


_POLICY = "torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.{}, reduce_dtype=torch.{})"


@program(
    under=("sharded",),
    dtype="float32",
    tolerance=0.03,
    cases={
        name: {"options": {"min_size": "0", "mixed_precision": policy}}
        for name, policy in {
            "bfloat16": "'bfloat16'",
            "float16": "'float16'",
            "sums in bfloat16": _POLICY.format("bfloat16", "bfloat16"),
            "sums in float16": _POLICY.format("float16", "float16"),
        }.items()
    },
)
def mixed_precision():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 2))
        model[2].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x).float(), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program()
def buffers_of_several_dtypes():
    with strategy.scope():
        model = WithBuffers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program()
def large_parameters():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3000), nn.Tanh(), nn.Linear(3000, 100))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(model(x).square().mean(dim=1)).backward()
        optimizer.step()

    train(step, rows(8, 3))
    return {"sums": [value.double().square().sum().item() for value in model.state_dict().values()]}
