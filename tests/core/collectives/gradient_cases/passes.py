"""Kinds of backward passes: second order, checkpointing, compiled code, failures, overlapped buckets."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from distnb.collectives.gradients import buckets
from distnb.collectives.gradients.backward_passes import BACKWARD_PASSES
from distnb.errors import GradientError
from tests.core.collectives.gradient_cases.replica import Branches, Replica, case, loss_of, mlp, same


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
def inputs_of_a_pass(r: Replica) -> None:
    model, plain = r.make(mlp)
    for m, x in ((model, r.batch(5)[1]), (plain, r.batch(5)[0])):
        loss_of(m, x, 5).backward(inputs=[m[0].weight])
    same(model, plain)


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
def lazy_modules_that_differ(r: Replica) -> None:
    model = r.register(nn.Sequential(nn.LazyLinear(8)))
    torch.manual_seed(r.rank)
    with pytest.raises(GradientError, match="other values on replica"):
        loss_of(model, r.batch(5)[1], 5).backward()


@case
def models_that_differ(r: Replica) -> None:
    torch.manual_seed(0)
    model = r.register(nn.Linear(4, 2 + (r.rank == 1)))
    with pytest.raises(GradientError, match=r"do not look alike.*replica 1 has parameter 0 as float64\[3, 4\]"):
        loss_of(model, r.batch(6)[1], 6).backward()


@case
def large_models_reached_on_some_replicas(r: Replica) -> None:
    """Start their buckets during the pass only if the replicas reach them alike."""
    BACKWARD_PASSES.nesting_seen = False  # by another case
    old = buckets.OVERLAP_NBYTES, buckets.BUCKET_NBYTES
    buckets.OVERLAP_NBYTES, buckets.BUCKET_NBYTES = {"cpu": 900, "cuda": 0}, {"cpu": 300, "cuda": 0}
    try:
        deep = lambda: nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.Tanh())])  # noqa: E731
        pairs = [r.make(deep, 0), r.make(deep, 1), r.make(lambda: nn.Linear(4, 4), 2)]
        x = r.batch(r.size)[0]
        orders = [(0, 1), (0, 1), (1, 0), (1,), (0,), (0, 2), (1, 0, 2), (2, 1)]
        for step in range(24):
            # The first rounds are alike on all replicas; in the others each replica takes another order.
            order = [orders[(step + (rank if step > 7 else 0) * (1 + step // 16)) % 8] for rank in range(r.size)]
            for pair in pairs:
                pair[0].zero_grad(), pair[1].zero_grad()

            def loss(which: int, rank: int, order: list[tuple[int, ...]] = order, step: int = step) -> torch.Tensor:
                h = x[rank]
                for index in order[rank]:
                    h = pairs[index][which](h)
                    if index == 1 and step % 5 == rank:
                        h = h + pairs[0][which][2](h)  # between the layers of the other model
                return h.square().sum() / r.size

            before = len(r.group.calls)
            loss(0, r.rank).backward()
            names = [name for name, _ in r.group.calls[before:]]
            sum(loss(1, rank) for rank in range(r.size)).backward()
            for model, plain in pairs:
                same(model, plain)
            if step == 1:  # a report before each model's buckets, and at the end
                assert names == ["all_gather", *["all_reduce_start"] * 3] * 2 + ["all_gather"], names
    finally:
        buckets.OVERLAP_NBYTES, buckets.BUCKET_NBYTES = old


@case
def large_models_overlap(r: Replica) -> None:
    old = buckets.OVERLAP_NBYTES, buckets.BUCKET_NBYTES
    buckets.OVERLAP_NBYTES, buckets.BUCKET_NBYTES = {"cpu": 900, "cuda": 0}, {"cpu": 300, "cuda": 0}
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
            names = [name for name, _ in r.group.calls[before:]]
            loss_of(plain, r.batch(5, seed=step)[0], 5).backward()
            same(model, plain)
            if step == 1:
                assert names == ["all_gather", *["all_reduce_start"] * 3, "all_gather"], names  # between reports
            which = ["lr", "l", "r"][(step + r.rank) % 3]
            x = r.batch(r.size)[0]
            (branches(x[r.rank : r.rank + 1], which).square().sum() / r.size).backward()
            for rank in range(r.size):
                which = ["lr", "l", "r"][(step + rank) % 3]
                (plain_branches(x[rank : rank + 1], which).square().sum() / r.size).backward()
            same(branches, plain_branches)
    finally:
        buckets.OVERLAP_NBYTES, buckets.BUCKET_NBYTES = old
