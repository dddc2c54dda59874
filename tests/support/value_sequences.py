"""Sequences of cells about kinds of values, and about changes that only one replica makes to them."""

from __future__ import annotations

from tests.support.worlds import Cell, distributed, ordinary

_IMPORTS = """
import abc, collections, dataclasses, enum, functools, itertools, logging, types, typing, weakref
import numpy as np, pandas as pd, torch
""".strip()


def _there_and_here(made: str, seen: str, change: str = "pass") -> list[Cell]:
    """Return cells that make a value on the replicas, and see and change it on both sides."""
    return [
        distributed(f"{_IMPORTS}\n{made}"),
        ordinary(f"n0 = repr(({seen}))\n{change}"),
        distributed(f"n1 = repr(({seen}))\n{change}"),
        ordinary(f"n2 = repr(({seen}))\n{change}"),
        distributed(f"n3 = repr(({seen}))"),
    ]


KINDS: dict[str, list[Cell]] = {
    "kind: type aliases": _there_and_here(
        "V, U, O = list[float], int | str, typing.Optional[int]\nC = typing.Callable[[int], list[str]]\n"
        "L = typing.Literal['a']",
        "V, O, C, L, [isinstance(x, U) for x in (1, 'a', 2.0)]",
    ),
    "kind: aliases of own classes": _there_and_here(
        "class P:\n    pass\nPs, M = list[P], P | None",
        "typing.get_args(Ps)[0] is P, isinstance(P(), M), isinstance(3, M)",
    ),
    "kind: new types and type variables": _there_and_here(
        "N = typing.NewType('N', int)\nT = typing.TypeVar('T', bound=int)\nP = typing.ParamSpec('P')\n"
        "Ts = typing.TypeVarTuple('Ts')\nclass Box(typing.Generic[T]):\n    pass",
        "N(3), N.__name__, N.__supertype__ is int, Box.__parameters__ == (T,), P.__name__, Ts.__name__, T.__bound__",
    ),
    "kind: typed dicts": _there_and_here(
        "class Row(typing.TypedDict, total=False):\n    a: int\nclass More(Row):\n    b: str\nr = More(a=1, b='x')",
        "sorted(Row.__annotations__), sorted(More.__required_keys__), sorted(More.__optional_keys__), r, More(b='y')",
        "r['a'] = r.get('a') + 1",
    ),
    "kind: protocols": _there_and_here(
        "@typing.runtime_checkable\nclass HasX(typing.Protocol):\n    x: int\nclass A:\n    x = 1",
        "isinstance(A(), HasX), isinstance(3, HasX)",
    ),
    "kind: single dispatch": _there_and_here(
        "@functools.singledispatch\ndef show(x):\n    return 'any'\n@show.register\ndef _int(x: int):\n    return 'int'",
        "show(1), show('s')",
    ),
    "kind: sets of instances": _there_and_here(
        "class A:\n    def __init__(self, n):\n        self.n = n\nxs = [A(i) for i in range(30)]\ns = set(xs)\n"
        "t = frozenset((x, x.n) for x in xs[:9])",
        "sorted(x.n for x in s), [x in s for x in xs], sorted(n for _, n in t)",
        "s.discard(xs[len(s) - 1])",
    ),
    "kind: a set in what holds it": _there_and_here(
        "class A:\n    pass\na = A()\na.all = {a, A(), A()}\nb = {'s': {frozenset({A}), a.all.pop}}",
        "len(a.all), a in a.all, len(b['s'])",
    ),
    "kind: sets of functions": _there_and_here(
        "def f():\n    pass\ndef g():\n    pass\ns, d = {f, g, int, print}, {f: 1, g: 2}", "f in s, len(s), d[g]"
    ),
    "kind: enums in sets": _there_and_here(
        "class C(enum.Enum):\n    R = 1\n    B = 2\ns, m = {C.R, C.B}, {frozenset({C.R}): 1}",
        "C.R in s, len(s), m[frozenset({C(1)})]",
        "s.discard(C.B)",
    ),
    "kind: iterators": _there_and_here(
        "c, i, n = itertools.cycle('abc'), iter([1, 2, 3, 4, 5, 6]), itertools.count(3)", "next(c), next(i), next(n)"
    ),
    "kind: exceptions": _there_and_here(
        "class E(Exception):\n    pass\ntry:\n    try:\n        1 / 0\n    except ZeroDivisionError as z:\n"
        "        raise E(3) from z\nexcept E as e:\n    e.extra = [1]\n    saved = e",
        "saved.args, saved.extra, saved.__cause__, isinstance(saved, E)",
        "saved.extra.append(2)",
    ),
    "kind: memory views": _there_and_here(
        "b = bytearray(b'abc')\nm = memoryview(b)", "bytes(m), m.readonly, bytes(b)", "m[0] += 1"
    ),
    "kind: tables that share data": [
        ordinary(f"{_IMPORTS}\nt = pd.DataFrame({{'a': [1, 2], 'b': [3.0, 4.0]}})\nc, s = t['a'], t.copy(deep=False)"),
        distributed("t.loc[0, 'a'] = 9\nn = t['a'].tolist(), c.tolist(), s['a'].tolist()\nd = t['b']"),
        ordinary("t.loc[1, 'b'] = 8\nm = t['b'].tolist(), d.tolist(), s['b'].tolist()"),
        distributed("c[1] = 7\nk = t['a'].tolist(), c.tolist()"),
    ],
    "kind: shared closures": _there_and_here(
        "def make():\n    n, log = 0, []\n    def up():\n        nonlocal n\n        n += 1\n        log.append(n)\n"
        "    return up, lambda: (n, log)\nup, get = make()",
        "get()",
        "up()",
    ),
    "kind: cached properties": _there_and_here(
        "class A:\n    made = 0\n    @functools.cached_property\n    def v(self):\n        A.made += 1\n"
        "        return [A.made]\na = A()",
        "a.v, A.made, a.v is a.v",
        "a.v.append(1)",
    ),
    "kind: metaclasses and registries": [
        ordinary(
            "class Reg(type):\n    all = {}\n    def __new__(m, n, b, ns):\n        c = super().__new__(m, n, b, ns)\n"
            "        m.all[n] = c\n        return c\nclass A(metaclass=Reg):\n    pass"
        ),
        distributed("class B(A):\n    pass\nn = sorted(Reg.all), Reg.all['A'] is A"),
        ordinary("class C(A):\n    pass\nm = sorted(Reg.all), Reg.all['B'] is B"),
        distributed("k = sorted(Reg.all), Reg.all['C'] is C"),
    ],
    "kind: nested default dicts": _there_and_here(
        "d = collections.defaultdict(lambda: collections.defaultdict(list))",
        "sorted(d), d['x']['y'], type(d['z']).__name__",
        "d['x']['y'].append(len(d))",
    ),
    "kind: slots": _there_and_here(
        "class A:\n    __slots__ = ('x', '__weakref__')\nclass B(A):\n    __slots__ = ('y',)\nb = B()\nb.x, b.y = [1], 2\n"
        "r = weakref.ref(b)",
        "b.x, hasattr(b, 'y'), r() is b",
        "b.x.append(1); b.__delattr__('y') if hasattr(b, 'y') else setattr(b, 'y', 1)",
    ),
    "kind: descriptors": _there_and_here(
        "class Positive:\n    def __set_name__(self, owner, name):\n        self.name = '_' + name\n"
        "    def __get__(self, obj, kind=None):\n        return self if obj is None else getattr(obj, self.name, 0)\n"
        "    def __set__(self, obj, value):\n        setattr(obj, self.name, abs(value))\n"
        "class A:\n    x = Positive()\n    @property\n    def twice(self):\n        return 2 * self.x\na = A()",
        "a.x, a.twice, type(A.x).__name__",
        "a.x = -3 - a.x",
    ),
}


def _by_one(made: str, change: str, seen: str, again: str) -> list[Cell]:
    """Return cells in which replica 0 alone changes an object, and all sides see and change it afterwards.

    Args:
        made: The statements that make the object `v`.
        change: A statement that changes it, and may run twice.
        seen: An expression that shows it.
        again: Another statement that changes it.
    """
    return [
        ordinary(f"{_IMPORTS}\n{made}\nbox = {{'v': v}}"),
        distributed(f"n0 = {seen}"),
        distributed(f"if rid() == 0:\n    {change}"),
        ordinary(f"n1 = {seen}, box['v'] is v"),
        distributed(f"n2 = {seen}, box['v'] is v\n{again}"),
        ordinary(f"n3 = {seen}, box['v'] is v\n{again}"),
        distributed(f"if rid() == 0:\n    {change}\n{seen}"),
        distributed(f"n4 = {seen}"),
    ]


CHANGED_BY_ONE: dict[str, list[Cell]] = {
    "list": _by_one("v = [1]", "v.append({'x': [2]})", "repr(v)", "v[-1] = {'x': [len(v)]}"),
    "list in another order": _by_one("v = [{'i': i} for i in range(5)]", "v.reverse()", "repr(v)", "v[0]['x'] = 1"),
    "nested": _by_one("v = {'a': {'b': [1]}}", "v['a']['b'].append(2)", "repr(v)", "v['a']['c'] = len(v['a'])"),
    "removal": _by_one("v = {'a': [1], 'b': 2, 'c': 3}", "v.popitem()", "repr(v)", "v['a'].append(1)"),
    "set": _by_one("v = {'a', 'b'}", "v.add('c')", "sorted(v)", "v.discard('a')"),
    "deque": _by_one("v = collections.deque([1, 2], maxlen=3)", "v.append(3)", "list(v)", "v.rotate(1)"),
    "counter": _by_one("v = collections.Counter('ab')", "v['a'] += 1", "repr(v)", "v.update('c')"),
    "defaultdict": _by_one("v = collections.defaultdict(list)", "v['k'].append(1)", "repr(v)", "v['n']"),
    "array": _by_one("v = np.zeros(3)", "v[1] += 1", "v.tolist()", "v *= 2"),
    "frame": _by_one("v = pd.DataFrame({'a': [1, 2]})", "v['b'] = [3, 4]", "v.to_string()", "v['c'] = 5"),
    "tensor": _by_one("v = torch.zeros(2)", "v += 1", "v.tolist()", "v *= 2"),
    "cycle": _by_one("v = {'n': 1}\nv['v'] = v", "v['k'] = [v]", "(sorted(v), v['v'] is v)", "v['n'] += 1"),
    "instance": _by_one(
        "class Config:\n    pass\nv = Config()\nv.name, v.tags = 'tags', []",
        "v.saved = True; v.tags.append('x')",
        "repr(sorted(vars(v).items()))",
        "v.epoch = len(v.tags)",
    ),
    "dataclass": _by_one(
        "@dataclasses.dataclass\nclass Config:\n    lr: float = 0.1\n    monitor: str = 'lr'\nv = Config()",
        "v.lr *= 2",
        "repr(v)",
        "v.monitor += 'x'",
    ),
    "slots": _by_one("class S:\n    __slots__ = ('a',)\nv = S()\nv.a = [1]", "v.a.append(2)", "v.a", "v.a = v.a + [3]"),
    "class": _by_one("class C:\n    n = 0\n    xs = []\nv = C", "v.n += 1; v.xs.append(1)", "(v.n, v.xs)", "v.n += 1"),
    "function": _by_one("def v(seen=[]):\n    v.n = 1\nv.n = 0", "v.n += 1", "(v.n, v.__defaults__)", "v.new = [v.n]"),
    "closure": _by_one(
        "def make():\n    n = 0\n    log = []\n    def up():\n        nonlocal n\n        n += 1\n        log.append(n)\n"
        "        return log\n    return up\nv = make()",
        "v()",
        "[cell.cell_contents for cell in v.__closure__]",
        "v()",
    ),
    "all change one part, and one another": [
        ordinary("stats = {'loss': [], 'saved': []}\nloss = stats['loss']"),
        distributed(
            "for i in range(3):\n    stats['loss'].append(i)\n    if rid() == 0:\n        stats['saved'].append(i)"
        ),
        distributed("n = len(stats['saved']), len(loss)\nloss.append(7)\nsame = loss is stats['loss']"),
        ordinary("stats['saved'].append(9)"),
        distributed("m = len(stats['saved']), len(loss)"),
    ],
    "all change one name, and one another": [
        ordinary("a, b = [], []\nbox = {'a': a, 'b': b}"),
        distributed("a.append(1)\nif rid() == 0:\n    b.append(2)"),
        distributed("n = len(box['b'])\nbox['a'].append(3)"),
        ordinary("same = box['a'] is a and box['b'] is b"),
        distributed("also = box['a'] is a and box['b'] is b"),
    ],
    "all change attributes of a class, and one another": [
        ordinary("class C:\n    n, xs = 0, []\nc = C()"),
        distributed("C.xs.append(0)\nif rid() == 0:\n    C.n += 1"),
        distributed("n = c.n, len(C.xs)\nC.n += 1"),
        ordinary("C.n += 1"),
        distributed("m = c.n"),
    ],
    "the object gets another name": [
        ordinary("cfg = {'a': [1]}"),
        distributed("other = cfg\ninner = cfg['a']\nif rid() == 0:\n    cfg['b'] = 2"),
        distributed("other['c'] = 3\nsame = other is cfg and inner is cfg['a']"),
    ],
    "the object is read later": [
        ordinary("a = [1]\nc = [a]"),
        distributed("n = len(a) + len(c)"),
        distributed("if rid() == 0:\n    a.append(1)"),
        distributed("z = 5"),
        distributed("y = len(c[0])\nc[0].append(2)"),
        ordinary("same = a is c[0]"),
        distributed("also = len(a), a is c[0]"),
    ],
    "one replica defines a class": [
        ordinary("xs = []\nclass Base:\n    pass"),
        distributed(
            "if rid() == 0:\n    class Made(Base):\n        kind = xs\n        def size(self):\n"
            "            return len(type(self).kind)\n    xs.append(Made())\nMade = None"
        ),
        distributed("n = type(xs[0]).__name__, xs[0].size()"),
        ordinary("m = xs[0].size(), type(xs[0]).kind is xs, isinstance(xs[0], Base)"),
        distributed("k = xs[0].size(), type(xs[0]).kind is xs, isinstance(xs[0], Base)"),
    ],
    "the object that lives there holds it": [
        ordinary("cfg = {'lr': 1}"),
        distributed("import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.cfg = cfg"),
        distributed("if rid() == 0:\n    model.cfg['saved'] = True"),
        ordinary("seen = cfg.get('saved')\ncfg['lr'] = 2"),
        distributed("now = model.cfg['lr'], model.cfg is cfg, model.cfg['saved']"),
        ordinary("del model"),
    ],
}
"""Each compared with one IPython, in which `rid()` is 0."""
