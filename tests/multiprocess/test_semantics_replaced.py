"""Mirrored variables, their optimizer and metrics outlive an engine, and stay in sync on its successor."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import distnb
import distnb.session

pytestmark = pytest.mark.timeout(170)


def test_a_replaced_engine_keeps_training() -> None:
    distnb.start(2)
    strategy = distnb.MirroredStrategy()
    session = distnb.session.current()
    names = session.user_ns
    names.update(strategy=strategy, torch=torch, distnb=distnb)
    session.run_cell(
        "with strategy.scope():\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)\n"
        "    metric = distnb.metrics.Mean()\n"
        "def step():\n"
        "    optimizer.zero_grad()\n"
        "    loss = model(torch.full((1, 2), 1.0 + distnb.replica_id())).sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    metric.update(float(distnb.replica_id()))\n"
        "strategy.run(step)\n",
        strategy.spec,
        filename="cell-1",
    )
    try:
        os.kill(session.status()[1].pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while session.status()[1].state == "idle" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert session.restart(missing=True) == (1,)
        session.run_cell(
            "before = model.weight.detach().clone()\n"
            "strategy.run(step)\n"
            "strategy.assert_in_sync([model, optimizer])\n"
            "moved = bool((model.weight != before).all())\n"
            "mean = float(metric.compute())\n",
            strategy.spec,
            filename="cell-2",
        )
        assert names["moved"] is True
        assert names["mean"] == 0.25  # the new replica took over what replica 0 had seen: 0, 0 and 0, 1
    finally:
        distnb.stop()
        for name in ("model", "optimizer", "metric", "step", "before", "moved", "mean", "strategy"):
            names.pop(name, None)
