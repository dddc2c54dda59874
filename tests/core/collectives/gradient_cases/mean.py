"""Gradients averaged over the global batch."""

from __future__ import annotations

import torch
from torch import nn

from tests.core.collectives.gradient_cases.replica import Replica, case


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
