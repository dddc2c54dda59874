"""Random sequences of cells that make, share, change and drop objects of many kinds.

A statement is drawn to suit the current values of the names, for which a namespace of this process is updated along the
way. Statements that a handle refuses in an ordinary cell, with an error, are left out of the run for comparison.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from distnb.errors import CannotTravelError, DistributedValueError, NamespaceError
from distnb.notebook.handles.handle import HANDLES
from distnb.objects.plain import is_plain
from distnb.values import DistributedValues, structure
from tests.support.worlds import Cell, DoubleWorld, PlainWorld

NAMES = "abcdefgh"
_MOST_REACHABLE = 150
_MOST_ELEMENTS = 64
_MOST_SHOWN = 500

SETUP = """
import collections, dataclasses, functools, numpy as np, torch
class Box:
    kind = 'box'
    def __init__(self, v=None):
        self.v = v
    def push(self, x):
        self.v = [self.v, x]
class Slot:
    __slots__ = ('v', 'w')
    def __init__(self, v=None):
        self.v = v
@dataclasses.dataclass
class Conf:
    v: object = 1
    tags: list = dataclasses.field(default_factory=list)
Pair = collections.namedtuple('Pair', 'v w')
def keep(v):
    held = [v]
    def change(x=None):
        nonlocal v
        if x is not None:
            held.append(x)
            v = x
        return v, held
    return change
def push(x, v):
    x.append(v)
    return len(x)
def put(x, v):
    x['c'] = v
    return len(x)
def give(x, v):
    x.v = v
def fill(x, v):
    x[...] = v
def bind(v):
    global a
    a = v
def grow():
    b.append(len(b))
    return len(b)
def invoke(x, *args):
    x(*args)
def both(x, y):
    x.append(1)
    y.append(2)
    return x is y
""".strip()

_MAKERS = [
    "[{n}]",
    "[]",
    "[{x}, {y}]",
    "[[{x}], {{'k': {y}}}]",
    "{{'k': {n}}}",
    "{{'x': {x}, 'y': [{y}]}}",
    "{{{n}, 'x'}}",
    "{n}",
    "'t{n}'",
    "({x}, {n})",
    "({x}, [{y}])",
    "Pair({x}, {n})",
    "Box()",
    "Box({x})",
    "Box([{n}])",
    "Slot({x})",
    "Conf({x})",
    "Conf({n}, [{x}])",
    "np.arange(4) + {n}",
    "np.ones((2, 3)) * {n}",
    "np.array([{n}, None, 'o'], dtype=object)",
    "torch.arange(4.) * {n}",
    "torch.ones(2, 3) * {n}",
    "torch.full((2,), {n}., requires_grad=True)",
    "keep({x})",
    "lambda z={x}: (z, {name})",
    "lambda: [{name}]",
    "functools.partial(push, {x})",
    "Box({x}).push",
    "[{n}].append",
    "type('Made', (Box,), {{'kind': {x}}})",
    "collections.deque([{x}])",
    "collections.defaultdict(list, k=[{x}])",
    "collections.OrderedDict(k={x})",
    "collections.Counter('aab')",
    "bytearray(b'x{n}')",
    "frozenset({{{n}}})",
    "{x}",
    "{x}",
    "{x}",
    "None",
]

_EDITS: dict[str, list[str]] = {
    "list": [
        "{t}.append({x})",
        "{t}.append({n})",
        "{t}.insert(0, {x})",
        "{t}[0] = {x}",
        "{t}[-1] = {n}",
        "{t}.pop()",
        "{t}.clear()",
        "{t}.reverse()",
        "{t}.extend([{x}, {n}])",
        "{t} += [{x}]",
        "{t}[:] = [{x}, {y}]",
        "del {t}[0]",
        "for i in range(2): {t}.append([i])",
        "for each in {t}: each.append({n})",
        "_call(push, {t}, {x})",
        "{name} = _call(push, {t}, {n})",
        "_call(both, {t}, {x})",
    ],
    "dict": [
        "{t}['k'] = {x}",
        "{t}[{n}] = {n}",
        "{t}.pop('k')",
        "{t}.clear()",
        "{t}.update(z={x})",
        "{t}.setdefault('l', []).append({n})",
        "del {t}['x']",
        "_call(put, {t}, {x})",
        "{name} = _call(put, {t}, {n})",
    ],
    "set": ["{t}.add({n})", "{t}.discard('x')", "{t}.clear()", "{t} |= {{{n}}}"],
    "Box": [
        "{t}.v = {x}",
        "{t}.n = {n}",
        "del {t}.v",
        "{t}.push({x})",
        "{t}.v = [{n}]",
        "_call(give, {t}, {x})",
        "_call(give, {t}, {n})",
    ],
    "Slot": ["{t}.v = {x}", "{t}.w = {n}", "del {t}.v", "_call(give, {t}, {x})"],
    "Conf": ["{t}.v = {x}", "{t}.tags.append({x})", "{t}.tags = [{x}]", "{t}.extra = {n}"],
    "array": [
        "{t}[0] = {n}",
        "{t}[:] = {n}",
        "{t} += {n}",
        "{name} = {t}[1:]",
        "{name} = {t}.T",
        "{name} = {t}.reshape(-1)",
        "{name} = {t}[::2]",
        "{name} = torch.from_numpy({t})",
        "{name} = [{t}, torch.from_numpy({t}), {t}[1:]]",
        "{name} = {t} * 2",
        "_call(fill, {t}, {n})",
    ],
    "objects": ["{t}[0] = {x}", "{t}[1] = [{x}]"],
    "tensor": [
        "{t}[0] = {n}",
        "{t}.add_({n})",
        "{t} += {n}",
        "{t}.tag = {x}",
        "{name} = {t}[1:]",
        "{name} = {t}.view(-1)",
        "{name} = {t} * 2",
        "{name} = {t}.detach()",
        "{name} = {t}.numpy()",
        "{name} = {t}.numpy()[1:]",
        "{name} = ({t}, {t}.numpy(), {t}[:1])",
        "({t} * {n}).sum().backward()",
        "_call(fill, {t}, {n})",
    ],
    "function": ["{t}.note = {x}", "{t}({x})", "{t}()", "{name} = {t}()", "{name} = {t}()[0]", "_call(invoke, {t})"],
    "partial": ["{t}({x})", "_call(invoke, {t}, {n})"],
    "method": ["{t}({x})", "{t}({n})", "_call(invoke, {t}, {n})"],
    "class": ["{t}.kind = {x}", "{name} = {t}.kind", "{t}.kind.append({n})", "{name} = {t}({x})", "{t}.more = {n}"],
    "deque": ["{t}.append({x})", "{t}.appendleft({n})", "{t}.popleft()", "_call(push, {t}, {x})"],
    "bytearray": ["{t}.extend(b'{n}')", "{t}[0] = 65"],
    "tuple": ["{name} = {t}[0]", "{name} = ({t}, {t})", "{name} = [{t}, {x}]"],
}
_ANYWHERE = ["del {name}", "_call(bind, {x})", "_call(grow)", "{name}, {name2} = {name2}, {name}", "{name} += {n}"]


class Refusals:
    """The refusals of a run: each statement's end by number, what the notebook refused, and arguments taken apart."""

    def __init__(self) -> None:
        self.raised: dict[int, str] = {}
        self.refused: set[int] = set()
        self.calls: list[Any] = []  # the arguments of each call, with a mark in the place of each handle


@dataclasses.dataclass(frozen=True)
class Statement:
    """A line of a cell, with its number in the whole sequence."""

    number: int
    text: str


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A cell that was drawn. It ends half-way with `end`; the statements after `until` are not reached."""

    statements: tuple[Statement, ...]
    where: str  # "here", "there" or "default"
    until: int | None = None

    def cell(self, without: set[int] = frozenset()) -> Cell:  # type: ignore[assignment]
        """Return the cell to run, without some statements."""
        note = "_raised" if self.where == "there" else "_refused"
        lines = []
        for place, each in enumerate(self.statements):
            if self.until == place:
                lines.append("1 / 0")
            text = "pass" if each.number in without else each.text
            lines.append(f"try:\n    {text}\nexcept Exception as error:\n    {note}({each.number}, error)")
        if self.where == "there":
            lines.insert(0, "globals()")  # reads every name, since objects that are read separately may become two
        raises = ZeroDivisionError if self.until is not None else None
        return Cell("\n".join(lines) or "pass", self.where == "there", raises)


_BINDS = re.compile(r"\w+(, \w+)? \S?= |del \w+$|for |_call|.*\n")


def changed_by_one(cells: list[Drawn], seed: int) -> list[Drawn]:
    """Return a sequence of which many cells only change objects, on replica 0 alone."""
    draw = random.Random(seed)
    return [_by_one(cell) if cell.where == "there" and draw.random() < 0.7 else cell for cell in cells]


def _by_one(cell: Drawn) -> Drawn:
    changes = [each for each in cell.statements if not _BINDS.match(each.text)]
    alone = tuple(Statement(each.number, f"if rid() == 0: {each.text}") for each in changes)
    return Drawn(alone, cell.where)


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw_cells(seed: int, *, tensors: bool = True) -> list[Drawn]:
    """Return a sequence of cells drawn from a seed, with or without tensors."""
    draw = random.Random(seed)
    guide: dict[str, Any] = {"_call": lambda function, *args: function(*args)}
    exec(SETUP, guide)
    guide.update(dict.fromkeys(NAMES))
    cells = []
    number = 0
    for _ in range(draw.randrange(4, 14)):
        if draw.random() < 0.1:
            name, value = draw.choice(NAMES), draw.choice(NAMES)
            cells.append(Drawn((Statement(number, f"{name} = _look({value})"),), "default"))
            guide[name] = "looked"
            number += 1
            continue
        where = "there" if draw.random() < 0.6 else "here"
        statements = []
        for _ in range(draw.randrange(1, 6)):
            text = _statement(draw, guide, calls=where == "here", tensors=tensors)
            statements.append(Statement(number, text))
            number += 1
        until = draw.randrange(len(statements)) if where == "there" and draw.random() < 0.1 else None
        cells.append(Drawn(tuple(statements), where, until))
    return cells


def _statement(draw: random.Random, guide: dict[str, Any], *, calls: bool, tensors: bool) -> str:
    while True:
        text = _drawn_text(draw, guide)
        if "torch" in text and not tensors:
            continue
        if "_call" in text and not calls:
            continue
        if ".numpy()" in text and calls:
            continue  # a handle gives a copy
        if "for each in" in text and calls:
            continue  # a loop over a handle uses its content at the loop's start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = {name: guide[name] for name in NAMES if name in guide}
            try:
                exec(text, guide)
            except Exception:
                if draw.random() < 0.8:
                    continue
        if _reachable(guide) > _MOST_REACHABLE:
            for name in NAMES:
                guide.pop(name, None)
            guide.update(before)
            guide[draw.choice(NAMES)] = None
            # An object that was too large may be part of another one, so nothing is kept.
            return "\n    ".join([text, *_emptied(guide)])
        return text


def _emptied(guide: dict[str, Any]) -> list[str]:
    lines = [f"{name} = None" for name in NAMES] + ["Box.kind = 'box'"]
    for line in lines:
        exec(line, guide)
    return lines


def _drawn_text(draw: random.Random, guide: dict[str, Any]) -> str:
    places = list(_places(guide))
    fields = {
        "x": draw.choice(places)[0] if places and draw.random() < 0.5 else draw.choice(NAMES),
        "y": draw.choice(NAMES),
        "n": draw.randrange(100),
        "name": draw.choice(NAMES),
        "name2": draw.choice(NAMES),
    }
    chance = draw.random()
    if chance < 0.3 or not places:
        return (f"{fields['name']} = " + draw.choice(_MAKERS)).format(**fields)
    if chance < 0.4:
        return draw.choice(_ANYWHERE).format(**fields)
    path, kind = draw.choice(places)
    return draw.choice(_EDITS[kind]).format(t=path, **fields)


def kind_of(value: Any) -> str:
    """Return the kind of edits that suit a value; "" for none."""
    if isinstance(value, numpy.ndarray):
        return "objects" if value.dtype.hasobject else "array"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, type):
        return "class"
    for kind, word in (
        (list, "list"),
        (tuple, "tuple"),
        (dict, "dict"),
        (set, "set"),
        (collections.deque, "deque"),
        (bytearray, "bytearray"),
        (types.FunctionType, "function"),
        (types.MethodType | types.BuiltinMethodType, "method"),
    ):
        if isinstance(value, kind):
            return word
    name = type(value).__name__
    return "Box" if name == "Made" else name if name in _EDITS else ""


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with the suffix of the expression for it."""
    kind = kind_of(value)
    if kind in ("list", "tuple", "deque", "objects"):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif kind == "dict":
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif kind == "function":
        yield from ((f".__defaults__[{place}]", part) for place, part in enumerate(value.__defaults__ or ()))
        yield from (
            (f".__closure__[{place}].cell_contents", cell.cell_contents)
            for place, cell in enumerate(value.__closure__ or ())
        )
        yield from ((f".{name}", part) for name, part in vars(value).items())
    elif kind == "partial":
        yield from ((f".args[{place}]", part) for place, part in enumerate(value.args))
    elif kind == "method":
        yield ".__self__", value.__self__
    elif kind == "class":
        yield ".kind", value.kind
    elif kind == "Slot":
        yield from ((f".{name}", getattr(value, name)) for name in ("v", "w") if hasattr(value, name))
    elif kind in ("Box", "Conf", "tensor"):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def has_identity(value: Any) -> bool:
    """Return whether a value has an identity. Tuples of immutable values have none."""
    if isinstance(value, tuple):
        return not is_plain(value)
    return not isinstance(value, types.BuiltinMethodType)


def look(value: Any) -> str:
    """Return a complete description of a value, without addresses."""
    seen: dict[int, Any] = {}
    shown = []
    waiting = [value]
    while waiting and len(shown) < _MOST_SHOWN:
        each = waiting.pop()
        if isinstance(each, HANDLES):
            raise DistributedValueError("a cell of the default strategy gets copies of what its names and lists hold")
        kind = kind_of(each)
        text = repr(each)
        shown.append(type(each).__name__ if kind or " at 0x" in text else text)
        if kind == "tuple" or (kind and id(each) not in seen):  # a tuple's identity is not kept
            seen[id(each)] = each
            waiting += [part for _, part in parts_of(each)]
            if kind in ("array", "tensor"):
                shown.append(str(each.tolist()))
    return " ".join(shown)


def _places(guide: dict[str, Any], depth: int = 3) -> Iterator[tuple[str, str]]:
    """Yield expressions for the parts that can be changed."""
    level = [(name, guide[name]) for name in (*NAMES, "Box") if name in guide]
    for _ in range(depth):
        below = []
        for path, value in level:
            kind = kind_of(value)
            if kind:
                yield path, kind
                below += [(path + step, part) for step, part in parts_of(value)]
        level = below[:40]


def _reachable(guide: dict[str, Any]) -> int:
    seen: dict[int, Any] = {}
    waiting = [guide[name] for name in (*NAMES, "Box") if name in guide]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or not kind_of(value):
            continue
        seen[id(value)] = value
        waiting += [part for _, part in parts_of(value)]
        if len(seen) > _MOST_REACHABLE or (hasattr(value, "__len__") and _size(value) > _MOST_ELEMENTS):
            return _MOST_REACHABLE + 1
    return len(seen)


def _size(value: Any) -> int:
    return 0 if isinstance(value, numpy.ndarray | torch.Tensor) else len(value)


# -- running -----------------------------------------------------------------------------------------------------------


def run_here_and_there(cells: list[Drawn], replicas: int) -> tuple[PlainWorld, DoubleWorld]:
    """Run a sequence on replicas, and then, without what was refused, in one IPython.

    Raises:
        AssertionError: A statement raised in one of them only.
    """
    double, plain = DoubleWorld(replicas), PlainWorld()
    first, second = Refusals(), Refusals()
    _prepare_double(double, first)
    _prepare_plain(plain, first, second)
    start = Cell(SETUP + "".join(f"\n{name} = None" for name in NAMES), False)
    double.run(start)
    plain.run(start)
    for cell in cells:
        _run(double, cell.cell(), first, cell)
        _run(plain, cell.cell(first.refused), second, cell)
        assert first.raised == second.raised, f"raised there: {first.raised}, in one IPython: {second.raised}"
    return plain, double


def _run(world: Any, cell: Cell, refusals: Refusals, drawn: Drawn) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if drawn.where == "default" and isinstance(world, DoubleWorld):
                with world.namespace.localise(cell.text):
                    world.run(cell)
            else:
                world.run(cell)
    except ZeroDivisionError:
        if cell.raises is None:
            raise
    except (CannotTravelError, DistributedValueError):
        refusals.refused |= {each.number for each in drawn.statements}


def _prepare_double(world: DoubleWorld, refusals: Refusals) -> None:
    def refused(number: int, error: Exception) -> None:
        if is_refusal(error):
            refusals.refused.add(number)
        else:
            refusals.raised[number] = type(error).__name__

    def raised(number: int, error: Exception) -> None:
        refusals.raised[number] = type(error).__name__

    world.notebook.user_ns["_refused"] = refused

    def call(*args: Any) -> Any:
        refusals.calls.append(_marked(args))
        try:
            return world.call(*args)
        except Exception as error:
            if is_refusal(error):
                refusals.calls.pop()  # the statement is left out of the other run
            raise

    world.notebook.user_ns["_call"] = call
    world.notebook.user_ns["_look"] = look
    for process in world.engines:
        process.user_ns["_raised"] = raised


def _prepare_plain(world: PlainWorld, first: Refusals, refusals: Refusals) -> None:
    def raised(number: int, error: Exception) -> None:
        refusals.raised[number] = type(error).__name__

    world.process.user_ns["_refused"] = world.process.user_ns["_raised"] = raised
    world.process.user_ns["_look"] = look
    world.process.user_ns["_call"] = lambda *args: _call_with_copies(first.calls.pop(0), args)


def _marked(tree: Any) -> Any:
    """Return the places of handles in a structure: None without any, otherwise the same of each part."""
    if not structure.has_distributed(tree) or isinstance(tree, DistributedValues):
        return None
    if isinstance(tree, dict):
        return {key: _marked(child) for key, child in tree.items()}
    return [_marked(child) for child in (vars(tree).values() if dataclasses.is_dataclass(tree) else tree)]


def _call_with_copies(marked: Any, args: Any) -> Any:
    """Call a function as `run` does: containers with handles in them are taken apart and rebuilt."""
    function, *own = _copied(marked, args)
    return function(*own)


def _copied(marked: Any, tree: Any) -> Any:
    if marked is None:
        return tree
    if isinstance(tree, dict):
        copied = tree.copy()
        for key, child in tree.items():  # a Counter's update would add
            copied[key] = _copied(marked[key], child)
        return copied
    if dataclasses.is_dataclass(tree):
        made = object.__new__(type(tree))
        made.__dict__.update(zip(vars(tree), map(_copied, marked, vars(tree).values()), strict=True))
        return made
    children = [_copied(mark, child) for mark, child in zip(marked, tree, strict=True)]
    return type(tree)._make(children) if hasattr(tree, "_make") else type(tree)(children)


def is_refusal(error: Exception) -> bool:
    """Return whether an error says that a handle cannot do something in the notebook, or that a value cannot travel."""
    if isinstance(error, AttributeError) and str(error).startswith("__"):
        return True  # Python looks up special methods in the handle itself
    kinds = DistributedValueError | CannotTravelError | RecursionError  # a cycle is no structure of arguments
    return isinstance(error, kinds) or "Remote" in str(error)


# -- comparing whole graphs --------------------------------------------------------------------------------------------


class SameGraph:
    """A comparison of two graphs of objects: their values, and which places share an object.

    Args:
        opaque: Returns whether an object in the second graph represents one that is not examined.
        copied: True if the second graph is a copy, which may have lost sharing with other objects.
    """

    def __init__(self, opaque: Callable[[Any], bool] = lambda value: False, *, copied: bool = False) -> None:
        self._opaque = opaque
        self._copied = copied
        self._pairs: set[tuple[int, int]] = set()
        self._there: dict[int, tuple[Any, Any, str]] = {}
        self._back: dict[int, tuple[Any, Any, str]] = {}
        self._handles: dict[int, tuple[Any, Any, str]] = {}

    def compare(self, one: Any, other: Any, where: str) -> None:
        """Assert that two values and their parts are the same."""
        waiting = [(one, other, where)]
        while waiting:
            one, other, where = waiting.pop()
            opaque = self._opaque(other)
            if not kind_of(one) or not has_identity(one):
                if opaque:
                    continue
                if not kind_of(one):
                    assert type(one).__name__ == type(other).__name__, f"{where}: {one!r} and {other!r}"
                    assert repr(one) == repr(other) or " at 0x" in repr(one), f"{where}: {one!r} and {other!r}"
                    continue
            elif opaque:  # an engines' object may be a value in one place and a handle in another
                _, handle, place = self._handles.setdefault(id(one), (one, other, where))
                assert handle is other, f"{where} and {place} are one object in one IPython only: {one!r}"
                continue
            elif self._is_known(one, other, where):
                continue
            assert type(one).__name__ == type(other).__name__, f"{where}: {one!r} and {other!r}"
            self._compare_contents(one, other, where)
            mine, others = list(parts_of(one)), list(parts_of(other))
            assert [step for step, _ in mine] == [step for step, _ in others], f"{where}: {one!r} and {other!r}"
            waiting += [(part, part2, where + step) for (step, part), (_, part2) in zip(mine, others, strict=True)]

    def _is_known(self, one: Any, other: Any, where: str) -> bool:
        if self._copied:
            known = (id(one), id(other)) in self._pairs
            self._pairs.add((id(one), id(other)))
            return known
        there, back = self._there.get(id(one)), self._back.get(id(other))
        if there is None and back is None:
            self._there[id(one)] = self._back[id(other)] = one, other, where
            return False
        assert there is not None, f"{where} and {back[2]} are one object only there: {one!r}"  # type: ignore[index]
        assert there[1] is other, f"{where} and {there[2]} are one object in one IPython only: {one!r}"
        return True

    def _compare_contents(self, one: Any, other: Any, where: str) -> None:
        kind = kind_of(one)
        if kind == "array":
            assert one.dtype == other.dtype, f"{where}: {one!r} and {other!r}"
            assert numpy.array_equal(one, other), f"{where}: {one!r} and {other!r}"
        elif kind == "tensor":
            assert one.dtype == other.dtype, f"{where}: {one!r} and {other!r}"
            if not self._copied or one.is_leaf:  # a copy is cut off from the graph
                assert one.requires_grad == other.requires_grad, f"{where}: {one!r} and {other!r}"
            assert torch.equal(one, other), f"{where}: {one!r} and {other!r}"
            if one.is_leaf:
                assert (one.grad is None) == (other.grad is None), f"{where}.grad: {one.grad!r} and {other.grad!r}"
                assert one.grad is None or torch.equal(one.grad, other.grad), f"{where}.grad"
        elif kind in ("set", "bytearray"):
            assert one == other, f"{where}: {one!r} and {other!r}"


def assert_same_graphs(
    plain: dict[str, Any], other: dict[str, Any], opaque: Callable[[Any], bool], *, apart: bool = False
) -> None:
    """Assert that the names of a sequence, and all their parts, are the same. With `apart`, ignore sharing."""
    graph = SameGraph(opaque, copied=apart)
    for name in (*NAMES, "Box"):
        assert name in other or name not in plain, f"{name} is bound in one IPython only: {plain[name]!r}"
        assert name in plain or name not in other, f"{name} is bound there only: {other[name]!r}"
        if name in plain:
            graph.compare(plain[name], other[name], name)


def assert_as_in_one_ipython(cells: list[Drawn], replicas: int) -> None:
    """Run a sequence in both worlds, and compare the notebook, fetched handles, and the engines with one IPython."""
    plain_world, double = run_here_and_there(cells, replicas)
    plain, notebook = plain_world.process.user_ns, double.notebook.user_ns
    for name in NAMES:
        if isinstance(notebook.get(name), HANDLES):
            _assert_copies(plain[name], notebook[name], name)
    assert_same_graphs(plain, notebook, lambda value: isinstance(value, HANDLES))
    reading = "; ".join(name for name in (*NAMES, "Box") if name in plain)
    try:
        double.run(Cell(reading, True))
    except CannotTravelError:
        return  # with an error that says so
    # A call's arguments and a cell's values were never read together, so a shared object may have become two.
    apart = any("_call" in each.text for cell in cells for each in cell.statements)
    for engine in double.engines:
        assert_same_graphs(plain, engine.user_ns, lambda value: False, apart=apart)


def _assert_copies(value: Any, handle: Any, name: str) -> None:
    try:
        copies = handle.values
    except NamespaceError:
        return  # pickle does not support such a cycle, and raised an error
    for copy in copies:
        SameGraph(lambda part: isinstance(part, HANDLES), copied=True).compare(value, copy, f"a copy of {name}")
