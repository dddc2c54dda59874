"""Sums, accumulation, and handling of old gradients."""

from __future__ import annotations

import pytest
import torch

from distnb.errors import GradientError
from tests.core.collectives.gradient_cases.replica import Replica, case, loss_of, mlp, same


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
            assert [name for name, _ in r.group.calls[before:]] == ["all_reduce_start"]
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 1, "gradients are views of one flat tensor"
    model.zero_grad()
    loss_of(model, r.batch(6)[1], 6).backward()
    assert storages == {p.grad.untyped_storage().data_ptr() for p in model.parameters()}, (
        "the flat tensor is used again"
    )


@case
def no_sync_after_a_synced_pass(r: Replica) -> None:
    model, plain = r.make(mlp)
    loss_of(model, r.batch(5, seed=0)[1], 5).backward()
    loss_of(plain, r.batch(5, seed=0)[0], 5).backward()
    with r.sync.no_sync(), pytest.raises(GradientError, match=r"has a gradient of all replicas.*zero_grad"):
        loss_of(model, r.batch(5, seed=1)[1], 5).backward()
    same(model, plain)
    for set_to_none in (False, True):
        model.zero_grad(set_to_none=set_to_none), plain.zero_grad(set_to_none=set_to_none)
        before = len(r.group.calls)
        with r.sync.no_sync():
            loss_of(model, r.batch(5, seed=1)[1], 5).backward()
        assert len(r.group.calls) == before
        loss_of(plain, r.batch(5, seed=1)[0], 5).backward()
        loss_of(model, r.batch(5, seed=2)[1], 5).backward()
        loss_of(plain, r.batch(5, seed=2)[0], 5).backward()
        same(model, plain)
