"""Related objects stay related when they are sent: classes, imports, names that come and go."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distnb.errors import CannotTravelError
from distnb.notebook.handles.handle import HANDLES
from distnb.values import Mirrored, PerReplica
from tests.support.worlds import Cell, DoubleWorld, PlainWorld, compare, distributed, modes_kept, ordinary, run_all

MODE = "import enum\nclass Mode(enum.Enum):\n    TRAIN = 1\n    TEST = 2\nmode = Mode.TRAIN"
POINT = "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')\np = Point(1, [2])"
KEY = (
    "import math\nSCALE = 3\ndef helper(x):\n    return math.floor(x) * SCALE\n"
    "class Key:\n    def __init__(self, n):\n        self.n = n\n"
    "    def __hash__(self):\n        return helper(self.n)\n"
    "    def __eq__(self, other):\n        return isinstance(other, Key) and self.n == other.n\n"
    "    def __repr__(self):\n        return f'Key {self.n}'\n"
    "table = {Key(1): 'one'}\nkeys = {Key(2): 2}"
)
STATE = (
    "import math\nOFFSET = 5\nclass Kept:\n    def __init__(self):\n        self.a = [1]\n"
    "    def __getstate__(self):\n        return {'a': self.a}\n"
    "    def __setstate__(self, state):\n        self.a = state['a']\n        self.b = math.floor(OFFSET)\n"
    "kept = Kept()\nkept.b = 5"
)
REDUCED = (
    "UNIT = 10\ndef rebuild(n):\n    return Made(n // UNIT)\nclass Made:\n    def __init__(self, n):\n        self.n = n\n"
    "    def __reduce__(self):\n        return rebuild, (self.n * UNIT,)\nmade = Made(4)"
)
TYPES = (
    "import typing\nT = typing.TypeVar('T')\nclass Row(typing.NamedTuple):\n    a: int\n    b: list = []\n"
    "class Box(typing.Generic[T]):\n    def __init__(self, item: T):\n        self.item = item\n"
    "row = Row(1, [2])\nbox_ = Box(row)\nalias = Box[int]"
)
ERROR = (
    "class Own(Exception):\n    def __init__(self, code, *, where):\n        super().__init__(f'{code} at {where}')\n"
    "        self.code, self.where = code, where"
)

_NAMES = ("mode", "f", "p", "a", "table", "keys", "kept", "made", "row", "box_", "alias")


def _names_in(text: str) -> list[str]:
    """Return the names of the instances that a text makes, in its order."""
    return [line.split(" ")[0] for line in text.splitlines() if line.split(" ")[0] in _NAMES]


SEQUENCES: dict[str, list[Cell]] = {}
for _name, _text, _check in (
    ("enum", MODE, "same = mode is Mode.TRAIN, mode in Mode, Mode(1) is mode"),
    (
        "flag",
        "import enum\nclass F(enum.IntFlag):\n    A = 1\n    B = 2\nf = F.A | F.B",
        "same = F.A in f, isinstance(f, F), (f & F.B) is F.B",
    ),
    ("namedtuple", POINT, "same = type(p) is Point, p._replace(x=3) == Point(3, [2])"),
    ("class", "class A:\n    pass\na = A()", "same = type(a) is A, isinstance(a, A)"),
    ("key with a hash", KEY, "same = table[Key(1)], Key(2) in keys, type(next(iter(keys))) is Key"),
    ("state", STATE, "same = kept.a, kept.b, type(kept) is Kept"),
    ("reduce", REDUCED, "same = made.n, type(made) is Made"),
    ("typing", TYPES, "same = type(row) is Row, type(box_) is Box, box_.item is row, row._fields, alias == Box[int]"),
):
    SEQUENCES[f"{_name} made here"] = [ordinary(_text), distributed(_check), ordinary(_check), distributed(_check)]
    _made = _names_in(_text)
    SEQUENCES[f"{_name} made there"] = [
        ordinary("kept_here = []"),
        distributed(f"{_text}\nkept_here += [{', '.join(_made)}]"),
        distributed(_check),
        ordinary(f"{', '.join(_made)}, = kept_here\n{_check}"),
        distributed(_check),
    ]

SEQUENCES |= {
    "deleted in the cell": [
        ordinary("x = [1]\ny = 2"),
        distributed("x = [3]\nz = [4]\ny = 5\ndel x, z, y"),
        ordinary("n = sorted(name for name in ('x', 'y', 'z') if name in dir())"),
        distributed("m = sorted(name for name in ('x', 'y', 'z') if name in globals())"),
    ],
    "deleted by except": [
        ordinary("e = 1"),
        distributed("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    text = str(e)"),
        ordinary("gone = 'e' not in dir()"),
    ],
    "deleted after with": [
        distributed("import io\nwith io.StringIO('a') as f:\n    text = f.read()\ndel f"),
        ordinary("gone = 'f' not in dir()"),
    ],
    "submodule": [
        distributed("import xml.dom.minidom\nn = xml.dom.minidom.__name__"),
        ordinary("m = xml.dom.minidom.parseString('<a/>').documentElement.tagName"),
        distributed("k = xml.dom.minidom.__name__"),
    ],
    "submodule by another name": [
        distributed("import xml.etree.ElementTree as tree, os.path\nn = tree.fromstring('<a/>').tag"),
        ordinary("m = tree.fromstring('<a/>').tag, os.path.join('a', 'b')"),
    ],
    "bound methods": [
        ordinary(
            "class A:\n    n = 0\n    def inc(self):\n        self.n += 1\n        return self.n\na = A()\ninc = a.inc"
        ),
        distributed("x = inc()"),
        ordinary("y = a.n, inc.__self__ is a, inc()"),
        distributed("z = a.n, inc.__self__ is a, inc()\nxs = []\npush = xs.append\npush(1)"),
        ordinary("w = a.n, inc.__self__ is a\nbag = [a.inc, str.upper, 'b'.upper]"),
        distributed("v = bag[0](), a.n, bag[1]('a'), bag[2]()"),
        ordinary("u = a.n"),
    ],
    "annotations": [
        ordinary("a: int = 1"),
        distributed("b: 'list[int]' = [2]\nn = sorted(__annotations__)"),
        ordinary("c: str = 'x'\nm = sorted(__annotations__)"),
        distributed("k = sorted(__annotations__)"),
    ],
    "all": [
        ordinary("__all__ = ['a']"),
        distributed("__all__ += ['b']\nn = list(__all__)"),
        ordinary("m = list(__all__)"),
    ],
    "loop variables": [
        ordinary("for i in range(3):\n    batch = [i]\nlock = __import__('threading').Lock()"),
        distributed("if i > 5:\n    print(lock)\nfor i in range(4):\n    batch = [i]\nelse:\n    n = i"),
        ordinary("k = i, batch"),
    ],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_cells_behave_as_in_one_ipython(name: str) -> None:
    cells = SEQUENCES[name]
    plain, world = PlainWorld(), DoubleWorld(2)
    with modes_kept():
        run_all(plain, cells)
    with modes_kept():
        run_all(world, cells)
    compare(_sendable(plain.names()), _sendable(world.names()))


def _sendable(names: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in names.items() if name not in ("lock", "T")}


@pytest.fixture
def world() -> Iterator[DoubleWorld]:
    with modes_kept():
        yield DoubleWorld(2)


# -- unpickling errors -------------------------------------------------------------------------------------------------

_STUBBORN = (
    "class Stubborn:\n    def __setstate__(self, state):\n        raise RuntimeError('not here')\n"
    "s = Stubborn()\ns.a = 1\nbag = {'s': s, 'lr': 0.1, 'more': [2]}\nbefore = [1]\nlast = [3]\nboth = [last, [6]]"
)


def test_an_object_that_cannot_be_unpickled_on_an_engine_does_not_affect_others(world: DoubleWorld) -> None:
    read = "a = before + last\nif not a:\n    print(s, bag, both)"
    run_all(world, [ordinary(_STUBBORN), distributed(read), distributed("last.append(4)")])
    run_all(world, [distributed("b = before + last + both[1]"), distributed("s.a", raises=CannotTravelError)])
    run_all(world, [distributed("bag['s'].a", raises=CannotTravelError)])
    ns = world.notebook.user_ns
    assert ns["a"] == [1, 3]
    assert ns["b"] == [1, 3, 4, 6]
    assert ns["last"] == [3, 4]
    assert ns["bag"]["s"] is ns["s"]
    assert ns["s"].a == 1


def test_the_message_names_the_object_and_the_reason(world: DoubleWorld) -> None:
    run_all(world, [ordinary(_STUBBORN)])
    with pytest.raises(CannotTravelError, match=r"`s` cannot be opened here: RuntimeError: not here\. The cure"):
        world.run(distributed("s.a"))


def test_an_object_that_the_notebook_cannot_unpickle_is_a_handle(
    world: DoubleWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_there.py").write_text("class Base:\n    def double(self, x):\n        return 2 * x\n")
    original = world.namespace.incoming

    def without_it(*arguments: Any) -> None:
        sys.modules.pop("only_there", None)
        original(*arguments)

    monkeypatch.setattr(world.namespace, "incoming", without_it)
    text = (
        f"import sys\nsys.path.append({str(tmp_path)!r})\nimport only_there\nsys.path.remove({str(tmp_path)!r})\n"
        "class Sub(only_there.Base):\n    pass\ndef f(x, kind=Sub):\n    return kind().double(x)\nn = 5\ng = [6]\n"
        "box = {'sub': Sub(), 'g': g}\ndel only_there"
    )
    run_all(world, [distributed(text)])
    ns = world.notebook.user_ns
    assert ns["n"] == 5
    assert ns["g"] == [6]
    assert type(ns["g"]) is list
    for name in ("Sub", "f", "box"):
        assert isinstance(ns[name], Mirrored), name
    assert any("`Sub` could not be opened in the notebook (ModuleNotFoundError" in each for each in world.notices)
    run_all(world, [distributed("k = f(2), Sub().double(3), box['sub'].double(4), box['g'] is g")])
    assert ns["k"][:3] == (4, 6, 8)


def test_paths_are_set_before_objects_are_unpickled(world: DoubleWorld, tmp_path: Path) -> None:
    (tmp_path / "by_a_path.py").write_text("class Base:\n    number = 7\n")
    text = (
        f"import sys\nsys.path.append({str(tmp_path)!r})\nimport by_a_path\nclass Sub(by_a_path.Base):\n    pass\n"
        "sys.modules.pop('by_a_path')"
    )
    run_all(world, [distributed(text), ordinary("n = Sub.number")])
    assert world.notebook.user_ns["n"] == 7


# -- replicas that differ ----------------------------------------------------------------------------------------------


def test_values_may_alternate_between_equal_and_different(world: DoubleWorld) -> None:
    ns = world.notebook.user_ns
    for value in ("4", "[4]", "(4, 'a')"):
        run_all(world, [distributed(f"v = {value}"), distributed("if rid() == 1:\n    v = 5")])
        assert ns["v"].values[1] == 5
        assert PerReplica(ns["v"].values).values == ns["v"].values
        run_all(world, [distributed(f"v = {value}"), distributed("w = v")])
        assert not isinstance(ns["v"], HANDLES) or isinstance(ns["v"], Mirrored)
        run_all(world, [ordinary(f"assert [*getattr(v, 'values', (v, v))] == 2 * [{value}], v")])


def test_values_of_other_kinds_are_sent_by_value(world: DoubleWorld) -> None:
    run_all(
        world, [distributed("x = None if rid() == 0 else [1]\ny = None if rid() else 2.0\nz = 'a' if rid() else 1")]
    )
    ns = world.notebook.user_ns
    assert ns["x"].values == (None, [1])
    assert ns["y"].values == (2.0, None)
    for name in "xyz":
        assert "0:" in repr(ns[name])
        assert ns[name]._repr_html_()
        run_all(world, [distributed(f"{name}2 = {name}\nalike = {name}2 is {name}")])
        assert ns[f"{name}2"].values == ns[name].values
    for name in "yz":
        assert world.call(lambda value: value, ns[name]).values == ns[name].values


# -- state of each process ---------------------------------------------------------------------------------------------


def test_a_weak_reference_to_an_object_that_has_ended_can_be_sent(world: DoubleWorld) -> None:
    run_all(world, [ordinary("import weakref\nclass Ended: pass\nold = [weakref.ref(Ended())]")])
    run_all(
        world,
        [distributed("none = old[0]() is None\nold.append(1)"), ordinary("assert old[0]() is None and old[1] == 1")],
    )
    assert world.notebook.user_ns["none"] is True


def test_standard_streams_are_those_of_the_process(world: DoubleWorld) -> None:
    text = "same = out[0] is sys.stdout and out[1] is sys.stderr"
    run_all(world, [ordinary("import sys\nout = [sys.stdout, sys.stderr]"), distributed(text)])
    assert world.notebook.user_ns["same"] is True


# -- names of the shell ------------------------------------------------------------------------------------------------


def test_underscore_and_out_are_not_sent(world: DoubleWorld) -> None:
    ns = world.notebook.user_ns
    ns["_"] = ns["_3"] = [1, 2]
    ns["Out"] = {3: ns["_"]}
    run_all(world, [distributed("n = len(_), Out[3] is _, _3 is _")])
    assert ns["n"] == (2, True, True)
    assert ns["_"] == [1, 2]


# -- the same text, here and there -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        "import threading\nt = threading.Lock()",
        "import torch\nt = torch.ones(2, requires_grad=True) * 2",
        "t = (n for n in range(3))",
        "t = open('/dev/null')",
        "import torch\nt = iter(torch.utils.data.DataLoader([1, 2]))",
    ],
)
def test_a_name_that_may_be_read_does_not_fail_a_cell(world: DoubleWorld, made: str) -> None:
    text = f"for i in range(2):\n    {made.replace(chr(10), chr(10) + '    ')}\nif i > 4:\n    print(t)\nn = i"
    run_all(world, [ordinary(text), distributed(text)])
    run_all(
        world, [ordinary(made), distributed("bool(t)", raises=CannotTravelError), ordinary(text), distributed(text)]
    )
    assert world.notebook.user_ns["n"] == 1


# -- exceptions --------------------------------------------------------------------------------------------------------


def raised_in(world: DoubleWorld, text: str) -> Any:
    """Return a cell's exception, as it reaches the notebook."""
    try:
        world.run(distributed(text))
    except Exception as error:
        return world.namespace.open_error(world.namespaces[0].pack_error(error))
    raise AssertionError("nothing was raised")


def test_an_exception_of_the_users_class_has_the_notebooks_class(world: DoubleWorld) -> None:
    ns = world.notebook.user_ns
    run_all(world, [ordinary(ERROR)])
    error = raised_in(world, "raise Own(3, where='there')")
    assert type(error) is ns["Own"]
    assert (error.code, error.where, str(error)) == (3, "there", "3 at there")
    error = raised_in(world, f"{ERROR.replace('Own', 'New')}\nraise New(4, where=[5])")
    assert type(error) is ns["New"]
    assert (error.code, error.where) == (4, [5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b'\\xff'.decode()", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ("open('/nowhere')", "[Errno 2] No such file or directory: '/nowhere'"),
        ("{}['k']", "'k'"),
        ("compile('1 +', 'f', 'eval')", "invalid syntax (f, line 1)"),
        ("raise StopIteration(3)", "3"),
    ],
)
def test_builtin_exceptions_are_complete(world: DoubleWorld, text: str, message: str) -> None:
    error = raised_in(world, text)
    assert str(error) == message
    assert getattr(error, "value", 3) == 3
    assert getattr(error, "errno", 2) == 2


def test_a_figure_whose_transforms_are_held_in_another_order_by_a_replica_stays_one(world: DoubleWorld) -> None:
    """Reorder dicts whose keys are addresses: new transforms may get the addresses of keys from another process."""
    change = "f.axes[0].set_title(f.axes[0].get_title() + 't')"
    reorder = (
        "if rid():\n    for t in (f.axes[0].transAxes, f.axes[0].transData, f.dpi_scale_trans):\n"
        "        held = list(t._parents.items())\n        t._parents.clear()\n        t._parents.update(reversed(held))"
    )
    run_all(world, [ordinary("import matplotlib.figure")])
    run_all(world, [distributed("f = matplotlib.figure.Figure()\nf.add_subplot().plot([1, 2, 3])")])
    figure = world.notebook.user_ns["f"]
    cells = [ordinary(change), distributed(f"{change}\n{reorder}")]
    place = "f.axes[0].transAxes.transform((1, 1)).tolist()"
    run_all(
        world, [*cells, *cells, distributed(f"f.set_size_inches(10, 10)\nthere = {place}"), ordinary(f"here = {place}")]
    )
    ns = world.notebook.user_ns
    assert ns["f"] is figure
    assert figure.axes[0].get_title() == "tttt"
    assert ns["here"] == ns["there"] == [900, 880], "transforms follow the figure's size"
    run_all(world, [ordinary(f"f.set_size_inches(20, 5)\nhere = {place}"), distributed(f"there = {place}")])
    assert ns["here"] == ns["there"] == [1800, 440]


def test_a_function_has_one_digest_where_it_was_defined_and_where_it_was_sent() -> None:
    world = DoubleWorld(1)
    run_all(world, [distributed("def step(x: int = 1):\n    'A step.'\n    optimizer.step(x, 'a word')")])
    teams = world.namespaces[0].teams
    tracker, step = teams.of(teams.keys[0]).tracker, world.engines[0].user_ns["step"]
    sent = tracker.open_loose(tracker.pack_loose({"step": step}))["step"]
    assert sent is not step
    assert tracker.digest({"step": sent}).by_name == tracker.digest({"step": step}).by_name
