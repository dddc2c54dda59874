"""`strategy.run` inside the scope that makes a model, and parameters that a model gets after its registration."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(100)]

_PRELUDE = """
import copy, gc
import distnb
from distnb.errors import CollectiveMismatchError, ContextError, GradientError

strategy = distnb.MirroredStrategy()
me = distnb.replica_id()
x = torch.ones(1, 2)
result = {}


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)


def constant(module, value):
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


def by_hand(model):
    # A step of a replica whose loss is r + 1 times the output.
    for parameter in model.parameters():
        parameter.grad = None
    ((me + 1) * model(x)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def weights(model):
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
"""


def ranks(program: str) -> list[dict[str, Any]]:
    return [rank.check().result for rank in run_ranks(_PRELUDE + textwrap.dedent(program), 2, timeout_s=60)]


def test_an_object_of_a_scope_is_synchronised_by_the_first_call_that_uses_it() -> None:
    program = """
    def made(value):
        return constant(torch.nn.Linear(2, 1, bias=False), value * (me + 1))

    collections = []
    plain = gc.collect
    gc.collect = lambda *args: collections.append(1) or plain(*args)

    with strategy.scope():
        first, second, third, fourth = made(1.0), made(2.0), None, None
        result["reduce"] = strategy.reduce("mean", first.weight, axis=None).tolist()
        strategy.run(by_hand, args=(first,))
        result["run"] = weights(first)
        third = made(3.0)
        strategy.assert_in_sync(third)
        fourth = made(4.0)
        before = len(collections)
        fourth(x).sum().backward()  # all replicas do the same: nothing is summed
        result["backward"] = weights(fourth), fourth.weight.grad.tolist()
        fifth = made(5.0)
        result["unlike"] = error_of(lambda: ((me + 1) * fifth(x)).sum().backward())
        result["a collection for each"] = len(collections) - before
        for _ in range(3):  # nothing of it has parameters
            criterion = torch.nn.Sequential(torch.nn.Softmax(1))
            strategy.run(lambda: criterion(first(x)))
        result["no collection"] = len(collections) - before
        # What was taken becomes a part of something larger.
        whole = torch.nn.Sequential(first, made(6.0), torch.nn.BatchNorm1d(1))
        whole[1] = constant(torch.nn.Linear(1, 1, bias=False), 6.0 * (me + 1))
        def batch_norm():
            whole(torch.tensor([[1.0, 0.0], [0.0, 1.0]]) * (me + 1)).sum().backward()
        strategy.run(batch_norm)
        result["running mean"] = round(whole[2].running_mean.item(), 5)
        left = made(7.0)
    strategy.assert_in_sync([second, left, whole])
    result["end"] = weights(second), weights(left), weights(whole[1])
    """
    for found in ranks(program):
        assert found["reduce"] == [[1.0, 1.0]]
        assert found["run"] == pytest.approx([0.7, 0.7])
        assert found["backward"] == ([4.0, 4.0], [[1.0, 1.0]])
        name, text = found["unlike"]
        assert name.endswith("GradientError")
        assert "strategy.run" in text
        assert found["a collection for each"] == found["no collection"] == 2
        assert found["running mean"] == pytest.approx(0.1 * 6.0 * 0.7 * 1.5)  # 0.7 · 6 on one, twice that on the other
        assert found["end"] == ([2.0, 2.0], [7.0, 7.0], [6.0])


def test_only_parameters_and_modules_that_all_replicas_make_in_run_belong_to_a_model() -> None:
    program = """
    class BuildsItself(torch.nn.Module):
        def forward(self, x):
            if not hasattr(self, "layer"):
                self.layer = torch.nn.Linear(x.shape[1], 1, bias=False)
            return self.layer(x)

    class Caches(torch.nn.Module):
        def forward(self, x):
            self.register_buffer("mask", torch.ones(me + 1))
            self.last = torch.nn.Module()
            return x * self.mask.sum()

    with strategy.scope():
        caches, alone = Caches(), BuildsItself()
        lazy = torch.nn.LazyLinear(1)
    twin = copy.deepcopy(lazy)
    result["caches"] = strategy.run(lambda: float(caches(x).sum()))
    result["caches"] = strategy.local_results(result["caches"])[0] / (me + 1)
    if me:
        twin(x)  # a copy of a layer without values belongs to no strategy, so this does not communicate

    def on_one():
        if me == 0:
            alone(x)
        distnb.get_replica_context().all_reduce("sum", torch.ones(1))
    result["on one"] = error_of(lambda: strategy.run(on_one))
    """
    for found in ranks(program):
        assert found["caches"] == 2.0
        name, text = found["on one"]
        assert name == "CollectiveMismatchError"
        assert "replica 0 called BuildsItself.build() at" in text
        assert "also with an empty slice" in text


def test_objects_made_outside_a_scope_are_refused_at_any_time() -> None:
    program = """
    net = None
    def makes_its_own():
        global net
        net = net or torch.nn.LazyLinear(1)
        by_hand(net)
    result["made in run"] = error_of(lambda: strategy.run(makes_its_own))

    with strategy.scope():
        net = torch.nn.Linear(2, 1)
    def uses():
        return net(x).sum().item()
    strategy.run(uses)
    net = torch.nn.Linear(2, 1)
    result["put in its place"] = error_of(lambda: strategy.run(uses))

    try:
        with strategy.scope():
            taken = torch.nn.Linear(2, 1)
            strategy.run(lambda: taken(x))
            untaken = [torch.nn.Linear(2, 1)]
            raise KeyError("x")
    except KeyError:
        pass
    strategy.assert_in_sync(taken)
    strategy.run(by_hand, args=(taken,))
    result["of a scope that failed"] = error_of(lambda: strategy.run(by_hand, args=(untaken[0],)))
    """
    for found in ranks(program):
        for name, text in found.values():
            assert name == "ContextError"
            assert "were not made in strategy.scope()" in text


def test_an_interrupt_in_a_context_leaves_nothing_behind() -> None:
    program = """
    import torch
    from tests.support.interruptions import interrupted_everywhere

    with strategy.scope():
        first = torch.nn.Linear(2, 1, bias=False)

    def step(model):
        model.zero_grad()
        model(x).sum().backward()
        return model.weight.grad.sum()

    def contexts():
        with strategy.scope():
            pass
        with strategy.no_sync():
            pass
        strategy.run(one)

    def one():
        return torch.ones(1)

    strategy.run(one)  # the first call communicates, since it compares the structures that the replicas return
    for place in interrupted_everywhere(contexts):  # at the same place on both replicas
        with strategy.scope():
            model = torch.nn.Linear(2, 1, bias=False)
        for each in (first, model):
            total, = strategy.local_results(strategy.run(step, args=(each,)))
            if total != 4:
                result[place] = float(total)
    result["places"] = place
    """
    for found in ranks(program):
        assert found.pop("places") > 100
        assert found == {}
