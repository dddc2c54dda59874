"""Running statistics of batch normalization, wherever it stands, are averages over the replicas."""

from __future__ import annotations

import torch
from torch import nn

import distnb
from tests.conformance.prelude import rows, strategy, train, whole
from tests.conformance.program import program

_MODELS = {
    "between": "nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))",
    "first": "nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))",
    "last": "nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))",
    "no affine": "nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2))",
    "frozen body": "nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).requires_grad_(False), nn.Linear(4, 2))",
    "cumulative": "nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))",
    "untracked": "nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))",
    "nested": "nn.Sequential(nn.Sequential(nn.Sequential(nn.BatchNorm1d(3))), nn.Linear(3, 2))",
    "two": "nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))",
}


@program(by_slices=True, cases={name: {"make": text} for name, text in _MODELS.items()})
def batch_norm(make):
    with strategy.scope():
        model = eval(make)
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)

    def step(x):
        optimizer.zero_grad()
        (model(x).square().sum() / 6).backward()
        optimizer.step()

    train(step, rows(12, 3), batch_size=6)
    return {"model": whole(model)}


@program(by_slices=True)
def passes_without_gradients():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def step(x):
        with torch.no_grad():
            return model(x).square().sum()

    sums = train(step, rows(12, 3), batch_size=6)
    return {"sums": sums, "model": whole(model)}


@program(by_slices=True)
def evaluation_uses_the_averages():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model.train()
        optimizer.zero_grad()
        (model(x).square().sum() / 6).backward()
        optimizer.step()

    def evaluate(x):
        model.eval()
        with torch.no_grad():
            return model(x).square().sum()

    train(step, rows(12, 3), batch_size=6)
    return {"sums": train(evaluate, rows(12, 3), batch_size=6), "model": whole(model)}


@program(by_slices=True)
def a_pass_of_a_part():
    with strategy.scope():
        body, head = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def step(x):
        with torch.no_grad():
            features = body(x)
        optimizer.zero_grad()
        (head(features).square().sum() / 6).backward()
        optimizer.step()

    train(step, rows(12, 3), batch_size=6)
    return {"models": whole(body, head)}


@program()
def synchronised_batch_norm():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(model(x).square().sum(dim=1)).backward()
        optimizer.step()

    train(step, rows(11, 3), batch_size=6)
    return {"model": whole(model)}


@program(by_slices=True)
def instance_norm():
    with strategy.scope():
        model = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        (model(x.unflatten(1, (2, 3))).square().sum() / 6).backward()
        optimizer.step()

    train(step, rows(12, 6), batch_size=6)
    return {"model": whole(model)}


class Branched(nn.Module):
    """A model whose norm some passes leave out."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x, is_normed):
        return self.head(self.norm(x) if is_normed else x)


@program(
    by_slices=True,
    cases={
        "on some replicas": {
            "normed": (0, 2),
            "locally": False,
            "under": ("default", "one_device", "mirrored", "multi_worker", "central_storage"),
        },
        "no_sync": {"normed": (0, 1, 2), "locally": True},
    },
)
def passes_of_a_norm(normed, locally):
    with strategy.scope():
        model = Branched()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        is_normed = distnb.replica_id() in normed
        optimizer.zero_grad()
        if locally:
            with strategy.no_sync():
                (model(x, is_normed).square().sum() / 12).backward()
        (model(x, is_normed).square().sum() / 12).backward()
        optimizer.step()

    train(step, rows(12, 3), batch_size=6)
    return {name: value for name, value in whole(model).items() if "num_batches" not in name}
