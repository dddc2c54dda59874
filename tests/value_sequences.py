"""Sequences of cells about changes that only one replica makes to objects of the notebook."""

from __future__ import annotations

from tests.worlds import Cell, distributed, ordinary

_IMPORTS = "import collections, dataclasses, enum, numpy as np, pandas as pd, torch"


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
