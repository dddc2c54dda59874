"""Participating parameters: unused, frozen, shared and sparse ones, several models, dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from distnb.collectives.gradients.parameter_groups import find_mirror
from distnb.errors import GradientError
from tests.core.collectives.gradient_cases.replica import Branches, Replica, case, loss_of, mlp, same


@case
def unused_parameters(r: Replica) -> None:
    model, plain = r.make(Branches)
    for uses in (
        ["lr"] * r.size,
        ["l"] * r.size,
        ["l" if rank % 2 else "r" for rank in range(r.size)],
        ["", *["r"] * (r.size - 1)],
    ):
        model.zero_grad(), plain.zero_grad()
        x = r.batch(r.size)[0]
        (model(x[r.rank : r.rank + 1], uses[r.rank]).square().sum() / r.size).backward()
        sum(plain(x[i : i + 1], uses[i]).square().sum() / r.size for i in range(r.size)).backward()
        same(model, plain)
    assert model.never.weight.grad is None


@case
def unused_on_top_of_old_gradients(r: Replica) -> None:
    model, plain = r.make(Branches)
    x = r.batch(r.size)[0]
    for which in ("lr", "l"):
        (model(x[r.rank : r.rank + 1], which).square().sum() / r.size).backward()
        (plain(x, which).square().sum() / r.size).backward()
        same(model, plain)


@case
def frozen_and_thawed(r: Replica) -> None:
    model, plain = r.make(mlp)
    for step, frozen in enumerate([None, 0, 0, 2, None]):
        for m in (model, plain):
            m.zero_grad()
            for index in (0, 2):
                m[index].requires_grad_(index != frozen)
        whole, part = r.batch(5, seed=step)
        loss_of(model, part, 5).backward()
        loss_of(plain, whole, 5).backward()
        same(model, plain)


@case
def frozen_from_the_start(r: Replica) -> None:
    torch.manual_seed(0)
    model = mlp()
    model[0].requires_grad_(False)
    plain = copy.deepcopy(model)
    r.register(model)
    for _ in range(3):
        before = len(r.group.calls)
        loss_of(model, r.batch(5)[1], 5).backward()
        loss_of(plain, r.batch(5)[0], 5).backward()
        same(model, plain)
    assert r.group.calls[before:] == [("all_reduce_start", 8 * 3 + 4 + 2)]  # with padding and flags


@case
def shared_parameters(r: Replica) -> None:
    def tied() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        net[2].weight = net[0].weight
        return net

    model, plain = r.make(tied)
    for _ in range(2):
        loss_of(model, r.batch(5)[1], 5).backward()
        loss_of(plain, r.batch(5)[0], 5).backward()
        same(model, plain)


@case
def several_models(r: Replica) -> None:
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    pg, pd = copy.deepcopy(generator), copy.deepcopy(discriminator)
    r.register(generator), r.register(discriminator)
    for step in range(3):
        whole, part = r.batch(6, seed=step)
        for m in (generator, discriminator, pg, pd):
            m.zero_grad()
        before = len(r.group.calls)
        (discriminator(generator(part).detach()).square().sum() / 6).backward()
        calls = r.group.calls[before:]
        (pd(pg(whole).detach()).square().sum() / 6).backward()
        same(discriminator, pd), same(generator, pg)
        # A report, and only the discriminator's parameters.
        assert step == 0 or calls == [("all_gather", 4), ("all_reduce_start", 4 + 2 + 2)], calls
        (discriminator(generator(part)).square().sum() / 6).backward()
        (pd(pg(whole)).square().sum() / 6).backward()
        same(discriminator, pd), same(generator, pg)


@case
def models_reached_on_some_replicas(r: Replica) -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(4, 1), nn.Linear(4, 1)
    pa, pb = copy.deepcopy(a), copy.deepcopy(b)
    r.register(a), r.register(b)
    x = r.batch(r.size)[0]
    for step in range(5):
        for m in (a, b, pa, pb):
            m.zero_grad()

        def loss(first: nn.Module, second: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            uses = [(0,), (0, 1), (1,)][(rank + step) % 3] if step else [(0,), (0, 1)][min(rank, 1)]
            return sum((first, second)[i](x[rank]) for i in uses).square().sum() / r.size

        loss(a, b, r.rank).backward()
        sum(loss(pa, pb, rank) for rank in range(r.size)).backward()
        same(a, pa), same(b, pb)


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
    """Find no gradient of a table anywhere in the first pass, and a sparse one on one replica in the second."""
    pairs = [r.make(lambda: nn.Embedding(10, 4, sparse=True)), r.make(lambda: nn.Linear(4, 1))]
    for used in (set(), {r.size - 1}, set(range(r.size))):
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


@case
def several_dtypes(r: Replica) -> None:
    def mixed() -> nn.Module:
        return nn.ModuleList(
            [nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float32), nn.Linear(4, 4, dtype=torch.complex128)]
        )

    model, plain = r.make(mixed)
    for _ in range(2):
        for m, x in ((model, r.batch(6)[1]), (plain, r.batch(6)[0])):
            m.zero_grad()
            h = m[1](m[0](x).float()).to(torch.complex128)
            (m[2](h).abs().square().sum() / 6).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() < 1e-5


@case
def cast_and_loaded(r: Replica) -> None:
    model, plain = r.make(mlp)
    loss_of(model, r.batch(6)[1], 6).backward()
    for m in (model, plain):
        m.zero_grad()
        m.float()
    for _ in range(2):
        for m in (model, plain):
            m.zero_grad()
        loss_of(model, r.batch(6)[1].float(), 6).backward()
        loss_of(plain, r.batch(6)[0].float(), 6).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.grad.dtype is torch.float32
            assert torch.allclose(p.grad, q.grad, rtol=1e-5)
    state = {name: value.double() * 2 for name, value in plain.state_dict().items()}
    for m in (model, plain):
        m.double()
        m.load_state_dict(state)
        m.zero_grad()
    loss_of(model, r.batch(6)[1], 6).backward()
    loss_of(plain, r.batch(6)[0], 6).backward()
    same(model, plain)


@case
def channels_last(r: Replica) -> None:
    def conv() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)

    model, plain = r.make(conv)
    x = torch.randn(r.size * 2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for m, b in ((model, x[2 * r.rank : 2 * r.rank + 2]), (plain, x)):
            m.zero_grad()
            loss_of(m, b, len(x)).backward()
        same(model, plain)
        assert model[0].weight.grad.stride() == model[0].weight.stride()


@case
def sparse_embedding(r: Replica) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1)

    model, plain = r.make(Text)
    tokens = torch.randint(0, 20, (r.size * 3, 5), generator=torch.Generator().manual_seed(0))
    for step in range(3):
        for m, t in ((model, tokens[3 * r.rank : 3 * r.rank + 3]), (plain, tokens)):
            loss_of(lambda t, m=m: m.head(m.words(t)), t, len(tokens)).backward()
        same(model, plain)
        assert model.words.weight.grad.is_sparse
        if step == 1:
            model.zero_grad(), plain.zero_grad()
    optimizer = torch.optim.SparseAdam([model.words.weight], lr=0.1)
    optimizer.step()


@case
def sparse_embedding_used_on_some_replicas(r: Replica) -> None:
    model, plain = r.make(lambda: nn.ModuleList([nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)]))
    for used in ({0}, set(), set(range(r.size))):
        model.zero_grad(), plain.zero_grad()

        def loss(m: nn.Module, rank: int, used: set[int] = used) -> torch.Tensor:
            h = m[0](torch.tensor([rank, 3])) if rank in used else torch.ones(2, 4)
            return m[1](h).square().sum() / r.size

        loss(model, r.rank).backward()
        sum(loss(plain, rank) for rank in range(r.size)).backward()
        same(model, plain)
