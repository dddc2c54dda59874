"""Every optimizer of torch, with options, schedules and clipping."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import distnb
from tests.conformance.prelude import mse, rows, strategy, train, whole
from tests.conformance.program import EVERYWHERE, Refusal, program

_NOT_ELEMENTWISE = Refusal("OptionError", "sharded.md", "`LBFGS`, `Muon`, `Adafactor` and `SparseAdam` raise an error")

_OPTIMIZERS = {
    "Adadelta": "torch.optim.Adadelta(model.parameters())",
    "Adafactor": "torch.optim.Adafactor(model.parameters(), lr=0.1)",
    "Adagrad": "torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1)",
    "Adam": "torch.optim.Adam(model.parameters(), lr=0.1)",
    "Adam-amsgrad": "torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True, weight_decay=0.1)",
    "Adam-foreach": "torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)",
    "Adam-fused": "torch.optim.Adam(model.parameters(), lr=0.1, fused=True)",
    "Adam-maximize": "torch.optim.Adam(model.parameters(), lr=0.1, maximize=True)",
    "Adam-tensor-lr": "torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))",
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=0.1)",
    "Adamax": "torch.optim.Adamax(model.parameters(), lr=0.1)",
    "ASGD": "torch.optim.ASGD(model.parameters(), lr=0.1, t0=2)",
    "Muon": "torch.optim.Muon([model[0].weight, model[2].weight], lr=0.1)",
    "NAdam": "torch.optim.NAdam(model.parameters(), lr=0.1)",
    "RAdam": "torch.optim.RAdam(model.parameters(), lr=0.1)",
    "RMSprop": "torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True, momentum=0.5)",
    "Rprop": "torch.optim.Rprop(model.parameters(), lr=0.01)",
    "SGD-nesterov": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)",
    "SGD-dampening": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1)",
    "SGD-fused": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)",
    "groups": "torch.optim.Adam([{'params': model[0].parameters(), 'lr': 0.01}, {'params': model[2].parameters()}], lr=0.1)",
}


def _refused(name):
    if name in ("Adafactor", "Muon"):
        return {"refused": {"sharded": replace(_NOT_ELEMENTWISE, alone=True)}}
    return {}


@program(under=EVERYWHERE, cases={name: {"make": text, **_refused(name)} for name, text in _OPTIMIZERS.items()})
def every_optimizer(make):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = eval(make)

    def step(batch):
        x, y = batch
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = train(step, rows(14, 3), rows(14, 2, seed=2))
    return {"losses": losses, "model": whole(model)}


class Normalised(torch.optim.Optimizer):
    """An optimizer of the user that looks at all of its parameters together, and counts."""

    def __init__(self, params):
        super().__init__(params, {"steps": 0})

    def step(self):
        norm = sum(p.grad.square().sum() for group in self.param_groups for p in group["params"]).sqrt()
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                p.data.sub_(0.1 * p.grad / norm)
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)


class Lookahead(torch.optim.Optimizer):
    """An optimizer that steps another one."""

    def __init__(self, params):
        super().__init__(params, {"steps": 0})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.5)

    def step(self):
        before = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.inner.step()
        for p, old in zip(self.param_groups[0]["params"], before, strict=True):
            p.data.lerp_(old, 0.5)
        self.param_groups[0]["steps"] += 1


class Declared(Lookahead):
    is_elementwise = True


_OWN = Refusal(
    "OptionError", "sharded.md", "and so does an optimizer of your own, unless its class declares", alone=True
)


@program(
    cases={
        **{kind.__name__: {"kind": kind.__name__, "refused": {"sharded": _OWN}} for kind in (Normalised, Lookahead)},
        "Declared": {"kind": "Declared"},
    }
)
def optimizers_of_the_users(kind):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = {"Normalised": Normalised, "Lookahead": Lookahead, "Declared": Declared}[kind](model.parameters())

    def step(batch):
        x, y = batch
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    losses = train(step, rows(14, 3), rows(14, 2, seed=2))
    return {"losses": losses, "model": whole(model), "steps": int(optimizer.state_dict()["param_groups"][0]["steps"])}


@program()
def state_of_an_optimizer():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(14, 3), rows(14, 2, seed=2))
    states = optimizer.state_dict()["state"]
    kept = {str(number): {name: value.tolist() for name, value in state.items()} for number, state in states.items()}
    return {"state": kept, "model": whole(model)}


def _expected_counts(replicas):
    return {"counts": [[3.0, 3.0, 3.0]] * replicas}


@program(under=("default", "one_device", "mirrored", "multi_worker", "central_storage"), expected=_expected_counts)
def sparse_adam_counts_every_step():
    with strategy.scope():
        tables = nn.ModuleList(nn.Embedding(20, 5, sparse=True) for _ in range(3))
        optimizer = torch.optim.SparseAdam(list(tables.parameters()), lr=0.01)

    def step(numbers):
        loss = distnb.nn.compute_average_loss(sum(table(numbers).sum((1, 2)) for table in tables))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def counts():
        return torch.tensor([[float(each["step"]) for each in optimizer.state_dict()["state"].values()]])

    train(step, torch.arange(24).view(12, 2) % 20)
    return {"counts": strategy.gather(strategy.run(counts), axis=0).tolist()}


@program(refused={"sharded": replace(_NOT_ELEMENTWISE, alone=True)})
def lbfgs():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def step(batch):
        x, y = batch

        def closure():
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    train(step, rows(10, 3), rows(10, 2, seed=2), batch_size=5)
    return {"model": whole(model)}


_SCHEDULES = {
    "StepLR": "torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)",
    "OneCycleLR": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=6)",
    "CosineAnnealingLR": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)",
    "LambdaLR": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.8**count)",
    "SequentialLR": "torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5), torch.optim.lr_scheduler.StepLR(optimizer, 1)], [2])",
}


@program(cases={name: {"make": text} for name, text in _SCHEDULES.items()})
def every_schedule(make):
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = eval(make)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
        schedule.step()

    train(step, rows(14, 3), rows(14, 2, seed=2))
    return {"model": whole(model)}


_CLIPPING = {
    "norm": "nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
    "norm-1": "nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=1)",
    "norm-inf": "nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float('inf'))",
    "foreach": "nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)",
    "one layer": "nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)",
    "value": "nn.utils.clip_grad_value_(model.parameters(), 0.05)",
    "total": "nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])",
}


@program(cases={name: {"clip": text} for name, text in _CLIPPING.items()})
def clipped_gradients(clip):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        norm = eval(clip)
        optimizer.step()
        return torch.zeros(()) if norm is None else norm / strategy.num_replicas_in_sync

    norms = train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"norms": norms, "model": whole(model)}


@program()
def clipping_with_a_new_head():
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return norm.detach() / strategy.num_replicas_in_sync

    train(step, rows(8, 3), rows(8, 2, seed=2))
    with strategy.scope():
        model[2] = nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = train(step, rows(8, 3), rows(8, 2, seed=2))
    return {"norms": norms, "model": whole(model)}


@program()
def formatted_norm():
    with strategy.scope():
        model = nn.Linear(3, 2)

    def step(batch):
        x, y = batch
        model.zero_grad()
        mse(model(x), y).backward()
        norm = f"{nn.utils.clip_grad_norm_(model.parameters(), 1.0):.4f}"
        return torch.tensor(float(norm) / strategy.num_replicas_in_sync)

    return {"norms": train(step, rows(8, 3), rows(8, 2, seed=2))}


@program(cases={"model": {"scalar": False}, "scalar": {"scalar": True}})
def scaled_gradients(scalar):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        if scalar:
            model.register_parameter("temperature", nn.Parameter(torch.tensor(1.5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = mse(model(x) * (model.temperature if scalar else 1.0), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    train(step, rows(14, 3), rows(14, 2, seed=2))
    return {"model": whole(model), "scale": scaler.get_scale()}


@program(cases={f"{when} {name}": {"when": when, "name": name} for when in ("pre", "post") for name in ("SGD", "Adam")})
def step_hooks(when, name):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)

    def shrink(optimizer, args, options):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.mul_(0.9)

    with strategy.scope():
        getattr(optimizer, f"register_step_{when}_hook")(shrink)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()

    train(step, rows(10, 3), rows(10, 2, seed=2))
    return {"model": whole(model)}
