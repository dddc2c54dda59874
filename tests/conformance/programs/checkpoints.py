"""Programs that go on after a pause: with other engines, or from a checkpoint under another strategy."""

from __future__ import annotations

import torch
from torch import nn

import distnb
from tests.conformance.prelude import mse, pause, rows, strategy, train, whole
from tests.conformance.program import program


@program(cases={name: {"optimizer_name": name} for name in ("SGD", "Adam")})
def a_model_and_its_optimizer(optimizer_name):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.05)
    kept = {"model": model, "optimizer": optimizer}

    def step(batch):
        x, y = batch
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    pause()
    train(step, rows(10, 3), rows(10, 2, seed=2))
    pause()
    losses = train(step, rows(10, 3, seed=3), rows(10, 2, seed=4))
    return {"losses": losses, "model": whole(model), "kept": len(kept)}


@program()
def a_schedule_and_a_count():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.LayerNorm(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        count = distnb.Variable(0, synchronization="on_read", aggregation="sum")
    kept = {"model": model, "optimizer": optimizer, "schedule": schedule, "count": count}

    def step(batch):
        x, y = batch
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count.assign_add(7 if distnb.replica_id() == 0 else 0)
        return loss.detach()

    pause()
    train(step, rows(7, 3), rows(7, 2, seed=2))
    strategy.run(schedule.step)
    pause()
    train(step, rows(8, 3, seed=3), rows(8, 2, seed=4))
    return {"model": whole(model), "kept": len(kept), "count": int(count)}


@program()
def a_model_with_changed_layers():
    def step(batch):
        x, y = batch
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(step, rows(8, 3), rows(8, 2, seed=2))
    with strategy.scope():
        model[2] = nn.Linear(4, 3)
        model.append(nn.Linear(3, 2))
    del model[1]
    with strategy.scope():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept = {"model": model, "optimizer": optimizer}
    pause()
    train(step, rows(8, 3), rows(8, 2, seed=2))
    pause()
    train(step, rows(8, 3, seed=3), rows(8, 2, seed=4))
    return {"model": whole(model), "kept": len(kept)}
