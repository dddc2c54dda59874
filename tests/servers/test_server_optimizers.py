"""Optimizers on servers: schedules, all kinds of steps, refusals, and saved states. The conformance suite has each of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distnb
from distnb.errors import OptionError
from distnb.partitioners import FixedShardsPartitioner
from tests.servers.test_server_variables import InHouse, Worker, packer_of, servers  # noqa: F401 - a fixture

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
}


def build(make: Callable[[Any], Any], *, bias: bool = True) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias))
    return model, make(model)


def trained(
    house: InHouse,
    make: Callable[[Any], Any],
    step: Callable[..., Any],
    *,
    steps: int = 6,
    partitioner: Any = None,
    build: Callable[..., Any] = build,
    begin: Callable[[Any], Any] = lambda made: None,
    between: Callable[[Any], Any] = lambda made: None,
    **options: Any,
) -> Any:
    """Train here and with closures on a worker, compare losses and weights, and return both models."""
    strategy = distnb.ParameterServerStrategy(variable_partitioner=partitioner)
    plain = build(make, **options)
    with strategy.scope():
        mine = build(make, **options)
    for each in (plain, mine):
        begin(each)
    worker, packer, data = Worker(house, 0), packer_of(strategy), torch.Generator().manual_seed(0)
    for number in range(steps):
        x, y = torch.randn(6, 3, generator=data), torch.randn(6, 2, generator=data)
        expected = step(*plain[:2], x, y)
        found = worker.run(packer, number, lambda x, y: step(*mine[:2], x, y), x, y)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), number
        between(plain)
        between(mine)
    for name, value in mine[0].state_dict().items():
        assert torch.allclose(value, plain[0].state_dict()[name], atol=1e-5), name
    return plain, mine


def plain_step(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


class Sign(torch.optim.Optimizer):
    """An optimizer of the user's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.data.sub_(group["lr"] * each.grad.sign())


class ElementwiseSign(Sign):
    is_elementwise = True


class OwnStep(torch.optim.SGD):
    """An optimizer of torch, with another step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


def test_an_elementwise_optimizer_of_the_users_trains_sharded_variables(servers: InHouse) -> None:  # noqa: F811
    trained(
        servers,
        lambda model: ElementwiseSign(model.parameters(), lr=0.01),
        plain_step,
        partitioner=FixedShardsPartitioner(3),
    )


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, Sign, OwnStep])
def test_an_optimizer_that_may_need_whole_variables_is_refused_for_sharded_ones(
    servers: InHouse,  # noqa: F811
    kind: Any,
) -> None:
    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2))
    with strategy.scope():
        model = nn.Linear(3, 4, bias=False)
    text = rf"{kind.__name__} cannot update 'weight', which .* into 2 parts"
    with pytest.raises(OptionError, match=text), strategy.scope():
        kind(model.parameters(), lr=0.1)
    with strategy.scope():  # a vector of one element is not divided
        kind([nn.Parameter(torch.ones(1, 3))], lr=0.1)


def test_an_optimizer_that_computes_losses_is_refused(servers: InHouse) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="LBFGS"), distnb.ParameterServerStrategy().scope():
        torch.optim.LBFGS(nn.Linear(2, 1).parameters())


class Counting(Sign):
    """An optimizer that counts its steps in an option."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] *= 0.5
        super().step()


def test_an_optimizer_that_changes_its_options_is_refused(servers: InHouse) -> None:  # noqa: F811
    strategy = distnb.ParameterServerStrategy()
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = Counting(model.parameters(), lr=0.5)
    with pytest.raises(OptionError, match=r"Counting changed its option 'lr' during a step, from 0\.5 to 0\.25"):
        plain_step(model, optimizer, torch.ones(1, 3), torch.zeros(1, 2))


class Around(torch.optim.Optimizer):
    """An optimizer around another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_an_optimizer_around_another_one_is_refused(servers: InHouse) -> None:  # noqa: F811
    strategy = distnb.ParameterServerStrategy()
    with strategy.scope():
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
    text = r"Around is an optimizer around another one \(SGD\)"
    with pytest.raises(OptionError, match=text), strategy.scope():
        Around(inner)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("within", [True, False], ids=["made in the scope", "made after it"])
@pytest.mark.filterwarnings("error")
def test_schedules_work_on_the_coordinator(servers: InHouse, name: str, within: bool) -> None:  # noqa: F811
    def build(make: Any) -> Any:
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        optimizer = make(model)
        return [model, optimizer, SCHEDULES[name](optimizer)] if within else [model, optimizer]

    def begin(made: Any) -> None:
        made.extend([] if within else [SCHEDULES[name](made[1])])

    plain, mine = trained(
        servers,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        plain_step,
        build=build,
        begin=begin,
        between=lambda made: made[2].step(),
    )
    assert mine[1].param_groups[0]["lr"] == pytest.approx(plain[1].param_groups[0]["lr"])
    assert mine[2].get_last_lr() == pytest.approx(plain[2].get_last_lr())


def accumulated(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    optimizer.zero_grad()
    for part, its in zip(x.chunk(3), y.chunk(3), strict=True):
        loss = (model(part) - its).pow(2).mean() / 3
        loss.backward()
    optimizer.step()
    return float(loss.detach())


def by_hand(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    loss = (model(x) - y).pow(2).mean()
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()
    return float(loss.detach())


def twice(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    plain_step(model, optimizer, x, y)
    return plain_step(model, optimizer, x, y)


@pytest.mark.parametrize("step", [accumulated, by_hand, twice])
def test_steps_of_all_kinds_work(servers: InHouse, step: Any) -> None:  # noqa: F811
    trained(servers, lambda model: torch.optim.Adam(model.parameters(), lr=0.05), step)


@pytest.mark.parametrize("table", [False, True])
def test_parameters_frozen_later_get_no_more_updates(servers: InHouse, table: bool) -> None:  # noqa: F811
    strategy = distnb.ParameterServerStrategy()
    with strategy.scope():
        first = nn.EmbeddingBag(5, 2) if table else nn.Linear(3, 2)
        model = nn.Sequential(first, nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker, packer = Worker(servers, 0), packer_of(strategy)
    x, y = torch.tensor([[0, 1, 2], [2, 3, 4]]), torch.ones(2, 2)
    x = x if table else x.float()
    for number, frozen in enumerate((False, True, True, False)):
        model[0].requires_grad_(not frozen)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        worker.run(packer, number, lambda: plain_step(model, optimizer, x, y))
        after = model.state_dict()
        assert torch.equal(before["0.weight"], after["0.weight"]) is frozen
        assert not torch.equal(before["1.weight"], after["1.weight"])


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_state_can_be_restored_in_the_optimizers_scope(
    servers: InHouse,  # noqa: F811
    name: str,
    tmp_path: Path,
) -> None:
    options = OPTIONS.get(name, {})

    def make() -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 1))
        alone = distnb.Variable(torch.ones(3))
        groups = [{"params": list(model.parameters())}, {"params": [alone], "lr": 0.05}]
        optimizer = getattr(torch.optim, name)(groups, lr=0.1, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return model, {"model": model, "alone": alone, "optimizer": optimizer, "schedule": schedule}

    strategy = distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2))
    with strategy.scope():
        model, objects = make()
    optimizer = objects["optimizer"]

    def step(model: Any, alone: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        (model(torch.tensor([[0, 1], [2, 3]])).pow(2).sum() + alone.pow(2).sum()).backward()
        optimizer.step()

    for _ in range(3):
        step(model, objects["alone"], optimizer)
        objects["schedule"].step()
    path = distnb.Checkpoint(**objects).write(tmp_path / "saved")
    with strategy.scope():
        again, others = make()
        restored = others["optimizer"]
        distnb.Checkpoint(**others).restore(path)
        assert restored.iterations == 3, "already in the scope"
        assert restored.state_dict()["iterations"] == 3
    assert restored.iterations == 3
    assert others["schedule"].last_epoch == 3
    for _ in range(2):
        step(model, objects["alone"], optimizer)
        step(again, others["alone"], restored)
    one, other = optimizer.state_dict(), restored.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["iterations"] == other["iterations"] == 5
    assert one["state"].keys() == other["state"].keys()
    for number, kept in one["state"].items():
        for key, value in kept.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["state"][number][key])), (number, key)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
