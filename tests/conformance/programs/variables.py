"""Variables: every row of docs/variables.md. They start with 10, and replica r supplies r + 1."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import distnb
from tests.conformance.prelude import mse, rows, strategy, train, whole
from tests.conformance.program import Refusal, program

_NOT_AGGREGATED = Refusal(
    "OptionError", "variables.md", "Without an aggregation, assigning in `run` raises an error", alone=True
)
_NOT_READABLE = Refusal("ContextError", "variables.md", "and reading it outside raises an error", alone=True)


def _refused(synchronization, aggregation):
    if aggregation != "none":
        return {}
    listed = {"central_storage": _NOT_AGGREGATED}
    for word in ("mirrored", "multi_worker", "sharded"):
        listed[word] = _NOT_AGGREGATED if synchronization == "on_write" else _NOT_READABLE
        if synchronization == "on_read":  # in an ordinary cell, the variable is a handle of all components
            listed[f"{word}/ordinary"] = replace(_NOT_READABLE, error="DistributedValueError")
    return listed


def _expected_value(n, synchronization, aggregation, method):
    supplied = [replica + 1.0 for replica in range(n)]
    together = {"sum": sum(supplied), "mean": sum(supplied) / n}.get(aggregation, supplied[0])
    change = {
        "assign": lambda value: value,
        "assign_add": lambda value: 10 + value,
        "assign_sub": lambda value: 10 - value,
    }
    if synchronization == "on_read" and aggregation == "sum":
        return {"value": sum(change[method](value) for value in supplied)}
    return {"value": change[method](together)}


@program(
    expected=_expected_value,
    cases={
        f"{synchronization}-{aggregation}-{method}": {
            "synchronization": synchronization,
            "aggregation": aggregation,
            "method": method,
            "refused": _refused(synchronization, aggregation),
        }
        for synchronization in ("on_write", "on_read")
        for aggregation in ("sum", "mean", "only_first_replica", "none")
        for method in ("assign", "assign_add", "assign_sub")
        if (synchronization, aggregation) != ("on_read", "sum")
    },
)
def assigned_in_run(synchronization, aggregation, method):
    with strategy.scope():
        v = distnb.Variable(10.0, synchronization=synchronization, aggregation=aggregation)
    strategy.run(lambda: getattr(v, method)(distnb.replica_id() + 1.0) * 0)
    return {"value": float(v)}


@program(
    under=("default", "one_device", "mirrored", "multi_worker", "sharded"),  # central storage has one component
    expected=_expected_value,
    cases={
        method: {"synchronization": "on_read", "aggregation": "sum", "method": method}
        for method in ("assign", "assign_add", "assign_sub")
    },
)
def sums_on_read(synchronization, aggregation, method):
    with strategy.scope():
        v = distnb.Variable(10.0, synchronization=synchronization, aggregation=aggregation)
    strategy.run(lambda: getattr(v, method)(distnb.replica_id() + 1.0) * 0)
    return {"value": float(v)}


@program(
    expected=lambda n, aggregation: {"value": 6.0},
    cases={name: {"aggregation": name} for name in ("sum", "mean", "only_first_replica")},
)
def assigned_across_replicas(aggregation):
    with strategy.scope():
        v = distnb.Variable(10.0, aggregation=aggregation)
    v.assign(6.0)
    return {"value": float(v)}


@program(expected=lambda n: {"number": 12.0, "count": n * 2.0})
def numbers_and_counts():
    with strategy.scope():
        number = distnb.Variable(12.0, aggregation="mean")
        count = distnb.Variable(0, synchronization="on_read", aggregation="sum")

    def step():
        number.assign(12.0)
        count.assign_add(2)

    strategy.run(step)
    return {"number": float(number), "count": float(count)}


def _expected_rows(n, method, aggregation):
    value = torch.arange(6.0).reshape(3, 2)
    summed = torch.full((2,), float(sum(range(1, n + 1))))
    for row in (0, 2):
        first = torch.ones(2)
        value[row] = {"scatter_add": value[row] + summed, "scatter_sub": value[row] - summed, "scatter_update": first}[
            method
        ]
    return {"value": value.tolist()}


@program(
    expected=_expected_rows,
    cases={
        "scatter_add": {"method": "scatter_add", "aggregation": "sum"},
        "scatter_sub": {"method": "scatter_sub", "aggregation": "sum"},
        "scatter_update": {"method": "scatter_update", "aggregation": "only_first_replica"},
    },
)
def scattered_rows(method, aggregation):
    with strategy.scope():
        v = distnb.Variable(torch.arange(6.0).reshape(3, 2), aggregation=aggregation)

    def step():
        getattr(v, method)(torch.tensor([0, 2]), torch.full((2, 2), distnb.replica_id() + 1.0))

    strategy.run(step)
    return {"value": v.tolist()}


class Counting(nn.Module):
    """A layer with variables among its attributes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.seen = distnb.Variable(0, synchronization="on_read", aggregation="sum")
        self.slope = distnb.Variable(torch.ones(2), aggregation="mean")

    def forward(self, x):
        self.seen.assign_add(len(x))
        return self.layer(x) * self.slope


_IN_MODULES = ("default", "one_device", "mirrored", "multi_worker", "central_storage", "sharded")


def _expected_training(n):
    torch.manual_seed(0)
    layer, slope = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*layer.parameters(), slope], lr=0.1)
    inputs, targets = (
        torch.randn(10, width, generator=torch.Generator().manual_seed(seed)) for width, seed in ((3, 1), (2, 2))
    )
    for begin in (0, 4, 8):
        x, y = inputs[begin : begin + 4], targets[begin : begin + 4]
        optimizer.zero_grad()
        (layer(x) * slope - y).pow(2).mean().backward()
        optimizer.step()
    return {"weight": layer.weight.tolist(), "slope": slope.tolist(), "seen": 10}


@program(under=_IN_MODULES, expected=_expected_training)
def variables_of_a_module():
    with strategy.scope():
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    state = whole(model)
    return {"weight": state["0.layer.weight"], "slope": state["0.slope"], "seen": int(model.seen)}


@program(
    under=_IN_MODULES,
    expected=lambda n: {"here": 30.0, "sum": 30.0 * n, "mean": 30.0, "columns": [6.0 * n] * 5, "again": 60.0},
)
def results_computed_from_parameters():
    with strategy.scope():
        model = nn.Linear(5, 3)
        nn.init.constant_(model.weight, -2)

    def norm():
        return model.weight.detach().abs().sum()

    norms = strategy.run(norm)
    again = strategy.run(lambda value: value * 2, args=(norms,))
    return {
        "here": float(strategy.local_results(norms)[0]),
        "sum": float(strategy.reduce("sum", norms, axis=None)),
        "mean": float(strategy.reduce("mean", norms, axis=None)),
        "columns": strategy.reduce("sum", strategy.run(lambda: model.weight.detach().abs()), axis=0).tolist(),
        "again": float(strategy.local_results(again)[0]),
    }
