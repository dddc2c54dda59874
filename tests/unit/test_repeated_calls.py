"""A call that says what an earlier one said is sent as a word; whatever it reads, or the engines know, may have changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distnb.errors import NamespaceError
from distnb.options import StrategySpec
from distnb.topology import Device, Team
from distnb.wire.bindings import Delivery, Repeat
from distnb.wire.messages import CallFunction
from distnb.wire.shorthand import CallReader, CallWriter, calls_in, spelled_out
from tests.worlds import DoubleWorld


@pytest.fixture
def world() -> DoubleWorld:
    return DoubleWorld()


class Watch:
    """Which kind of delivery each call had."""

    def __init__(self, world: DoubleWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[type] = []
        plain = world.namespace.outgoing_call

        def outgoing_call(*args: Any) -> Any:
            delivery = plain(*args)
            self.kinds.append(type(delivery))
            return delivery

        monkeypatch.setattr(world.namespace, "outgoing_call", outgoing_call)

    def was_repeated(self) -> bool:
        return self.kinds[-1] is Repeat


@pytest.fixture
def watch(world: DoubleWorld, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(world, monkeypatch)


def define(world: DoubleWorld, text: str) -> None:
    exec(text, world.notebook.user_ns)


def test_the_same_call_again_is_a_word(world: DoubleWorld, watch: Watch) -> None:
    define(world, "LR = 2\ndef f(x=1):\n    return x * LR")
    f = world.notebook.user_ns["f"]
    assert [world.call(f) for _ in range(4)] == [2] * 4
    assert watch.kinds == [Delivery, Delivery, Repeat, Repeat] or watch.kinds == [Delivery, Repeat, Repeat, Repeat]
    assert [world.call(f, 5) for _ in range(3)] == [10] * 3
    assert watch.was_repeated()


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("LR = 3", 2, 3),
        ("def f():\n    return 10 * LR", 2, 20),
        ("data.append(1)", 2, 2),
        ("del LR", 2, NameError),
        ("def g():\n    return LR\nf = g", 2, 2),
    ],
)
def test_what_it_reads_has_changed(world: DoubleWorld, watch: Watch, change: str, before: Any, after: Any) -> None:
    define(world, "LR = 2\ndata = []\ndef f():\n    return LR")
    ns = world.notebook.user_ns
    for _ in range(3):
        assert world.call(ns["f"]) == before
    assert watch.was_repeated()
    define(world, change)
    if isinstance(after, type):
        with pytest.raises(after):
            world.call(ns["f"])
    else:
        assert [world.call(ns["f"]) for _ in range(3)] == [after] * 3
        assert watch.was_repeated()


def test_arguments_equal_in_value_and_other_in_type(world: DoubleWorld) -> None:
    define(world, "def kind(x):\n    return type(x).__name__ + repr(x)")
    kind = world.notebook.user_ns["kind"]
    values = [1, 1, 1, True, 1.0, 0.0, -0.0, (1, 2), (1, 2.0), "1", None, b"1", float("nan"), 1]
    assert [world.call(kind, value) for value in values] == [type(value).__name__ + repr(value) for value in values]


def test_random_states_that_moved(world: DoubleWorld, watch: Watch) -> None:
    define(world, "import torch, random\nimport numpy as np\ndef draw():\n    return torch.initial_seed()")
    draw = world.notebook.user_ns["draw"]
    for _ in range(3):
        world.call(draw)
    assert watch.was_repeated()
    torch.manual_seed(1234)
    assert world.call(draw) == 1234
    np.random.normal()
    world.call(draw)
    assert not watch.was_repeated()


def test_objects_as_arguments_or_results_are_told(world: DoubleWorld, watch: Watch) -> None:
    define(world, "xs = []\ndef push(xs):\n    xs.append(1)\n    return len(xs)\ndef make():\n    return [1, 2]")
    ns = world.notebook.user_ns
    assert [world.call(ns["push"], ns["xs"]) for _ in range(3)] == [1, 2, 3]
    assert ns["xs"] == [1, 1, 1]
    assert not watch.was_repeated()
    made = [world.call(ns["make"]) for _ in range(3)]
    assert made == [[1, 2]] * 3


def test_after_a_call_that_failed(world: DoubleWorld, watch: Watch) -> None:
    define(world, "bad = False\ndef f():\n    return 1 / 0 if bad else 7")
    ns = world.notebook.user_ns
    for _ in range(3):
        assert world.call(ns["f"]) == 7
    delivery = world.namespace.outgoing_call((ns["f"], (), {}), {}, world.team)
    assert isinstance(delivery, Repeat)
    world.namespace.failed(delivery)  # it reached no engine
    assert [world.call(ns["f"]) for _ in range(3)] == [7] * 3


def test_names_that_a_repeated_call_assigns(world: DoubleWorld) -> None:
    define(world, "n = 0\ndef count():\n    global n, last\n    n = last = n + 1\n    return n")
    ns = world.notebook.user_ns
    assert [world.call(ns["count"]) for _ in range(4)] == [1, 2, 3, 4]
    assert (ns["n"], ns["last"]) == (4, 4)
    define(world, "def drop():\n    global last\n    globals().pop('last', None)\n    return 0")
    assert [world.call(ns["drop"]) for _ in range(3)] == [0, 0, 0]
    assert "last" not in ns


def test_what_functions_close_over_is_let_go(world: DoubleWorld) -> None:
    import gc
    import weakref

    class Held:
        pass

    def make() -> tuple[Any, Any]:
        held = Held()

        def f(x: int) -> int:
            return x if held is not None else 0

        return f, weakref.ref(held)

    f, held = make()
    define(world, "def f(x):\n    return x")
    plain = world.notebook.user_ns["f"]
    for _ in range(3):
        world.call(plain, 1)
    kept = weakref.ref(plain)
    del world.notebook.user_ns["f"], plain, f
    gc.collect()
    assert held() is None
    assert kept() is None
    define(world, "y = 1")
    world.call(world.notebook.user_ns.setdefault("g", lambda: 1))


def test_a_replica_that_missed_the_call_that_is_repeated_says_so(world: DoubleWorld) -> None:
    define(world, "def a():\n    return 1\ndef b():\n    return 2")
    ns = world.notebook.user_ns
    assert [world.call(ns["a"]) for _ in range(3)] == [1, 1, 1]
    world.namespace.failed(world.namespace.outgoing_call((ns["a"], (), {}), {}, world.team))
    assert world.call(ns["b"]) == 2
    # `b` takes the place of `a`, but replica 1 is stopped before it opens that delivery.
    first = world.namespace.outgoing_call((ns["b"], (), {}), {}, world.team)
    assert isinstance(first, Delivery)
    assert first.keep == 0
    again = world.namespace.outgoing_call((ns["b"], (), {}), {}, world.team)
    assert isinstance(again, Repeat)
    world.namespaces[0].open_call(world._send(first), 0)
    world.namespaces[0].close_call(2)
    (function, _, _), _ = world.namespaces[0].open_call(world._send(again), 0)
    assert function() == 2
    with pytest.raises(NamespaceError, match="Call it again"):
        world.namespaces[1].open_call(world._send(again), 1)


def test_one_message_stands_for_many_calls() -> None:
    team, spec, key = Team((0, 1), (Device("cpu"),) * 2, 1, "", 0), StrategySpec("mirrored"), ((0, 1), 1)
    writer, reader = CallWriter(), CallReader()
    reader.read(writer.write(CallFunction(1, team, spec, "run", Delivery(key, 1, keep=5))))
    word = writer.write(CallFunction(7, team, spec, "run", Repeat(key, 9, 5, 1, calls=3)))
    assert calls_in(word) == 3
    calls = list(spelled_out(reader.read(word)))
    assert [(call.program, call.delivery.serial) for call in calls] == [(7, 9), (8, 10), (9, 11)]
    assert {(call.method, call.delivery.place, call.delivery.of) for call in calls} == {("run", 5, 1)}
    alone = CallFunction(10, team, spec, "run", Delivery(key, 12))
    assert list(spelled_out(alone)) == [alone]
