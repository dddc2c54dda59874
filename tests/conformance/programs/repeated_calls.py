"""Functions that `run` calls many times, with changes in between. In ordinary cells such calls repeat one another."""

from __future__ import annotations

import torch
from torch import nn

import distnb
from tests.conformance.prelude import rows, strategy, whole
from tests.conformance.program import program

factor, table, history = 1.0, {"shift": 0.0}, []
bias = torch.zeros(1, dtype=torch.float64)


@program()
def arguments_and_changes():
    """Change a number, a dict, a tensor, a mode and the function itself, each between two calls that are alike."""
    with strategy.scope():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch, weight, name):
        output = model(batch) * factor + table["shift"] + bias
        loss = distnb.nn.compute_average_loss(output.square().sum(dim=1)) * weight
        if torch.is_grad_enabled() and name != "evaluate":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    for number, batch in enumerate(strategy.distribute_dataset(rows(120, 3), batch_size=4)):
        result = strategy.run(step, args=(batch, 1.0 + number / 10, "evaluate" if number == 2 else "train"))
        history.append(float(strategy.reduce("sum", result, axis=None)))
        if number == 6:
            factor = 0.5
        if number == 10:
            table["shift"] = 0.25
        if number == 14:
            bias.add_(1)
        if number in (18, 22):
            torch.set_grad_enabled(number == 22)
        if number == 26:

            def step(batch, weight, name):
                return distnb.nn.compute_average_loss(model(batch).sum(dim=1)).detach() * weight

    return {"losses": history, "model": whole(model)}
