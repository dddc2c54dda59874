"""Isolation of names: an error in describing, digesting, packing or opening a value affects no other name."""

from __future__ import annotations

import pytest

from tests.support.worlds import DoubleWorld, distributed, ordinary, run_all

ODD = {
    "no class": "class Odd:\n    @property\n    def __class__(self):\n        raise RuntimeError('unbound')",
    "no attributes": "class Odd:\n    def __getattribute__(self, name):\n        raise RuntimeError('unbound')",
    "no repr": "class Odd:\n    def __repr__(self):\n        raise RuntimeError('unbound')",
    "no pickle": "class Odd:\n    def __reduce_ex__(self, protocol):\n        raise RuntimeError('unbound')",
    "no array": "import numpy\nclass Odd(numpy.ndarray):\n    def __new__(cls):\n        return numpy.zeros(2).view(cls)\n"
    "    @property\n    def shape(self):\n        raise RuntimeError('unbound')",
    "no items": "class Odd(dict):\n    def __init__(self):\n        self['a'] = 1\n    def __iter__(self):\n"
    "        raise RuntimeError('unbound')\n    items = keys = values = __iter__",
    "no length": "import typing\nclass Two(typing.NamedTuple):\n    a: int\nclass Odd(Two):\n    __slots__ = ()\n"
    "    def __new__(cls):\n        return Two.__new__(cls, 1)\n    def __len__(self):\n        raise RuntimeError('unbound')\n"
    "    __iter__ = __len__",
    "no member": "import enum\nclass Odd(enum.Enum):\n    A = 1\n    def __new__(cls, value=1):\n        made = object.__new__(cls)\n"
    "        made._value_ = value\n        return made\n    def __reduce_ex__(self, protocol):\n"
    "        raise RuntimeError('unbound')\nOdd_ = Odd\nOdd = lambda: Odd_.A",
}


@pytest.fixture(scope="module")
def world() -> DoubleWorld:
    return DoubleWorld(2)


@pytest.mark.parametrize("kind", ODD)
def test_an_assigned_value_that_cannot_be_pickled_affects_no_other(world: DoubleWorld, kind: str) -> None:
    run_all(world, [distributed(f"{ODD[kind]}\nbefore = [1]\nodd = Odd()\nother = 7")])
    ns = world.notebook.user_ns
    assert (ns["other"], "odd" in ns) == (7, True)
    run_all(world, [distributed("then = type(odd).__name__, other + 1, before[0]")])
    assert list(ns["then"])[1:] == [8, 1]


@pytest.mark.parametrize("kind", ["no class", "no attributes", "no pickle", "no length"])
def test_a_notebook_value_that_may_be_read_affects_no_other(world: DoubleWorld, kind: str) -> None:
    run_all(world, [ordinary(f"{ODD[kind]}\nodd = Odd()\nxs = [1]"), distributed("if not xs:\n    odd\nn = len(xs)")])
    assert world.notebook.user_ns["n"] == 1


def test_a_value_that_cannot_be_updated_affects_no_other(world: DoubleWorld) -> None:
    """Check that its name becomes a handle of the replicas' value, and that the cell's other changes arrive."""
    kept = (
        "class Kept:\n    n = 0\n    def __getstate__(self):\n        return {'n': self.n}\n"
        "    def __setstate__(self, state):\n        if state['n'] == 5 and here:\n            raise RuntimeError('not here')\n"
        "        self.n = state['n']"
    )
    cells = [
        ordinary(f"here = True\n{kept}\nkept, xs = Kept(), [1]"),
        distributed("here = False\nkept.n = 5\nxs.append(2)\nok = 3"),
    ]
    run_all(world, [*cells[:1], distributed("kept, xs, None"), cells[1]])
    ns = world.notebook.user_ns
    assert (ns["xs"], ns["ok"]) == ([1, 2], 3)


def test_a_placeholder_can_be_assigned(world: DoubleWorld) -> None:
    cells = [ordinary("gen = (i for i in range(3))"), distributed("again = gen\nn = 7")]
    run_all(world, cells)
    assert world.notebook.user_ns["n"] == 7
    assert world.notebook.user_ns["again"] is world.notebook.user_ns["gen"]
