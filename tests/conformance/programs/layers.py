"""Models that change: frozen and thawed parts, replaced, late and removed layers, several optimizers' groups."""

from __future__ import annotations

import torch
from torch import nn

import distnb
from tests.conformance.prelude import mse, rows, strategy, train, whole
from tests.conformance.program import SYNCHRONOUS, Refusal, program


@program()
def frozen_from_the_start():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model[2].parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}


@program()
def frozen_and_thawed():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch, frozen):
        x, y = batch
        for number in (0, 2):
            model[number].requires_grad_(number != frozen)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    batches = strategy.distribute_dataset((rows(20, 3), rows(20, 2, seed=2)), batch_size=4)
    for frozen, batch in zip((None, 0, 0, 2, None), batches, strict=True):
        strategy.run(step, args=(batch, frozen))
    return {"model": whole(model)}


@program(under=("sharded",), cases={str(depth): {"depth": depth} for depth in (0, 1, 3)}, options={"min_size": "0"})
def units_gathered_in_advance(depth):
    with strategy.scope():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hasattr(model[0], "unshard"):
        for number, unit in enumerate(model):
            unit.set_modules_to_forward_prefetch(list(model[number + 1 : number + 1 + depth]))
            unit.set_modules_to_backward_prefetch(list(model[max(0, number - depth) : number])[::-1])
        model[1].set_reshard_after_forward(depth == 1)

    def step(x):
        optimizer.zero_grad()
        distnb.nn.compute_average_loss(model(x).square().mean(dim=1)).backward()
        optimizer.step()

    train(step, rows(10, 3))
    return {"model": whole(model)}


@program()
def replaced_head():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(8, 3), rows(8, 2, seed=2))
    with strategy.scope():
        model[2] = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(step, rows(8, 3), rows(8, 3, seed=2))
    return {"model": whole(model)}


@program()
def further_block():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(8, 3), rows(8, 3, seed=2))
    with strategy.scope():
        model.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
    train(step, rows(8, 3, seed=3), rows(8, 3, seed=4))
    return {"model": whole(model)}


@program()
def removed_layer():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(8, 3), rows(8, 3, seed=2))
    with strategy.scope():
        del model[2]
    train(step, rows(8, 3, seed=3), rows(8, 3, seed=4))
    return {"model": whole(model)}


@program()
def replaced_parameter():
    with strategy.scope():
        model = nn.Linear(3, 2)
        model.weight = nn.Parameter(torch.ones(2, 3) / 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(8, 3), rows(8, 2, seed=2))
    return {"model": whole(model)}


@program(refused={"sharded": Refusal("ContextError", "sharded.md", "lazy modules raise an error", alone=True)})
def lazy_layers():
    with strategy.scope():
        model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))

    def step(batch):
        x, y = batch
        model.zero_grad()
        mse(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    train(step, rows(8, 3), rows(8, 2, seed=2))
    return {"model": whole(model)}


class Growing(nn.Module):
    """A module that makes its head when it first computes."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), None

    def forward(self, x):
        if self.head is None:
            self.head = nn.Linear(4, 2)
            nn.init.constant_(self.head.weight, 0.1)
            nn.init.zeros_(self.head.bias)
        return self.head(self.body(x).tanh())


@program()
def layers_that_forward_makes():
    with strategy.scope():
        model = Growing()

    def step(batch):
        x, y = batch
        model.zero_grad()
        mse(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    train(step, rows(8, 3), rows(8, 2, seed=2))
    return {"model": whole(model)}


class Lists(nn.Module):
    """Parameters in lists and dicts."""

    def __init__(self):
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.ones(3) * number) for number in range(3)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(3)), "shift": nn.Parameter(torch.zeros(3))})

    def forward(self, x):
        return sum(x * each for each in self.several) * self.named["scale"] + self.named["shift"]


@program()
def parameter_lists():
    with strategy.scope():
        model = Lists()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(8, 3), rows(8, 3, seed=2))
    return {"model": whole(model)}


@program()
def everything_in_the_scope():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            x, y = batch
            loss = mse(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = []
        for batch in strategy.distribute_dataset((rows(10, 3), rows(10, 2, seed=2)), batch_size=4):
            losses.append(float(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)))
    return {"losses": losses, "model": whole(model)}


@program(cases={name: {"evaluation": f"torch.{name}"} for name in ("no_grad", "inference_mode")})
def evaluated_before_training(evaluation):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate(batch):
        x, y = batch
        with eval(evaluation)():
            return mse(model(x), y).clone()

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    before = train(evaluate, rows(8, 3), rows(8, 2, seed=2))
    train(step, rows(8, 3), rows(8, 2, seed=2))
    after = train(evaluate, rows(8, 3), rows(8, 2, seed=2))
    return {"before": before, "after": after, "model": whole(model)}


@program()
def evaluated_in_the_step():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        with torch.no_grad():
            before = mse(model(x), y)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            return before - mse(model(x), y)

    return {"gains": train(step, rows(8, 3), rows(8, 2, seed=2)), "model": whole(model)}


@program()
def evaluated_outside_run():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        with torch.no_grad():
            before = model(rows(2, 3)).tolist()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(8, 3), rows(8, 2, seed=2))
    with strategy.scope(), torch.no_grad():
        after = model(rows(2, 3)).tolist()
    return {"before": before, "after": after, "model": whole(model)}


@program()
def weights_changed_after_a_pass():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            model(x)
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)

    train(step, rows(8, 3), rows(8, 2, seed=2))
    return {"model": whole(model)}


@program()
def loaded_state():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(rows(2, 3))
        plain = {
            "0.weight": torch.ones(4, 3) / 7,
            "0.bias": torch.zeros(4),
            "2.weight": torch.ones(2, 4) / 5,
            "2.bias": torch.ones(2),
        }
        model.load_state_dict(plain)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(8, 3), rows(8, 2, seed=2))
    return {"model": whole(model)}


@program(under=tuple(each for each in SYNCHRONOUS if each != "default"))
def made_by_a_function():
    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        return distnb.nn.compute_average_loss(torch.ones(len(x)))

    shares = train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model), "shares": shares}
