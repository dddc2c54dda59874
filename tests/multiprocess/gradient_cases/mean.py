"""Gradients averaged over the global batch."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from tests.multiprocess.gradient_cases.replica import Replica, case, mlp, same


@case
def mean_weighted_by_slices(r: Replica) -> None:
    sync = r.use(reduction="mean")
    model, plain = r.make(mlp)
    for count in (r.size * 2, r.size + 1, 1):
        whole, part = r.batch(count)
        sync.weight(len(part), count)
        model.zero_grad(), plain.zero_grad()
        model(part).square().mean().backward()
        plain(whole).square().mean().backward()
        same(model, plain)
    sync.weight(None, None)
    model.zero_grad(), plain.zero_grad()
    model(r.batch(r.size)[1]).square().mean().backward()
    plain(r.batch(r.size)[0]).square().mean().backward()
    same(model, plain)


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
    sync.weight(len(part), len(whole))
    model(part.bfloat16()).square().mean().backward()
    plain.double()(whole.bfloat16().double()).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() / q.grad.abs().max() < 0.03
