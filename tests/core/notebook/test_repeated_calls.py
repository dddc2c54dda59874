"""The same call again, after changes of its inputs or of the engines' knowledge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distnb.errors import EngineDied
from distnb.notebook.handles.pending import DeferredCall
from distnb.objects.modes.environment import cell_began
from distnb.values import Future
from tests.support.worlds import DoubleWorld


@pytest.fixture
def world() -> DoubleWorld:
    return DoubleWorld()


def define(world: DoubleWorld, text: str) -> None:
    exec(text, world.notebook.user_ns)


def test_the_same_call_can_be_repeated(world: DoubleWorld) -> None:
    define(world, "LR = 2\ndef f(x=1):\n    return x * LR")
    f = world.notebook.user_ns["f"]
    assert [world.call(f) for _ in range(4)] == [2] * 4
    assert [world.call(f, 5) for _ in range(3)] == [10] * 3


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
def test_a_repeated_call_sees_changed_names(world: DoubleWorld, change: str, before: Any, after: Any) -> None:
    define(world, "LR = 2\ndata = []\ndef f():\n    return LR")
    ns = world.notebook.user_ns
    for _ in range(3):
        assert world.call(ns["f"]) == before
    define(world, change)
    if isinstance(after, type):
        with pytest.raises(after):
            world.call(ns["f"])
    else:
        assert [world.call(ns["f"]) for _ in range(3)] == [after] * 3


def test_equal_arguments_of_another_type_are_sent_again(world: DoubleWorld) -> None:
    define(world, "def kind(x):\n    return type(x).__name__ + repr(x)")
    kind = world.notebook.user_ns["kind"]
    values = [1, 1, 1, True, 1.0, 0.0, -0.0, (1, 2), (1, 2.0), "1", None, b"1", float("nan"), 1]
    assert [world.call(kind, value) for value in values] == [type(value).__name__ + repr(value) for value in values]


def test_a_repeated_call_sees_moved_random_states(world: DoubleWorld) -> None:
    define(world, "import torch, random\nimport numpy as np\ndef draw():\n    return torch.initial_seed()")
    draw = world.notebook.user_ns["draw"]
    for _ in range(3):
        world.call(draw)
    torch.manual_seed(1234)
    assert world.call(draw) == 1234
    np.random.normal()  # sent when a cell begins
    world.call(draw)
    cell_began()
    world.call(draw)


def test_objects_as_arguments_and_results_are_tracked(world: DoubleWorld) -> None:
    define(world, "xs = []\ndef push(xs):\n    xs.append(1)\n    return len(xs)\ndef make():\n    return [1, 2]")
    ns = world.notebook.user_ns
    assert [world.call(ns["push"], ns["xs"]) for _ in range(3)] == [1, 2, 3]
    assert ns["xs"] == [1, 1, 1]
    made = [world.call(ns["make"]) for _ in range(3)]
    assert made == [[1, 2]] * 3


def test_calls_work_after_a_failed_call(world: DoubleWorld) -> None:
    define(world, "bad = False\ndef f():\n    return 1 / 0 if bad else 7")
    ns = world.notebook.user_ns
    for _ in range(3):
        assert world.call(ns["f"]) == 7
    snapshot = world.namespace.outgoing_call((ns["f"], (), {}), {}, world.team)
    world.namespace.failed(snapshot)  # it reached no engine
    assert [world.call(ns["f"]) for _ in range(3)] == [7] * 3


def test_names_assigned_by_a_repeated_call_are_updated(world: DoubleWorld) -> None:
    define(world, "n = 0\ndef count():\n    global n, last\n    n = last = n + 1\n    return n")
    ns = world.notebook.user_ns
    assert [world.call(ns["count"]) for _ in range(4)] == [1, 2, 3, 4]
    assert (ns["n"], ns["last"]) == (4, 4)
    define(world, "def drop():\n    global last\n    globals().pop('last', None)\n    return 0")
    assert [world.call(ns["drop"]) for _ in range(3)] == [0, 0, 0]
    assert "last" not in ns


def test_objects_in_closures_of_functions_are_released(world: DoubleWorld) -> None:
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
    world.call(lambda: 1)
    gc.collect()
    assert held() is None
    assert kept() is None


def test_an_error_of_a_call_that_was_never_sent_is_raised_at_its_result() -> None:
    tries = []

    def send() -> Future:
        tries.append(1)
        raise EngineDied("engine 1 has ended")

    deferred = DeferredCall(send, set())
    deferred.send()  # with another program
    for _ in range(2):
        with pytest.raises(EngineDied, match="engine 1 has ended"):
            deferred.result()
    assert tries == [1]
