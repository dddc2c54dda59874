"""Mean losses, steps on gradients that were never aggregated, wrapping, resynchronisation and lifetime."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distnb.collectives.gradients.parameter_groups import AGGREGATED, find_mirror
from distnb.errors import GradientError, MeanLossError, UnsyncedGradientError
from distnb.runtime.consistency.resynchronisation import resynchronise
from tests.core.collectives.gradient_cases.replica import Replica, case, loss_of, mlp, same


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
    r.sync.weight(None, None)


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
        AGGREGATED.add(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, r.batch(5)[1], 5).backward()
    for p in model.parameters():
        p.grad = p.grad * 0.5  # made from an aggregated one
    optimizer.step()
    by_hand()
    with pytest.raises(UnsyncedGradientError):
        optimizer.step()
    with pytest.raises(UnsyncedGradientError, match="made by hand"):
        loss_of(model, r.batch(5)[1], 5).backward()  # in addition to gradients that were never aggregated
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
def a_new_generation_agrees_again(r: Replica) -> None:
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
def a_half_done_step_is_made_equal(r: Replica) -> None:
    model, plain = r.make(mlp)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    for m, o, x in ((model, optimizer, r.batch(5)[1]), (plain, reference, r.batch(5)[0])):
        loss_of(m, x, 5).backward()
        o.step()
        loss_of(m, x, 5).backward()
        if m is plain or r.rank == 0:  # the others were interrupted before this step
            o.step()
            o.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resynchronise(r.group, r.sync.groups)
        resynchronise(r.group, r.sync.groups)
    assert len(caught) == 1
    assert "Sequential 1's parameters and gradients (to None), Adam's state" in str(caught[0].message)
    for m, o, x in ((model, optimizer, r.batch(5)[1]), (plain, reference, r.batch(5)[0])):
        loss_of(m, x, 5).backward()
        o.step()
    same(model, plain)
    same(model, plain, "values")


@case
def a_replacement_of_a_lost_replica(r: Replica) -> None:
    """Give a replacement replica copies of some models in a different order, with the places that identify them."""
    pairs = [r.make(mlp, seed) for seed in range(3)]
    kept = [pairs[2], pairs[0]]
    if r.rank:
        places = [[find_mirror(each) for each in model.parameters()] for model, _ in kept]
        kept = [(copy.deepcopy(model), plain) for model, plain in kept]
        r.use()
        for (model, _), its in zip(kept, places, strict=True):
            model.label = "restored"
            for parameter, mirror in reversed(list(zip(model.parameters(), its, strict=True))):
                r.sync.register(parameter, model, at=(mirror.group.identity, mirror.place))
    for model, plain in kept:
        loss_of(model, r.batch(5)[1], 5).backward()
        loss_of(plain, r.batch(5)[0], 5).backward()
        same(model, plain)


@case
def copies_without_gradients_get_them(r: Replica) -> None:
    """Keras's copies of a model lack them. Nobody was interrupted, so nothing is reset and there is no warning."""
    model, plain = r.make(mlp)
    torch.optim.Adam(model.parameters())  # of which the new replica has no copy
    loss_of(model, r.batch(5)[1], 5).backward()
    loss_of(plain, r.batch(5)[0], 5).backward()
    if r.rank == r.size - 1:
        places = [find_mirror(each) for each in model.parameters()]
        model = copy.deepcopy(model)
        model.zero_grad()
        model.label = "restored"
        r.use()
        for parameter, mirror in zip(model.parameters(), places, strict=True):
            r.sync.register(parameter, model, at=(mirror.group.identity, mirror.place))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resynchronise(r.group, r.sync.groups)
    same(model, plain)
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # they count as aggregated
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    same(model, plain, "values")


@case
def nothing_is_kept_alive(r: Replica) -> None:
    model, _ = r.make(mlp)
    loss_of(model, r.batch(5)[1], 5).backward()
    flat = weakref.ref(next(iter(r.sync._entries.values())).plans[0])
    watched = [weakref.ref(p) for p in model.parameters()]
    groups = len(r.sync.groups)
    gc.disable()
    try:
        del model
        assert all(ref() is None for ref in watched)
        assert len(r.sync.groups) == groups - 1
    finally:
        gc.enable()
    gc.collect()
    assert flat() is None
