"""Parameter servers: what reaches workers and servers of a model and its optimizer, and what a function cannot change."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.conformance.prelude import mse, rows, strategy, train, whole
from tests.conformance.program import Refusal, program

PARTS = {"variable_partitioner": "distnb.partitioners.FixedShardsPartitioner(2)"}
PAGE = "parameter_servers.md"


def steps(model, optimizer, batches=3, seed=1):
    """Take some steps of training, and return the losses."""

    def step(batch):
        x, y = batch
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train(step, rows(4 * batches, 3, seed), rows(4 * batches, 2, seed + 100))


def state(optimizer):
    """Return an optimizer's state as lists."""
    found = optimizer.state_dict()["state"]
    return {str(n): {k: torch.as_tensor(v).tolist() for k, v in kept.items()} for n, kept in found.items()}


# -- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1, "maximize": True},
    "Adagrad": {"initial_accumulator_value": 0.5, "lr_decay": 0.1},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {"t0": 1},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
}


def made(name, options, rate):
    """Return a model and its optimizer, made in a scope."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": rate / 2}]
        optimizer = getattr(torch.optim, name)(groups, lr=rate, **options)
    return model, optimizer


@program(
    under=("parameter_server",),
    tolerance=1e-7,
    cases={
        "whole": {"CHOSEN": [*OPTIMIZERS, "Adafactor"]},
        "in parts": {"CHOSEN": [*OPTIMIZERS], "options": PARTS},
        "Adafactor in parts": {
            "CHOSEN": ["Adafactor"],
            "options": PARTS,
            "refused": {
                "parameter_server": Refusal(
                    "OptionError", PAGE, "if the `variable_partitioner` divides one of their variables", alone=True
                )
            },
        },
    },
)
def every_optimizer():
    found = {}
    for name in CHOSEN:  # noqa: F821
        options = OPTIMIZERS.get(name, {})
        model, optimizer = made(name, options, 0.05)
        losses = steps(model, optimizer)
        kept = state(optimizer)
        other, restored = made(name, options, 0.3)
        other.load_state_dict(model.state_dict())
        restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        losses += steps(other, restored, seed=2)
        found[name] = {"losses": losses, "model": whole(model, other), "state": kept, "restored": state(restored)}
    return found


@program(under=("parameter_server",), cases={"whole": {}, "in parts": {"options": PARTS}})
def one_used_by_some_functions():
    with strategy.scope():
        model = nn.ModuleDict({"left": nn.Linear(3, 2), "right": nn.Linear(3, 2), "never": nn.Linear(3, 2)})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(batch):
        x, uses = batch
        loss = sum(model[name](x).square().sum() for name in ("left", "right") if uses[0] > (name == "left"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    uses = torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0])
    losses = train(step, rows(5, 3), uses, batch_size=1)
    return {"losses": losses, "model": whole(model), "state": state(optimizer)}


@program(under=("parameter_server",))
def two_optimizers_clipping_and_a_penalty():
    with strategy.scope():
        first, second = nn.Linear(3, 4), nn.Linear(4, 2)
        adam = torch.optim.Adam(first.parameters(), lr=0.1)
        sgd = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)

    def step(batch):
        x, y = batch
        x = x.clone().requires_grad_()
        output = second(first(x).tanh())
        [slope] = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = mse(output, y) + slope.square().mean() + sum(each.square().sum() for each in second.parameters())
        adam.zero_grad()
        sgd.zero_grad(set_to_none=False)
        for part in loss.chunk(1) if loss.dim() else [loss]:
            part.backward()
        norm = nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.1)
        adam.step()
        sgd.step()
        return norm

    return {"norms": train(step, rows(12, 3), rows(12, 2, seed=2)), "model": whole(first, second)}


@program(
    under=("parameter_server",),
    cases={
        "sparse": {"SPARSE": True, "NAME": "SparseAdam"},
        "dense": {"SPARSE": False, "NAME": "AdamW"},
        "sparse in parts": {"SPARSE": True, "NAME": "SparseAdam", "options": PARTS},
        "dense in parts": {"SPARSE": False, "NAME": "AdamW", "options": PARTS},
    },
)
def rows_of_a_table():
    with strategy.scope():
        table = nn.Embedding(9, 3, sparse=SPARSE, padding_idx=2)  # noqa: F821
        optimizer = getattr(torch.optim, NAME)(table.parameters(), lr=0.1)  # noqa: F821

    def step(numbers):
        loss = table(numbers).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = train(step, torch.tensor([0, 1, 1, 2, 2, 5, 8, 0, 3, 3, 3, 3]))
    return {"losses": losses, "table": whole(table)}


@program(under=("parameter_server",), cases={"whole": {}, "in parts": {"options": PARTS}})
def a_table_that_is_also_a_matrix():
    with strategy.scope():
        table, head = nn.Embedding(9, 3), nn.Linear(3, 9, bias=False)
        head.weight = table.weight
        model = nn.Sequential(table, head)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(numbers):
        loss = nn.functional.cross_entropy(model(numbers), numbers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = train(step, torch.tensor([0, 1, 1, 2, 2, 5, 8, 0, 3, 3, 3, 3]))
    return {"losses": losses, "model": whole(model)}


@program(under=("parameter_server",), cases={"whole": {}, "in parts": {"options": PARTS}})
def empty_and_scalar_parameters_of_several_dtypes():
    with strategy.scope():
        model = nn.ParameterDict(
            {
                "empty": torch.zeros(0, 3),
                "narrow": torch.zeros(3, 0),
                "scalar": torch.tensor(2.0),
                "row": torch.ones(1, 4),
                "single": torch.ones(3, dtype=torch.float32),
                "brain": torch.ones(3, dtype=torch.bfloat16),
                "complex": torch.ones(3, dtype=torch.complex128),
            }
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)

    def step(x):
        loss = sum(((each * x.mean()) ** 2).abs().sum().double() for each in model.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = train(step, rows(12, 1))
    values = {name: torch.view_as_real(each.detach().cdouble()).tolist() for name, each in model.items()}
    return {"losses": losses, "model": values}


# -- what reaches workers ---------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A layer whose buffers change, in place or by assignment, and which has a number of its own."""

    def __init__(self, assigns):
        super().__init__()
        self.assigns, self.factor = assigns, 1.0
        self.linear = nn.Linear(3, 2)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("odd", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x):
        mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        if self.assigns:
            self.count, self.odd, self.mean = self.count + 1, ~self.odd, mean
        else:
            self.count += 1
            self.odd.logical_not_()
            self.mean.copy_(mean)
        return self.linear(x + self.mean) * self.factor + self.count


@program(under=("parameter_server",), cases={"in place": {"ASSIGNS": False}, "assigned": {"ASSIGNS": True}})
def changes_of_buffers():
    with strategy.scope():
        model = Counting(ASSIGNS)  # noqa: F821
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = steps(model, optimizer)
    model.mean = torch.ones(3)  # on the coordinator
    model.count = model.count * 10
    losses += steps(model, optimizer, seed=2)
    return {"losses": losses, "model": whole(model), "mean": model.mean.tolist()}


@program(under=("parameter_server",))
def a_model_that_changes():
    with strategy.scope():
        model = nn.Sequential(Counting(False), nn.LeakyReLU(0.1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = steps(model, optimizer)
    model[0].factor = 2.0
    model[1].negative_slope = 0.9
    model[0].linear.register_forward_hook(lambda layer, given, output: output * 2)
    model[0].linear.weight.requires_grad_(False)
    losses += steps(model, optimizer, seed=2)
    model[0].linear.weight.requires_grad_(True)
    with strategy.scope():
        model[1] = nn.Linear(2, 4)
        model.append(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses += steps(model, optimizer, seed=3)
    with torch.no_grad():
        model[1].weight.mul_(1.5)
        model[2].bias.data.fill_(0.25)
    losses += steps(model, optimizer, seed=4)
    return {"losses": losses, "model": whole(model)}


@program(under=("parameter_server",))
def parametrizations_and_normalisation():
    with strategy.scope():
        model = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(3, 4)),
            nn.BatchNorm1d(4),
            parametrizations.spectral_norm(nn.Linear(4, 4)),
            parametrizations.orthogonal(nn.Linear(4, 2)),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"losses": steps(model, optimizer), "model": whole(model)}


@program(under=("parameter_server",))
def hooks_of_the_optimizer_and_a_schedule():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def double(optimizer, args, kwargs):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(2)

    losses = steps(model, optimizer, 1)
    optimizer.register_step_pre_hook(double)
    schedule.step()
    losses += steps(model, optimizer, 1, seed=2)
    optimizer.param_groups[0]["momentum"] = 0.5
    losses += steps(model, optimizer, seed=3)
    return {"losses": losses, "model": whole(model), "rate": schedule.get_last_lr()}


@program(under=("parameter_server",))
def an_average_of_weights():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    losses = []
    for seed in range(3):
        losses += steps(model, optimizer, 1, seed)
        average.update_parameters(model)
    return {"losses": losses, "model": whole(model, average)}


# -- what a function cannot change ------------------------------------------------------------------------------------

_CHANGES = {
    "schedule": (
        "schedule.step()",
        Refusal("ProgramError", PAGE, "lets a learning rate schedule step, raises an error", alone=True),
    ),
    "rate": (
        "optimizer.param_groups[0].update(lr=0.01)",
        Refusal("ProgramError", PAGE, "A function that changes an optimizer's options", alone=True),
    ),
    "weight": (
        "model.weight.data.mul_(0.5)",
        Refusal("ProgramError", PAGE, "Changing or replacing parameters within a function raises an error", alone=True),
    ),
    "parameter": (
        "setattr(model, 'weight', nn.Parameter(model.weight.detach() * 0.5))",
        Refusal("ProgramError", PAGE, "Changing or replacing parameters within a function raises an error", alone=True),
    ),
    "buffer": (
        "setattr(model, 'last', torch.zeros(3))",
        Refusal("ProgramError", PAGE, "A buffer keeps its shape and dtype", alone=True),
    ),
    "scaler": (
        "scaler.scale(model.weight.sum()).backward()",
        Refusal("CannotTravelError", PAGE, "A `GradScaler` in a function raises an error", alone=True),
    ),
}


@program(
    under=("parameter_server",),
    cases={name: {"CHANGE": text, "refused": {"parameter_server": error}} for name, (text, error) in _CHANGES.items()},
)
def a_change_that_would_be_lost():
    with strategy.scope():
        model = nn.Linear(3, 2)
        model.register_buffer("last", torch.zeros(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
        scaler = torch.amp.GradScaler("cpu")

    def step(batch):
        names = {
            "model": model,
            "optimizer": optimizer,
            "schedule": schedule,
            "scaler": scaler,
            "nn": nn,
            "torch": torch,
        }
        eval(CHANGE, names)  # noqa: F821

    train(step, rows(4, 3))
    return {"model": whole(model)}


_OUTSIDE = Refusal("CannotTravelError", PAGE, "made outside the scope raises an error in a function", alone=True)


@program(
    under=("parameter_server",),
    cases={"a parameter": {"PARAMETER": True}, "an optimizer": {"PARAMETER": False}},
    refused={"parameter_server": _OUTSIDE},
)
def one_made_outside_the_scope():
    with strategy.scope():
        inside = nn.Parameter(torch.ones(3))
    weight = nn.Parameter(torch.ones(3)) if PARAMETER else inside  # noqa: F821
    optimizer = None if PARAMETER else torch.optim.SGD([weight], lr=0.1)  # noqa: F821

    def step(x):
        (x * weight).square().sum().backward()
        if optimizer is not None:
            optimizer.step()

    train(step, rows(4, 3))
    return {"weight": weight.tolist()}


@program(
    under=("parameter_server",),
    refused={
        "parameter_server": Refusal(
            "CannotTravelError",
            PAGE,
            "A hook on the gradient of a parameter (`register_hook`) raises an error",
            alone=True,
        )
    },
)
def a_hook_on_a_gradient():
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_hook(lambda gradient: gradient * 2)
    return {"losses": steps(model, optimizer), "model": whole(model)}
