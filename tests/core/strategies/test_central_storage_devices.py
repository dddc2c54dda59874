"""Central storage with replicas on accelerators: one copy of variables on the host, whichever device computes.

The accelerators are the fake TPUs of `tests/fake_tpu`.
"""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

import distnb
from tests.core.strategies.test_central_storage import _PRELUDE as PRELUDE
from tests.support.chips import CHIPS
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


_TRAIN = """
import io

MAKE = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05, amsgrad=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
}

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        self.scale = distnb.Variable(1.5)
        self.steps = distnb.Variable(0, aggregation="only_first_replica")

    def forward(self, inputs):
        return self.scale * self.layers(inputs)

def reloaded(state):
    file = io.BytesIO()
    torch.save({name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=False)

def train(strategy, name):
    torch.manual_seed(1)
    with strategy.scope():
        model = Scaled()
        optimizer = MAKE[name](model.parameters())
    model.eval()  # a batch's own statistics would differ with the number of replicas
    data = torch.linspace(-1, 1, 10 * 8, device="cpu").reshape(10, 8).sin()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(inputs):
        optimizer.zero_grad()
        loss = distnb.nn.compute_average_loss(model(inputs).square().sum(1), global_batch_size=10)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.steps.assign_add(1)
        return loss

    losses = []
    for epoch in range(4):
        for batch in strategy.distribute_dataset([data], batch_size=None):
            losses.append(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None).item())
        scheduler.step()
        if epoch == 1:  # changed in place, then saved and restored in mid-training
            with torch.no_grad():
                model.layers[0].weight.data.mul_(0.5)
            kept = reloaded(optimizer.state_dict())
            model.load_state_dict(reloaded(model.state_dict()))
            optimizer.load_state_dict(kept)
    strategy.assert_in_sync([model, optimizer])
    state = {
        (number, key): value.tolist()
        for number, kept in optimizer.state_dict()["state"].items() for key, value in kept.items()
    }
    return losses, {key: value.tolist() for key, value in model.state_dict().items()}, state
"""


def close(got: Any, expected: Any) -> None:
    """Compare losses, weights and optimizer state as `train` returns them."""
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    for mine, theirs in zip(got[1:], expected[1:], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.allclose(torch.tensor(mine[key]), torch.tensor(value), rtol=1e-4, atol=1e-7), key


def alone(name: str) -> Any:
    scope: dict[str, Any] = {"torch": torch, "distnb": distnb}
    exec(_TRAIN, scope)
    return scope["train"](distnb.OneDeviceStrategy("cpu:0"), name)


_LIFE = """
    def where(optimizer):
        '''The devices of what it keeps, and how much of that lies in the common memory.'''
        common = [line.split()[0].split("-") for line in open("/proc/self/maps") if "memfd:distnb-variables" in line]
        bounds = [(int(low, 16), int(high, 16)) for low, high in common]
        kept = [value for state in optimizer.state.values() for value in state.values()]
        inside = sum(any(low <= each.data_ptr() < high for low, high in bounds) for each in kept)
        return sorted({str(each.device) for each in kept}), inside, len(kept)

    def changed(change, expected):
        '''Whether a change in place is made on this device, and stays after the next settling and step.'''
        before = model.weight.detach().cpu().clone()
        with torch.no_grad():
            change()
        expected = expected(before)
        made = torch.equal(model.weight.detach().cpu(), expected) and not torch.equal(before, expected)
        with strategy.scope():
            pass
        strategy.assert_in_sync(model)
        strategy.run(step, args=(model, torch.optim.SGD(model.parameters(), lr=0.0)))
        return made and torch.equal(expected, model.weight.detach().cpu())

    with strategy.scope():
        model = torch.nn.Linear(64, 4000)  # 1 MB
        normed = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        of_normed = torch.optim.SGD(normed.parameters(), lr=1e-4)
    result["made"] = taken()
    strategy.run(step, args=(model, optimizer))
    kept = model(torch.ones(1, 64, device="tpu", requires_grad=True)).square().sum()
    strategy.run(step, args=(model, optimizer))
    result["outdated"] = error(kept.backward)
    result["trained"] = taken()
    result["device"], result["where"] = str(model.weight.device), where(optimizer)

    strategy.run(step, args=(normed, of_normed))
    result["buffers"] = normed.state_dict()["1.running_mean"].tolist(), normed[1].running_mean.tolist()

    result["halved"] = changed(lambda: model.weight.data.mul_(0.5), lambda before: before * 0.5)
    result["initialised"] = changed(
        lambda: torch.nn.init.constant_(model.weight, 0.25), lambda before: torch.full_like(before, 0.25))
    result["assigned"] = changed(
        lambda: setattr(model.weight, "data", model.weight.data * 2), lambda before: before * 2)

    strategy.run(lambda: model.weight.data.mul_(1.0 + me))
    result["drifted"] = error(lambda: strategy.run(step, args=(model, optimizer)))
    strategy.run(lambda: model.weight.data.fill_(0.25))

    class Own(torch.optim.SGD):
        pass

    result["own"] = error(lambda: strategy.run(step, args=(model, Own(model.parameters()))))

    def interrupted(model, optimizer):
        step(model, optimizer)
        raise KeyError("after a step")

    result["raised"] = error(lambda: strategy.run(interrupted, args=(model, optimizer)))
    strategy.run(lambda: model.weight.data.mul_(1.0 + me))
    result["drifted_after_error"] = error(lambda: strategy.run(step, args=(model, optimizer)))
"""


def test_a_script_runs_on_accelerators() -> None:
    program = f"{PRELUDE}{_TRAIN}\nresult = {{name: train(strategy, name) for name in MAKE}}\n{textwrap.dedent(_LIFE)}"
    found = [rank.check().result for rank in run_ranks(program, 2, env=CHIPS, timeout_s=200)]
    for name in ("sgd", "adam", "adagrad"):
        expected = alone(name)
        for result in found:
            close(result[name], expected)
    one = (64 * 4000 + 4000) * 4 / 1024
    for result in found:
        assert result["device"] == "tpu:0"
        assert result["made"] == pytest.approx([one, 0], abs=64)
        assert result["trained"] == pytest.approx([3 * one, 0], abs=64), "the parameters and two moments of each"
        assert result["where"] == (["cpu"], 6, 6)
        assert "modified by an inplace operation" in result["outdated"]
        assert (result["halved"], result["initialised"], result["assigned"]) == (True, True, True)
        assert result["buffers"][0] == result["buffers"][1] == found[0]["buffers"][1], "averaged by the backward pass"
        assert "torch.optim.Adam" in result["own"]
        assert "after a step" in result["raised"]
        assert "OutOfSyncError" in result["drifted"]
        assert "Linear.weight of shape [4000, 64]" in result["drifted"]
        assert "OutOfSyncError" in result["drifted_after_error"], "an error that all replicas caught ended nothing"


def test_one_accelerator_holds_everything() -> None:
    """Check that parameters, gradients and optimizer state are on the device, and none of them in host memory."""
    program = """
    model_device = str(next(iter(train_model.parameters())).device)
    kept = {str(each.device) for state in optimizer.state.values() for each in state.values() if each.ndim}
    grads = {str(each.grad.device) for each in train_model.parameters()}
    result["placed"] = (model_device, kept, grads, memory())
    result["trained"] = train(strategy, "adam")
    """
    start = """
    with strategy.scope():
        train_model = torch.nn.Linear(64, 4000)
        optimizer = torch.optim.Adam(train_model.parameters(), lr=0.1)
    def step():
        train_model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
    strategy.run(step)
    """
    text = f"{PRELUDE}{_TRAIN}\n{textwrap.dedent(start)}{textwrap.dedent(program)}"
    (rank,) = run_ranks(text, 1, env={**CHIPS, "FAKE_TPU_CHIPS": "1"}, timeout_s=120)
    result = rank.check().result
    assert result["placed"] == ("tpu:0", {"tpu:0"}, {"tpu:0"}, (0, 0))
    close(result["trained"], alone("adam"))
