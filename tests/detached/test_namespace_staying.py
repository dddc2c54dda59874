"""Names that a cell does not read: visible to threads of earlier cells, and never outdated for a cell."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from distnb.notebook.handles.handle import state_of_handle
from distnb.notebook.namespace.notebook_namespace import NotebookNamespace
from tests.support.worlds import Cell, DoubleWorld, PlainWorld, compare, distributed, ordinary, run_all

THREAD = """
import queue, threading, time
asked, answers = queue.Queue(), queue.Queue()
factor, helper = 2, lambda x: x + 1
def look():
    try:
        return helper(factor), list(rows), time.__name__
    except NameError as error:
        return str(error)
def work():
    while asked.get(timeout=60):
        answers.put(look())
thread = threading.Thread(target=work, daemon=True)
thread.start()
"""
ASK = "asked.put(1)\nfound = answers.get(timeout=60)"


@pytest.fixture(scope="module")
def thread() -> Iterator[DoubleWorld]:
    """Provide a world with a thread on each replica that a cell started and that outlives it."""
    world = DoubleWorld(2)
    run_all(world, [ordinary("rows = [1]"), distributed(f"{THREAD}\nrows, None")])
    yield world
    run_all(world, [distributed("asked.put(0)\nthread.join(60)\nalive = thread.is_alive()")])
    assert world.names()["alive"] is False


@pytest.fixture
def world() -> DoubleWorld:
    return DoubleWorld(2)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("pass", (3, [1], "time")),
        ("factor = 5", (6, [1], "time")),
        ("rows = [2]", (6, [1], "time")),  # unchanged until a cell reads it
        ("del helper", "name 'helper' is not defined"),
    ],
)
def test_a_thread_keeps_its_globals(thread: DoubleWorld, change: str, found: object) -> None:
    run_all(thread, [ordinary(change), distributed("n = 1"), distributed(ASK)])
    assert thread.names()["found"] == found


def test_a_thread_sees_changes_of_a_later_cell(thread: DoubleWorld) -> None:
    cells = [ordinary("helper, rows = abs, [3]"), distributed(f"rows, helper, None\n{ASK}")]
    run_all(thread, [ordinary("factor = -4"), *cells])
    assert thread.names()["found"] == (4, [3], "time")


def test_names_bound_later_by_a_thread_are_not_read_by_a_cell(world: DoubleWorld) -> None:
    late = "import threading\ngo, done, n = threading.Event(), threading.Event(), 1\ndef late():\n    global n, extra\n"
    late += "    go.wait(60)\n    n = extra = 99\n    done.set()\nt = threading.Thread(target=late)\nt.start()"
    run_all(world, [distributed(late), distributed("m = n")])
    for engine in world.engines:  # between two cells
        engine.user_ns["go"].set()
        engine.user_ns["t"].join(60)
        assert engine.user_ns["n"] == 99
    run_all(world, [distributed("m = n\nthere = 'extra' in globals()")])
    assert (world.names()["m"], world.names()["there"]) == (1, False)


SEQUENCES = {
    "deleted, and made again": [
        ordinary("x = 5"),
        distributed("y = x"),
        ordinary("del x"),
        distributed("z = 1"),
        ordinary("x = 5"),
        distributed("y = x + 1"),
    ],
    "bound to something else, then to what it was": [
        distributed("import functools\n@functools.cache\ndef load():\n    return [1]\nx = load()"),
        ordinary("x = 'other'"),
        distributed("x = load()"),
        ordinary("y = x == [1]"),
    ],
    "a module, then another, then the first": [
        distributed("import math as m"),
        ordinary("import cmath as m"),
        distributed("import math as m\nn = m.__name__"),
        ordinary("k = m.__name__"),
    ],
    "a handle, then another": [
        distributed("import torch\nkept = torch.ones(1), torch.zeros(1)\na, b = kept"),
        ordinary("a, b = b, a"),
        distributed("n = 1"),
        distributed("a, b = kept"),
        ordinary("x = float(a), float(b)"),
    ],
    "read in other ways": [
        ordinary("x = 1\ndef f():\n    return 0"),
        distributed("y = x, f()"),
        ordinary("x = [2]"),
        distributed("z = f.__globals__['x'], 1"),
        distributed("import sys\nz = sys._getframe().f_globals['x']"),
        ordinary("x = [3]"),
        distributed("z = get_ipython().user_ns['x']"),
    ],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_objects_that_stay_behave_as_in_one_ipython(world: DoubleWorld, name: str) -> None:
    plain = PlainWorld()
    for each in (plain, world):
        run_all(each, SEQUENCES[name])
    compare(plain.names(), world.names())


@pytest.mark.parametrize("change", ["del x", "x = None", "x = [1]"])
def test_an_object_is_freed_with_its_handle_even_if_its_name_remains(world: DoubleWorld, change: str) -> None:
    run_all(world, [distributed("import torch\nx = torch.zeros(12345)"), distributed("n = len(x)"), ordinary(change)])
    gc.collect()
    run_all(world, [distributed("n = 1")])
    for engine in world.engines:
        assert not hasattr(engine.user_ns.get("x"), "numel")
    assert not any(len(namespace.teams) for namespace in world.namespaces)


HIDING = """
import torch
class Box(torch.nn.Module):
    def __init__(self, function=None):
        super().__init__()
        self.function = function
    def __reduce__(self):
        return Box, ()
    def keep(self, function):
        self.function = function
    def go(self):
        return self.function() + extra
n, extra = 1, 10
def make():
    def inner():
        return n * scale
    return inner
scale = 1
"""


@pytest.mark.parametrize(
    "made",
    [
        [distributed("import functools\nbox = Box(functools.partial(make()))")],
        [distributed("box = Box([])"), ordinary("box.keep(make())")],
    ],
)
def test_names_read_by_hidden_functions_of_an_object_are_found(world: DoubleWorld, made: list[Cell]) -> None:
    run_all(world, [ordinary(HIDING), *made, ordinary("x = box.go()\nn = 2\nscale = 3\nextra = 20\ny = box.go()")])
    assert (world.names()["x"], world.names()["y"]) == (11, 26)


def test_the_next_notebook_finds_a_name_that_only_one_replica_gave_to_an_object(world: DoubleWorld) -> None:
    run_all(world, [distributed("import torch\nm = torch.nn.Linear(2, 1)"), distributed("if not rid():\n    best = m")])
    bound = {name: state_of_handle(world.notebook.user_ns.pop(name)).identity for name in ("best", "m")}
    objects = world.namespaces[0].teams
    world.namespace = NotebookNamespace(world.notebook.user_ns, world.perform)
    world.namespace.continue_from(objects.serial, 1)
    tracked = world.namespace.adopt_team(objects.keys[0], (0, 1))
    snapshot = world.namespace.restoring_snapshot(tracked)
    results = {replica: each.restore(snapshot, replica, bound, ()) for replica, each in enumerate(world.namespaces)}
    world.namespace.restored(tracked, results)
    run_all(world, [distributed("if not rid():\n    n = best.in_features")])
    assert (world.names()["best"].component(0).in_features, world.names()["n"].component(0)) == (2, 2)
