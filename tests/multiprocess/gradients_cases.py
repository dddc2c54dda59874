"""What gradient sync must hold, case by case; each runs on every replica and compares with one replica's result.

`run_cases()` is the ranks' program (see test_gradients.py).
"""

from __future__ import annotations

import contextlib
import copy
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from distnb.collectives import gradients as module_under_test
from distnb.collectives.gradients import GradientSync, is_mirrored, mark_aggregated
from distnb.errors import GradientError, MeanLossError, UnsyncedGradientError
from tests.multiprocess.gradients_group import NotedGroup

CASES: dict[str, Callable[[Replica], None]] = {}


class Replica:
    """One replica of a test: its group, and the means to compare with one replica on the whole batch."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.sync = GradientSync(lambda: group)

    def use(self, **options: Any) -> GradientSync:
        self.sync.detach()
        self.sync = GradientSync(lambda: self.group, **options)
        return self.sync

    def adopt(self, model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            self.sync.adopt(parameter, model)
        return model

    def make(self, factory: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, nn.Module]:
        """A mirrored model, and the same one that no strategy knows."""
        torch.manual_seed(seed)
        model = factory()
        plain = copy.deepcopy(model)
        return self.adopt(model), plain

    def batch(self, count: int, width: int = 4, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """(whole batch, this replica's slice): contiguous, sizes differing by one at most."""
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(count, width, generator=generator)
        sizes = [count // self.size + (r < count % self.size) for r in range(self.size)]
        start = sum(sizes[: self.rank])
        return whole, whole[start : start + sizes[self.rank]]


def case(function: Callable[[Replica], None]) -> Callable[[Replica], None]:
    CASES[function.__name__] = function
    return function


def same(model: nn.Module, plain: nn.Module, what: str = "gradients") -> None:
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        x, y = (a.grad, b.grad) if what == "gradients" else (a, b)
        assert (x is None) == (y is None), f"{name}: {x} instead of {y}"
        if x is not None and y is not None:
            x, y = x.detach().to_dense(), y.detach().to_dense()
            error = (x - y).abs().max() / y.abs().max().clamp(min=1e-30) if x.numel() else torch.tensor(0.0)
            assert error <= 1e-12, f"{name}: relative error {error:.3g}"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, x: torch.Tensor, count: int) -> torch.Tensor:
    return model(x).square().sum() / count


# -- the plain cases --------------------------------------------------------------------------------------------------


@case
def sum_of_gradients(r: Replica) -> None:
    model, plain = r.make(mlp)
    for optimizer_type in (torch.optim.SGD, torch.optim.Adam):
        ours, reference = optimizer_type(model.parameters(), lr=0.1), optimizer_type(plain.parameters(), lr=0.1)
        for step in range(4):
            count = 7 + step
            whole, part = r.batch(count, seed=step)
            for m, o, x in ((model, ours, part), (plain, reference, whole)):
                o.zero_grad()
                loss_of(m, x, count).backward()
                o.step()
            same(model, plain)
        same(model, plain, "values")


@case
def zero_in_place_and_kept_gradients(r: Replica) -> None:
    model, plain = r.make(mlp)
    kept = []
    for step in range(5):
        whole, part = r.batch(6, seed=step)
        for m, x in ((model, part), (plain, whole)):
            m.zero_grad(set_to_none=step % 2 == 0)
            loss_of(m, x, 6).backward()
        same(model, plain)
        if step % 2 == 0:
            kept.append([(p.grad, q.grad.clone()) for p, q in zip(model.parameters(), plain.parameters(), strict=True)])
        if step % 2 == 0 and step:
            kept.append(
                [
                    (p.grad[:1].detach(), q.grad[:1].clone())
                    for p, q in zip(model.parameters(), plain.parameters(), strict=True)
                ]
            )
        if step % 2:
            kept.clear()
    model.zero_grad(), plain.zero_grad()
    loss_of(model, r.batch(6)[1], 6).backward()
    for pairs in kept:
        for ours, reference in pairs:
            assert torch.allclose(ours, reference, rtol=1e-12, atol=1e-15), "a kept gradient was overwritten"


@case
def steady_state_is_one_collective(r: Replica) -> None:
    model, _ = r.make(mlp)
    for step in range(4):
        model.zero_grad()
        before = len(r.group.calls)
        loss_of(model, r.batch(6)[1], 6).backward()
        if step:
            assert [name for name, _ in r.group.calls[before:]] == ["all_reduce"]
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 1, "gradients are views of one flat tensor"
    model.zero_grad()
    loss_of(model, r.batch(6)[1], 6).backward()
    assert storages == {p.grad.untyped_storage().data_ptr() for p in model.parameters()}, (
        "the flat tensor is used again"
    )


@case
def accumulation_of_two_synced_passes(r: Replica) -> None:
    model, plain = r.make(mlp)
    for _ in range(2):
        for seed in range(3):
            whole, part = r.batch(5, seed=seed)
            identities = [id(p.grad) for p in model.parameters()]
            loss_of(model, part, 5).backward()
            loss_of(plain, whole, 5).backward()
            same(model, plain)
            if seed:
                assert identities == [id(p.grad) for p in model.parameters()]
        model.zero_grad(), plain.zero_grad()


@case
def no_sync_accumulation(r: Replica) -> None:
    model, plain = r.make(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for set_to_none in (True, False, True):
        before = len(r.group.calls)
        with r.sync.no_sync():
            for seed in range(2):
                loss_of(model, r.batch(5, seed=seed)[1], 5).backward()
        assert len(r.group.calls) == before
        loss_of(model, r.batch(5, seed=2)[1], 5).backward()
        for seed in range(3):
            loss_of(plain, r.batch(5, seed=seed)[0], 5).backward()
        same(model, plain)
        loss_of(model, r.batch(5, seed=3)[1], 5).backward()  # the summed part is not summed again
        loss_of(plain, r.batch(5, seed=3)[0], 5).backward()
        same(model, plain)
        optimizer.step()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        model.zero_grad(set_to_none=set_to_none), plain.zero_grad(set_to_none=set_to_none)


@case
def no_sync_after_a_synced_pass(r: Replica) -> None:
    model, plain = r.make(mlp)
    loss_of(model, r.batch(5, seed=0)[1], 5).backward()
    with r.sync.no_sync():
        loss_of(model, r.batch(5, seed=1)[1], 5).backward()
        loss_of(model, r.batch(5, seed=2)[1], 5).backward()
    loss_of(model, r.batch(5, seed=3)[1], 5).backward()
    for seed in range(4):
        loss_of(plain, r.batch(5, seed=seed)[0], 5).backward()
    same(model, plain)
    with r.sync.no_sync():
        loss_of(model, r.batch(5, seed=1)[1], 5).backward()
    model.zero_grad(set_to_none=False), plain.zero_grad(set_to_none=False)
    loss_of(model, r.batch(5, seed=2)[1], 5).backward()
    loss_of(plain, r.batch(5, seed=2)[0], 5).backward()
    same(model, plain)
    with r.sync.no_sync():
        loss_of(model, r.batch(5, seed=1)[1], 5).backward()
    for p in model.parameters():
        p.grad.mul_(0.5)
    with pytest.raises(GradientError, match="changed by hand"):
        loss_of(model, r.batch(5, seed=2)[1], 5).backward()


@case
def empty_slices(r: Replica) -> None:
    model, plain = r.make(mlp)
    whole, part = r.batch(1)
    assert len(part) == (1 if r.rank == 0 else 0)
    loss_of(model, part, 1).backward()
    loss_of(plain, whole, 1).backward()
    same(model, plain)


# -- which parameters take part ---------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.never = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        h = self.stem(x)
        if "l" in which:
            h = h + self.left(h)
        if "r" in which:
            h = h + self.right(h)
        return h


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
    r.adopt(model)
    for _ in range(3):
        before = len(r.group.calls)
        loss_of(model, r.batch(5)[1], 5).backward()
        loss_of(plain, r.batch(5)[0], 5).backward()
        same(model, plain)
    assert r.group.calls[before:] == [("all_reduce", 8 * 3 + 4 + 2 + 1)]  # padded, flags, weight


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
    r.adopt(generator), r.adopt(discriminator)
    for step in range(3):
        whole, part = r.batch(6, seed=step)
        for m in (generator, discriminator, pg, pd):
            m.zero_grad()
        before = len(r.group.calls)
        (discriminator(generator(part).detach()).square().sum() / 6).backward()
        calls = r.group.calls[before:]
        (pd(pg(whole).detach()).square().sum() / 6).backward()
        same(discriminator, pd), same(generator, pg)
        assert step == 0 or calls == [("all_reduce", 4 + 2 + 2 + 1)], calls  # only the discriminator's
        (discriminator(generator(part)).square().sum() / 6).backward()
        (pd(pg(whole)).square().sum() / 6).backward()
        same(discriminator, pd), same(generator, pg)


@case
def models_reached_on_some_replicas(r: Replica) -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(4, 1), nn.Linear(4, 1)
    pa, pb = copy.deepcopy(a), copy.deepcopy(b)
    r.adopt(a), r.adopt(b)
    x = r.batch(r.size)[0]
    for _ in range(2):
        for m in (a, b, pa, pb):
            m.zero_grad()
        mine = x[r.rank : r.rank + 1]
        (a(mine) + (b(mine) if r.rank else 0)).square().sum().div(r.size).backward()
        sum((pa(x[i]) + (pb(x[i]) if i else 0)).square().sum() / r.size for i in range(r.size)).backward()
        same(a, pa), same(b, pb)


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


# -- kinds of backward pass -------------------------------------------------------------------------------------------


@case
def retained_graph(r: Replica) -> None:
    model, plain = r.make(mlp)
    for m, x in ((model, r.batch(5)[1]), (plain, r.batch(5)[0])):
        loss = loss_of(m, x, 5)
        loss.backward(retain_graph=True)
        loss.backward()
    same(model, plain)


@case
def gradient_penalty(r: Replica) -> None:
    model, plain = r.make(mlp)
    for m, x in ((model, r.batch(5)[1]), (plain, r.batch(5)[0])):
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        (g.square().sum() / 5).backward()
    same(model, plain)


@case
def second_order(r: Replica) -> None:
    model, plain = r.make(mlp)
    for m, x, share in ((model, r.batch(5)[1], r.size), (plain, r.batch(5)[0], 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_of(m, x, 5).backward(create_graph=True)
        norm = sum(p.grad.square().sum() for p in m.parameters())
        for p in m.parameters():
            p.grad = None
        (norm / share).backward()
    same(model, plain)


@case
def checkpointing(r: Replica) -> None:
    for reentrant in (False, True):
        model, plain = r.make(mlp)
        for _ in range(2):
            for m, x in ((model, r.batch(5)[1]), (plain, r.batch(5)[0])):
                m.zero_grad()
                h = checkpoint(m[0], x.clone().requires_grad_(), use_reentrant=reentrant)
                (
                    checkpoint(lambda t, m=m: m[2](torch.tanh(t)), h, use_reentrant=reentrant).square().sum() / 5
                ).backward()
            same(model, plain)


@case
def compiled(r: Replica) -> None:
    model, plain = r.make(mlp)
    fast = torch.compile(model, backend="aot_eager")
    for seed in range(2):
        model.zero_grad(), plain.zero_grad()
        loss_of(fast, r.batch(r.size * 2, seed=seed)[1], r.size * 2).backward()
        loss_of(plain, r.batch(r.size * 2, seed=seed)[0], r.size * 2).backward()
        same(model, plain)


@case
def compiled_step(r: Replica) -> None:
    model, plain = r.make(mlp)

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor) -> None:
        loss_of(model, x, r.size * 2).backward()

    for seed in range(2):
        model.zero_grad(), plain.zero_grad()
        step(r.batch(r.size * 2, seed=seed)[1])
        loss_of(plain, r.batch(r.size * 2, seed=seed)[0], r.size * 2).backward()
        same(model, plain)


@case
def torch_autograd_backward(r: Replica) -> None:
    from torch.autograd import backward  # a name taken before the sync was made works as well

    model, plain = r.make(mlp)
    backward([loss_of(model, r.batch(5)[1], 5), model[0].weight.sum() / r.size])
    backward([loss_of(plain, r.batch(5)[0], 5), plain[0].weight.sum()])
    same(model, plain)


@case
def inputs_of_a_pass(r: Replica) -> None:
    model, plain = r.make(mlp)
    for m, x in ((model, r.batch(5)[1]), (plain, r.batch(5)[0])):
        loss_of(m, x, 5).backward(inputs=[m[0].weight])
    same(model, plain)


@case
def clipping_and_scaler(r: Replica) -> None:
    model, plain = r.make(mlp)
    for m, x in ((model, r.batch(5)[1]), (plain, r.batch(5)[0])):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(m, x, 5)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    same(model, plain), same(model, plain, "values")


@case
def deepcopy_is_not_mirrored(r: Replica) -> None:
    model, _ = r.make(mlp)
    average = copy.deepcopy(model)
    assert is_mirrored(model[0].weight)
    assert not is_mirrored(average[0].weight)
    before = len(r.group.calls)
    loss_of(average, r.batch(5)[1], 5).backward()
    assert len(r.group.calls) == before
    torch.optim.SGD(average.parameters(), lr=0.1).step()


@case
def a_failing_pass_changes_nothing(r: Replica) -> None:
    model, plain = r.make(mlp)
    for m, x in ((model, r.batch(5)[1]), (plain, r.batch(5)[0])):
        loss_of(m, x, 5).backward()

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        model[2](Boom.apply(model[0](r.batch(5)[1]))).sum().backward()
    same(model, plain)
    loss_of(model, r.batch(5, seed=2)[1], 5).backward()
    loss_of(plain, r.batch(5, seed=2)[0], 5).backward()
    same(model, plain)


@case
def lazy_modules(r: Replica) -> None:
    torch.manual_seed(0)
    model = r.adopt(nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3)))
    torch.manual_seed(0)
    model(torch.zeros(1, 4))
    plain = copy.deepcopy(model)
    for _ in range(2):
        loss_of(model, r.batch(5)[1], 5).backward()
        loss_of(plain, r.batch(5)[0], 5).backward()
        same(model, plain)
    other = r.adopt(nn.Sequential(nn.LazyLinear(8)))
    torch.manual_seed(r.rank)
    with pytest.raises(GradientError, match="other values on replica"):
        loss_of(other, r.batch(5)[1], 5).backward()


@case
def models_that_differ(r: Replica) -> None:
    torch.manual_seed(0)
    model = r.adopt(nn.Linear(4, 2 + (r.rank == 1)))
    with pytest.raises(GradientError, match=r"do not look alike.*replica 1 has parameter 0 as float64\[3, 4\]"):
        loss_of(model, r.batch(6)[1], 6).backward()


@case
def large_models_overlap(r: Replica) -> None:
    old = module_under_test.OVERLAP_NBYTES, module_under_test.BUCKET_NBYTES
    module_under_test.OVERLAP_NBYTES, module_under_test.BUCKET_NBYTES = {"cpu": 900, "cuda": 0}, {"cpu": 300, "cuda": 0}
    try:
        deep = lambda: nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.Tanh())])  # noqa: E731
        model, plain = r.make(deep)
        branches, plain_branches = r.make(Branches)
        for step in range(6):
            if step == 4:
                for m in (model, plain):
                    m[4].requires_grad_(False)
            if step == 5:
                for m in (model, plain):
                    m[4].requires_grad_(True)
            if step != 3:  # accumulates once
                for m in (model, plain, branches, plain_branches):
                    m.zero_grad()
            if step == 2:
                with r.sync.no_sync():
                    loss_of(model, r.batch(5, seed=9)[1], 5).backward()
                loss_of(plain, r.batch(5, seed=9)[0], 5).backward()
            before = len(r.group.calls)
            loss_of(model, r.batch(5, seed=step)[1], 5).backward()
            loss_of(plain, r.batch(5, seed=step)[0], 5).backward()
            same(model, plain)
            if step == 1:
                names = [name for name, _ in r.group.calls[before:]]
                assert set(names) == {"all_reduce_start"}, names
                assert len(names) > 1, names
            which = ["lr", "l", "r"][(step + r.rank) % 3]
            x = r.batch(r.size)[0]
            (branches(x[r.rank : r.rank + 1], which).square().sum() / r.size).backward()
            for rank in range(r.size):
                which = ["lr", "l", "r"][(step + rank) % 3]
                (plain_branches(x[rank : rank + 1], which).square().sum() / r.size).backward()
            same(branches, plain_branches)
    finally:
        module_under_test.OVERLAP_NBYTES, module_under_test.BUCKET_NBYTES = old


# -- the mean -------------------------------------------------------------------------------------------------------


def _mean_case(r: Replica, known: bool) -> None:
    sync = r.use(reduction="mean")
    model, plain = r.make(mlp)
    for count in (r.size * 2, r.size + 1, 1):
        whole, part = r.batch(count)
        sync.weight(len(part), count if known else None)
        model.zero_grad(), plain.zero_grad()
        model(part).square().mean().backward()
        plain(whole).square().mean().backward()
        same(model, plain)
    sync.weight(None)
    model.zero_grad(), plain.zero_grad()
    model(r.batch(r.size)[1]).square().mean().backward()
    plain(r.batch(r.size)[0]).square().mean().backward()
    same(model, plain)


@case
def mean_with_known_total(r: Replica) -> None:
    _mean_case(r, known=True)


@case
def mean_with_unknown_total(r: Replica) -> None:
    _mean_case(r, known=False)


@case
def mean_with_no_sync(r: Replica) -> None:
    sync = r.use(reduction="mean")
    model, plain = r.make(mlp)
    for counts in ((r.size + 1, 2 * r.size, 2 * r.size + 1), (r.size, 2 * r.size, r.size)):
        model.zero_grad(), plain.zero_grad()
        for i, count in enumerate(counts):
            whole, part = r.batch(count, seed=i)
            sync.weight(len(part), count)
            with sync.no_sync() if i < 2 else contextlib.nullcontext():
                model(part).square().mean().backward()
            plain(whole).square().mean().backward()
        same(model, plain)


@case
def mean_in_low_precision(r: Replica) -> None:
    sync = r.use(reduction="mean")
    model, plain = r.make(lambda: nn.Linear(4, 2, dtype=torch.bfloat16))
    whole, part = r.batch(r.size * 700 + 1)
    sync.weight(len(part))
    model(part.bfloat16()).square().mean().backward()
    plain.double()(whole.bfloat16().double()).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() / q.grad.abs().max() < 0.03


# -- errors ---------------------------------------------------------------------------------------------------------


@case
def mean_losses_are_errors(r: Replica) -> None:
    model, _ = r.make(mlp)
    target = torch.zeros(2, dtype=torch.long)
    x = r.batch(r.size * 2)[1]
    for loss in (
        lambda: F.cross_entropy(model(x), target),
        lambda: F.mse_loss(model(x), torch.zeros(2, 3)),
        lambda: model(x).square().mean(),
        lambda: model(x).square().sum(1).mean(0),
        lambda: 0.3 * F.smooth_l1_loss(model(x), torch.zeros(2, 3)) + model(x).sum() / (2 * r.size),
        lambda: torch.stack([F.mse_loss(model(x), torch.zeros(2, 3)), model(x).sum()]).mean(),
        lambda: model(x).square().mean().sqrt(),
        lambda: torch.amp.GradScaler("cpu").scale(model(x).square().mean()),
    ):
        model.zero_grad()
        with pytest.raises(
            MeanLossError,
            match=rf"line \d+: loss\(\).backward\(\).*about {r.size} times.*compute_average_loss.*gradient_reduction='mean'",
        ):
            loss().backward()
        assert model[0].weight.grad is None
    r.sync.weight(7, 7 * r.size)
    with pytest.raises(MeanLossError, match="a sum divided by 7"):
        (F.cross_entropy(model(x), target, reduction="sum") / 7).backward()
    r.sync.weight(None)


@case
def losses_that_are_no_means(r: Replica) -> None:
    model, _ = r.make(mlp)
    outside = nn.Linear(4, 1)
    x = r.batch(r.size * 2)[1]
    count = 2 * r.size
    losses = [
        lambda: model(x).square().sum() / count,
        lambda: model(x).square().mean() / r.size,
        lambda: (model(x).square().mean() + model(x).abs().mean()) * (1 / r.size),
        lambda: model(x / x.mean()).mean(dim=1).sum() / count,
        lambda: F.layer_norm(model(x), (3,)).sum() / count,
        lambda: torch.stack([model(x).sum() / count, model(x).square().sum() / count]).mean(),
        lambda: model(x).mean(dim=(0, 1)).div(r.size),
        lambda: outside(x).mean(),
    ]
    for loss in losses:
        model.zero_grad()
        loss().backward()
    with torch.no_grad():
        model(x).mean()
    one = r.batch(r.size)[1]
    (nn.Linear(4, 1)(one) * model(one).mean(dim=1)).sum().div(r.size).backward()
    r.use(check_mean_loss=False)
    model, _ = r.make(mlp)
    model(x).mean().backward()


@case
def unsynced_steps_are_errors(r: Replica) -> None:
    model, _ = r.make(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def by_hand() -> None:
        found = torch.autograd.grad(loss_of(model, r.batch(5)[1], 5), list(model.parameters()))
        for p, g in zip(model.parameters(), found, strict=True):
            p.grad = g

    by_hand()
    with pytest.raises(UnsyncedGradientError, match=r"SGD.step\(\) on gradients of 4 mirrored.*all_reduce"):
        optimizer.step()
    for p in model.parameters():
        r.group.all_reduce(p.grad)
        mark_aggregated(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, r.batch(5)[1], 5).backward()
    for p in model.parameters():
        p.grad = p.grad * 0.5  # made from an aggregated one
    optimizer.step()
    by_hand()
    with pytest.raises(UnsyncedGradientError):
        optimizer.step()
    loss_of(model, r.batch(5)[1], 5).backward()  # on top of what was never aggregated
    with pytest.raises(UnsyncedGradientError):
        optimizer.step()
    optimizer.zero_grad()
    with r.sync.no_sync():
        loss_of(model, r.batch(5)[1], 5).backward()
    with pytest.raises(UnsyncedGradientError, match="under no_sync"):
        optimizer.step()
    loss_of(model, r.batch(5)[1], 5).backward()
    optimizer.step()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    loss_of(model, r.batch(5)[1], 5).backward()
    optimizer.step()
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=1).step()


@case
def wrapping_is_refused(r: Replica) -> None:
    model, _ = r.make(mlp)
    with pytest.raises(GradientError, match="DistributedDataParallel was given a Sequential"):
        nn.parallel.DistributedDataParallel(model)
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    wrapped(r.batch(5)[1]).sum().backward()


@case
def a_new_generation_agrees_anew(r: Replica) -> None:
    model, plain = r.make(mlp)
    loss_of(model, r.batch(5)[1], 5).backward()
    r.group.generation += 1
    model.zero_grad()
    before = len(r.group.calls)
    loss_of(model, r.batch(5)[1], 5).backward()
    loss_of(plain, r.batch(5)[0], 5).backward()
    same(model, plain)
    assert r.group.calls[before][0] == "all_gather_object"


@case
def a_half_done_step_is_healed(r: Replica) -> None:
    model, plain = r.make(mlp)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    for m, o, x in ((model, optimizer, r.batch(5)[1]), (plain, reference, r.batch(5)[0])):
        loss_of(m, x, 5).backward()
        o.step()
        loss_of(m, x, 5).backward()
        if m is plain or r.rank == 0:  # the others were interrupted before it
            o.step()
            o.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        r.sync.heal()
        r.sync.heal()
    assert len(caught) == 1
    assert "Sequential 1's parameters and gradients (to None), Adam's state" in str(caught[0].message)
    for m, o, x in ((model, optimizer, r.batch(5)[1]), (plain, reference, r.batch(5)[0])):
        loss_of(m, x, 5).backward()
        o.step()
    same(model, plain)
    same(model, plain, "values")


@case
def nothing_is_kept_alive(r: Replica) -> None:
    import gc
    import weakref

    model, _ = r.make(mlp)
    loss_of(model, r.batch(5)[1], 5).backward()
    flat = weakref.ref(r.sync._entries[tuple(r.sync._families)].plans[0])
    watched = [weakref.ref(p) for p in model.parameters()]
    families = len(r.sync._families)
    gc.disable()
    try:
        del model
        assert all(ref() is None for ref in watched)
        assert len(r.sync._families) == families - 1
    finally:
        gc.enable()
    gc.collect()
    assert flat() is None


def run_cases() -> dict[str, str | None]:
    """Every case on this replica: its name, and the traceback if it failed."""
    torch.set_default_dtype(torch.float64)
    wanted = os.environ.get("DISTNB_TEST_CASES", "")
    group = NotedGroup()
    results: dict[str, str | None] = {}
    for name, function in CASES.items():
        if wanted and name not in wanted.split(","):
            continue
        replica = Replica(group)
        print(name, flush=True)
        try:
            function(replica)
            results[name] = None
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
            print(results[name], flush=True)
        replica.sync.detach()
        outcome = group.all_gather_object(results[name])
        if any(outcome):
            results[name] = "\n".join(f"replica {i}: {text}" for i, text in enumerate(outcome) if text)
    return results
