"""Participating parameters: unused, frozen, shared and sparse ones, several models, dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.errors import GradientError
from tests.core.collectives.gradient_cases.replica import Replica, case, loss_of, mlp, same


@case
def models_reached_later_on_some_replicas(r: Replica) -> None:
    """Reach one, both or none on all replicas at first, so that each set is known when the replicas' sets differ."""
    torch.manual_seed(0)
    models = nn.Linear(4, 1), nn.Linear(4, 1)
    plains = [copy.deepcopy(model) for model in models]
    for model in models:
        r.register(model)
    x = r.batch(r.size)[0]
    alike, unlike = [[{0}] * r.size, [{0, 1}] * r.size, [{1}] * r.size], [{0, 1}, {0}, {1}, {0}]
    uses = [*alike, *alike, unlike[: r.size], [{0, 1}, {1}, {0}, {1}][: r.size], *alike, unlike[: r.size]]
    for used in uses:
        for m in (*models, *plains):
            m.zero_grad()
        sum(models[i](x[r.rank]) for i in used[r.rank]).square().sum().div(r.size).backward()
        sum(sum(plains[i](x[rank]) for i in used[rank]).square().sum() / r.size for rank in range(r.size)).backward()
        for model, plain in zip(models, plains, strict=True):
            same(model, plain)
    before = len(r.group.calls)
    models[0](x[r.rank]).square().sum().backward()
    assert [name for name, _ in r.group.calls[before:]] == ["all_gather", "all_reduce_start"]  # a report, one reduction
    models = models[:1]
    del model
    for expected in (
        ["all_gather", "all_reduce_start"],
        ["all_gather_object", "all_reduce_start"],
        ["all_reduce_start"],
    ):
        before = len(r.group.calls)
        models[0](x[r.rank]).square().sum().backward()
        assert [name for name, _ in r.group.calls[before:]] == expected  # a single model needs no report


@case
def frozen_on_some_replicas(r: Replica) -> None:
    models = [r.make(mlp)[0], r.make(mlp)[0]]
    for _ in range(2):
        sum(loss_of(model, r.batch(5)[1], 5) for model in models).backward()
    models[1][0].requires_grad_(r.rank > 0)
    with pytest.raises(
        GradientError, match=r"replica 0 has parameter 0 frozen and replica 1 has parameter 0 as float64"
    ):
        sum(loss_of(model, r.batch(5)[1], 5) for model in models).backward()


@case
def sparse_on_some_replicas_later(r: Replica) -> None:
    """Find no gradient of a table anywhere in the first pass, then a sparse one on one replica, on all, and on none."""
    pairs = [r.make(lambda: nn.Embedding(10, 4, sparse=True)), r.make(lambda: nn.Linear(4, 1))]
    for used in (set(), {r.size - 1}, set(range(r.size)), {0}, set()):
        for pair in pairs:
            pair[0].zero_grad(), pair[1].zero_grad()

        def loss(models: list[nn.Module], rank: int, used: set[int] = used) -> torch.Tensor:
            h = models[0](torch.tensor([rank, 3])) if rank in used else torch.ones(2, 4)
            return models[1](h).square().sum() / r.size

        loss([model for model, _ in pairs], r.rank).backward()
        sum(loss([plain for _, plain in pairs], rank) for rank in range(r.size)).backward()
        for model, plain in pairs:
            same(model, plain)


@case
def a_replaced_layer_on_a_replica_that_never_had_it(r: Replica) -> None:
    """Replace a layer of a trained model, and copy the model to a replacement of a lost replica."""
    model, plain = r.make(mlp)
    other, plain_other = r.make(mlp, seed=3)
    kept = model[2].weight
    for m, x in ((model, r.batch(5)[1]), (plain, r.batch(5)[0])):
        loss_of(m, x, 5).backward()
        torch.manual_seed(1)
        m[2] = nn.Linear(8, 2)
        m.zero_grad()
    r.register(model)
    for m, x in ((model, r.batch(5)[1]), (plain, r.batch(5)[0])):
        loss_of(m, x, 5).backward()
    if r.rank:
        del kept  # replica 0 has not freed it yet
        places = [[find_mirror(each) for each in m.parameters()] for m in (model, other)]
        model, other = copy.deepcopy(model), copy.deepcopy(other)
        r.use()
        for m, its in zip((model, other), places, strict=True):
            m.label = "restored"
            for parameter, mirror in zip(m.parameters(), its, strict=True):
                r.sync.register(parameter, m, at=(mirror.group.identity, mirror.place))
    r.group.generation += 1
    r.sync.meet()
    for seed in range(3):
        for m in (model, plain, other, plain_other):
            m.zero_grad()
        (loss_of(model, r.batch(5, seed=seed)[1], 5) + loss_of(other, r.batch(5)[1], 5)).backward()
        (loss_of(plain, r.batch(5, seed=seed)[0], 5) + loss_of(plain_other, r.batch(5)[0], 5)).backward()
        same(model, plain), same(other, plain_other)
