"""Plans of closures: what they hold for, and that a function is packed again whenever it would be packed differently."""

from __future__ import annotations

import gc
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import distnb
from distnb.coordinator import ClusterCoordinator
from distnb.objects.modes import environment
from distnb.servers.closure_messages import ClosureReply, ClosureResult, Fence, RunClosure
from distnb.servers.coordinator import packer as packer_module
from distnb.servers.coordinator.packer import ClosurePacker
from distnb.servers.coordinator.pickling import PickledParts
from distnb.wire.codec import decode, encode
from tests.servers.test_server_variables import InHouse, Worker, packer_of, servers, strategy
from tests.support.calls_of_python import COUNT_ON_ENGINES, CallCount

__all__ = ["servers", "strategy"]


class Count:
    """The number of functions that were pickled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packed = 0
        plain = packer_module.dump

        def dump(value: Any, what: str, *rest: Any, **named: Any) -> Any:
            self.packed += what == "The function"
            return plain(value, what, *rest, **named)

        monkeypatch.setattr(packer_module, "dump", dump)

    def of(self, packer: ClosurePacker, *functions: Callable[..., Any]) -> int:
        """Pack each function, and return how many were pickled."""
        before = self.packed
        for each in functions:
            packer.pack(each, (), {})
        return self.packed - before


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def test_an_unchanged_function_is_pickled_twice(strategy: Any, count: Count) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        number = distnb.Variable(1.0)

    def step(rate: float = 0.5) -> Any:
        optimizer.step()
        return model(torch.ones(1, 2)) * rate + number

    packer = packer_of(strategy)
    assert count.of(packer, step, step) == 2, "at its second use it becomes a resource"
    assert count.of(packer, step, step, step) == 0
    optimizer.param_groups[0]["lr"] = 2.0
    model.eval()
    assert count.of(packer, step) == 0, "settings are sent apart"


def test_the_same_lambda_made_again_has_the_plan(strategy: Any, count: Count) -> None:
    packer = packer_of(strategy)
    assert count.of(packer, *[lambda: strategy for _ in range(2)]) == 2
    rate = 0.5
    made = [lambda: rate + 1 for _ in range(5)]
    assert count.of(packer, *made) == 2
    assert made[0] is not made[1]


_SOURCE = """
import math
def helper(x=1):
    return x + number
def act():
    return number, text, pair, helper(), math.pi, later() if flag else None
"""


@pytest.mark.parametrize(
    "change",
    [
        "number = 2",
        "text = 'other'",
        "pair = (1, 3)",
        "flag = True\ndef later(): return 5",
        "helper.__defaults__ = (7,)",
        "def helper(): return 11",
        "act.__doc__ = 'other'",
        "helper.mark = 1",
        "act = types.FunctionType(act.__code__, {**globals(), 'number': 8})",
        "def len(x): return 'own'\ndef act(): return len([])",
        "del pair, text\ndef act(): return 'text' in globals()",
    ],
)
def test_a_changed_function_is_packed_again(strategy: Any, servers: InHouse, count: Count, change: str) -> None:
    packer, worker = packer_of(strategy), Worker(servers, 0)
    namespace: dict[str, Any] = {"__name__": "__main__", "types": types}
    exec(f"number, text, pair, flag = 1, 'a', (1, 2), False\n{_SOURCE}", namespace)
    for number in range(3):
        assert worker.run(packer, number, namespace["act"]) == namespace["act"]()
    assert count.of(packer, namespace["act"]) == 0
    exec(change, namespace)
    assert count.of(packer, namespace["act"]) == 1
    for number in range(3):
        assert worker.run(packer, number, namespace["act"]) == namespace["act"]()


def test_what_can_change_in_place_is_packed_each_time(strategy: Any, servers: InHouse, count: Count) -> None:
    packer, worker = packer_of(strategy), Worker(servers, 0)
    values, table, tensor, late = [1], {"a": [1]}, torch.zeros(1), ([1],)
    exec("import collections\nclass Box: pass", made := {"__name__": "__main__"})
    box = made["Box"]()
    box.x = 1
    append = values.append
    functions: list[Callable[[], Any]] = [
        lambda: values,
        lambda: table["a"],
        lambda: float(tensor),
        lambda: late[0],
        lambda: box.x,
        lambda: append.__self__,
    ]
    for number in range(4):
        assert count.of(packer, *functions) == len(functions)
        for each in functions:
            assert worker.run(packer, number, each) == each()
        values.append(number)
        table["a"].append(number)
        late[0].append(number)
        tensor += 1
        box.x += 1


def test_a_cell_and_a_loaded_module_end_plans(strategy: Any, count: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    packer = packer_of(strategy)

    def act() -> int:
        return 1

    assert count.of(packer, act, act, act) == 2
    environment.cell_began()  # in which a module may have been loaded again
    assert count.of(packer, act, act) == 1
    monkeypatch.setitem(sys.modules, "loaded_between_closures", types.ModuleType("loaded_between_closures"))
    assert count.of(packer, act, act) == 1


def test_a_changed_model_is_described_again(strategy: Any, servers: InHouse, count: Count) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    packer, worker = packer_of(strategy), Worker(servers, 0)

    def act() -> int:
        return len(model)

    for number in range(3):
        assert worker.run(packer, number, act) == 2
    with strategy.scope():
        model.append(nn.ReLU())
    strategy.runtime.registration.register_made()
    assert worker.run(packer, 3, act) == 3
    assert count.of(packer, act, act, act) == 1


def test_a_plan_keeps_no_model_alive(strategy: Any, count: Count) -> None:
    packer = packer_of(strategy)
    with strategy.scope():
        namespace = {"model": nn.Linear(1, 1), "__name__": "__main__"}
    exec("def inner(): return model\ndef act(): return inner()", namespace)
    act = namespace["act"]
    assert count.of(packer, act, act, act) == 2  # type: ignore[arg-type]
    gone = weakref.ref(namespace.pop("model"))
    gc.collect()
    assert gone() is None
    namespace["model"] = None
    assert count.of(packer, act) == 1, "None is another value than a model that is gone"  # type: ignore[arg-type]


def test_a_variable_without_a_value_gets_one(strategy: Any, servers: InHouse) -> None:
    packer, worker = packer_of(strategy), Worker(servers, 0)

    def make() -> tuple[Callable[[], Any], Callable[[], None]]:
        def act() -> Any:
            try:
                return value
            except NameError:
                return None

        def give() -> None:
            nonlocal value
            value = 3

        if False:
            value = 0
        return act, give

    act, give = make()
    assert [worker.run(packer, number, act) for number in range(3)] == [None] * 3
    give()
    assert [worker.run(packer, number, act) for number in range(3)] == [3] * 3


# -- random programs ---------------------------------------------------------------------------------------------------

_STATEMENTS = (
    "a = {n}",
    "b = 'text {n}'",
    "c = (a, {n})",
    "values.append({n})",
    "values = [{n}]",
    "table['x'] = {n}",
    "table = {{'x': {n}}}",
    "model.train({n} % 2 == 0)",
    "model[0].requires_grad_({n} % 2 == 0)",
    "optimizer.param_groups[0]['lr'] = float({n})",
    "number.assign({n})",
    "array += {n}",
    "small.__defaults__ = ({n},)",
    "def small(x={n}): return x + a",
    "def small(x=1): return x * {n}",
    "holder = make({n})",
    "globals().pop('maybe', None)",
    "maybe = {n}",
    "maybe = None",
    "maybe = values",
    "maybe = model",
    "maybe = small",
    "model[1] = torch.nn.{layer}()",
    "torch.nn.init.constant_(model[0].weight, {n})",
    "cell()",
)
_FUNCTIONS = """
def make(number):
    kept = [number] if number % 3 == 0 else number
    def read():
        return kept, number, a
    return read
def plain(): return a, b, c
def containers(): return values, table['x']
def trained():
    frozen = [each.requires_grad for each in model[0].parameters()]
    return model.training, [type(each).__name__ for each in model], frozen, float(model[0].weight.detach().sum())
def rated(): return optimizer.param_groups[0]['lr'], float((number + 0).detach())
def nested(): return small(), holder(), float(array.sum())
def careful():
    try:
        found = maybe
    except NameError:
        return 'none'
    return found if type(found) in (int, list) else type(found).__name__
"""


def _run_random_program(strategy: Any, servers: InHouse, seed: int) -> None:
    draw = random.Random(seed)
    packer, workers = packer_of(strategy), [Worker(servers, 0), Worker(servers, 1)]
    with strategy.scope():
        made = {
            "model": nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
            "number": distnb.Variable(1.0),
        }
        made["optimizer"] = torch.optim.SGD(made["model"].parameters(), lr=1.0)
    namespace = {**made, "torch": torch, "cell": environment.cell_began, "__name__": "__main__"}
    exec("a, b, c, values, table, array = 1, 'b', (1, 2), [1], {'x': 1}, torch.zeros(2)", namespace)
    exec(f"{_FUNCTIONS}\ndef small(x=1): return x\nholder = make(1)", namespace)
    names = ("plain", "containers", "trained", "rated", "nested", "careful")
    for number in range(40):
        for _ in range(draw.choice((0, 1, 1, 2))):
            statement = draw.choice(_STATEMENTS)
            exec(statement.format(n=draw.randrange(6), layer=draw.choice(("ReLU", "Tanh"))), namespace)
        for _ in range(draw.randint(1, 4)):
            act: Any = namespace[draw.choice(names)]
            found = draw.choice(workers).run(packer, number, act)
            assert found == act(), f"seed {seed}: {act.__name__}, at step {number}"


@pytest.mark.parametrize("seed", range(8))
def test_workers_see_every_change(strategy: Any, servers: InHouse, seed: int) -> None:
    """Functions read names between whose uses random statements change something, and find what they find here."""
    _run_random_program(strategy, servers, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_workers_see_every_change_of_many_programs(strategy: Any, servers: InHouse) -> None:
    for seed in range(200):
        _run_random_program(strategy, servers, seed)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_of_closures_arrive_as_they_were_sent() -> None:
    plain = RunClosure(program=1, closure=2, fence=Fence(3, (5,)), definitions=(), data=b"data", buffers=())
    found = decode(encode(plain))
    assert (found, type(found.fence)) == (plain, Fence)
    packed = plain._replace(buffers=(bytearray(b"memory"),), definitions=((7, PickledParts(b"model")),))
    found = decode(encode(packed))
    assert found == packed
    assert type(found.buffers[0]) is bytearray, "tensors are opened in this memory"
    for value in (None, True, 1.5, "text", PickledParts(b"packed"), torch.ones(2)):
        reply = ClosureReply(4, ClosureResult(value, None, (0, 2)))
        found = decode(encode(reply))
        assert (type(found), type(found.value), found.program) == (ClosureReply, ClosureResult, 4)
        assert found.value.staleness == (0, 2)
        assert type(found.value.value) is type(value)
    counted = ClosureReply(4, ClosureResult(None, {3: torch.ones(1), 4: numpy.ones(1)}))
    contributions = decode(encode(counted)).value.contributions
    assert {number: float(each[0]) for number, each in contributions.items()} == {3: 1, 4: 1}


# -- the cost of a closure ---------------------------------------------------------------------------------------------

_TEXTS = f"""
def nothing():
    pass
{COUNT_ON_ENGINES}
"""


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_closure_takes_few_calls_of_python() -> None:
    """A loss of speed shows here, exactly and on any machine. See `test_call_plans.py` for calls of `run`."""
    counted = CallCount()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(_TEXTS, namespace)
    threading.setprofile(counted)  # of the thread that receives results, which begins below
    try:
        distnb.start(workers=1, ps=1)
        coordinator = ClusterCoordinator(distnb.ParameterServerStrategy())

        def call(name: str) -> Any:
            return coordinator.fetch(coordinator.schedule(namespace[name]))

        def measure(calls: int) -> tuple[int, int]:
            call("begin")
            for _ in range(10):
                call("nothing")
            counted.calls = 0
            sys.setprofile(counted)
            try:
                for _ in range(calls):
                    call("nothing")
            finally:
                sys.setprofile(None)
            return counted.calls, call("end")

        # On a busy machine some closures wait longer, which takes some calls of Python more.
        pairs = [(measure(20), measure(120)) for _ in range(3)]
        assert min((many[0] - few[0]) / 100 for few, many in pairs) <= 1.15 * 179
        assert min((many[1] - few[1]) / 100 for few, many in pairs) <= 1.15 * 121
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        distnb.stop()
