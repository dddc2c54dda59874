"""Sequences of cells whose outcome must equal that of one IPython, in whichever world they run."""

from __future__ import annotations

from tests.support.mode_sequences import MODES
from tests.support.sharing_sequences import SHARING
from tests.support.worlds import Cell, both, distributed, ordinary

_IMPORTS = "import torch, numpy as np, random, math, functools, collections, dataclasses, enum"


def _views(made: str) -> list[Cell]:
    """Return cells with views that are made here and there, before and after their bases were sent."""
    return [
        ordinary(f"{_IMPORTS}\na = {made}\nbox = []"),
        distributed("n = float(a.sum())"),
        ordinary("a[1] = 7\nv = a[1:]"),
        distributed("n = float(v.sum())"),
        distributed("v[0] = 5\nn = float(a.sum())"),
        distributed("w = a[2:]\nbox.append(a[:2])"),
        ordinary("w[0] = 3\nn = float(a.sum())"),
        distributed("w[1] = 4\na[0] = 1"),
        ordinary("a[3] = 2\nn = float(v.sum()) + float(box[0].sum()) + float(w.sum())"),
        distributed("n = float(w.sum() + box[0].sum())"),
    ]


SEQUENCES: dict[str, list[Cell]] = {
    "same text here and there": [
        ordinary("total = 0\nlog = []"),
        *both("total += 1\nlog.append(total)\nlast = log[-1]"),
    ],
    "a function that a library's decorator made there": [
        ordinary(_IMPORTS),
        distributed("@torch.no_grad()\ndef f(x):\n    return (x * torch.ones(1, requires_grad=True)).requires_grad"),
        distributed("a = f(2)"),
        ordinary("b = f(3)"),
        distributed("c = [f(4), f.__name__]"),
    ],
    "aliases made here": [
        ordinary("a = [1]\nb = a\nd = {'k': a}"),
        distributed("b.append(2)\nd['k'].append(3)"),
        ordinary("a.append(4)"),
        distributed("n = len(d['k'])"),
    ],
    "aliases made there": [
        distributed("a = b = [1]\nc = a"),
        distributed("b.append(2)"),
        distributed("d = {'x': c}\nd['x'].append(3)\nn = len(a)"),
    ],
    "alias of the notebook's": [
        ordinary("a = [1, [2]]"),
        distributed("b = a\nc = a[1]"),
        distributed("c.append(3)"),
        ordinary("b.append(4)"),
        distributed("n = len(a), len(c)"),
    ],
    "two names, one list, read apart": [
        ordinary("a = [1]\nb = a"),
        distributed("a.append(2)"),
        distributed("b.append(3)"),
        ordinary("a.append(4)"),
        distributed("n = len(b)"),
    ],
    "cycle": [
        ordinary("a = []\na.append(a)\na.append(1)"),
        distributed("a[0].append(2)\nn = len(a)"),
        ordinary("a.append(3)"),
        distributed("n = len(a[0][0])"),
    ],
    "containers of the library": [
        ordinary(
            f"{_IMPORTS}\nq = collections.deque([1])\nc = collections.Counter('aab')\nd = collections.defaultdict(list)\no = collections.OrderedDict(a=1)\nb = bytearray(b'x')"
        ),
        distributed("q.append(2)\nc.update('b')\nd['k'].append(1)\no['b'] = 2\nb.extend(b'y')"),
        ordinary("q.appendleft(0)\nc['z'] += 1\nd['k'].append(2)\no.move_to_end('a')\nb.append(33)"),
        distributed("n = list(q), dict(c), dict(d), list(o), bytes(b)\nn = str(n)"),
    ],
    "objects of a notebook class": [
        ordinary(
            "class Account:\n    rate = 2\n    def __init__(self):\n        self.items = []\n    def add(self, x):\n        self.items.append(x * self.rate)\na = Account()"
        ),
        distributed("a.add(1)\nb = a\nkind = type(a).__name__"),
        ordinary("Account.rate = 5\na.add(1)"),
        distributed("a.add(1)\na.extra = 'e'"),
        ordinary("del a.extra"),
        distributed("gone = not hasattr(a, 'extra')"),
    ],
    "class defined there": [
        distributed(
            "class Point:\n    def __init__(self, x):\n        self.x = x\n    def double(self):\n        return Point(self.x * 2)\np = Point(2)"
        ),
        ordinary("q = Point(5).double().x"),
        distributed("r = Point(q).double().x\nsame = type(p) is Point"),
    ],
    "attributes of a class made there, next to one changed there": [
        ordinary("class Base:\n    n = 1\nd = [7]"),
        distributed("globals()\nBase.more = 38"),
        ordinary("a = Base()\na.base = Base"),
        distributed("globals()\nMade = type('Made', (Base,), {'kind': a})"),
        distributed("globals()\nMade.kind = d"),
        ordinary("same = Made.kind is d"),
    ],
    "class redefined": [
        ordinary("class A:\n    v = 1"),
        distributed("x = A.v\na = A()"),
        ordinary("class A:\n    v = 2"),
        distributed("y = A.v\nz = a.v\nolder = isinstance(a, A)"),
    ],
    "classes that a base keeps": [
        distributed(
            "class Base:\n    kept = {}\n    def __init_subclass__(cls):\n        Base.kept[cls.__name__] = [cls.__name__]\nxs = [1]"
        ),
        ordinary("class One(Base):\n    pass\nxs.append(One())"),
        distributed("class Two(One):\n    pass\nxs.append(Two())\nBase.kept['One'].append(2)"),
        ordinary("n = sorted(Base.kept), Base.kept['One'][-1]\nclass Three(Two): pass"),
        distributed("m = sorted(Base.kept), isinstance(xs[1], Base), type(xs[2]) is Two"),
    ],
    "functions and their globals": [
        ordinary("LR = 1\ndef scaled(x):\n    return x * LR"),
        distributed("a = scaled(2)"),
        ordinary("LR = 10"),
        distributed("b = scaled(2)"),
        distributed("LR = 100"),
        ordinary("c = scaled(2)"),
        distributed("d = scaled(2)"),
    ],
    "function defined there": [
        distributed("def f(x):\n    return x + K\nK = 3\na = f(1)"),
        ordinary("K = 4\nb = f(1)"),
        distributed("c = f(1)"),
        ordinary("def f(x):\n    return -x"),
        distributed("d = f(1)"),
    ],
    "functions that call functions": [
        ordinary("base = [1]\ndef inner():\n    return len(base)\ndef outer():\n    return inner() + 1"),
        distributed("a = outer()"),
        ordinary("base.append(2)"),
        distributed("b = outer()"),
        ordinary("def inner():\n    return 100"),
        distributed("c = outer()"),
    ],
    "closures": [
        ordinary(
            "def counter():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n        return n\n    def get():\n        return n\n    return up, get\nup, get = counter()"
        ),
        distributed("a = up()\nb = get()"),
        ordinary("c = up()"),
        distributed("d = get()\nup()"),
        ordinary("e = get()"),
    ],
    "defaults, partials, decorators": [
        ordinary(
            f"{_IMPORTS}\ndef add(x, seen=[]):\n    seen.append(x)\n    return len(seen)\np = functools.partial(add, 7)\n@functools.wraps(add)\ndef wrapped(*a):\n    return add(*a)"
        ),
        distributed("a = add(1)\nb = p()\nc = wrapped(2)"),
        ordinary("d = add(3)"),
        distributed("e = add(4)"),
    ],
    "function that assigns a global": [
        ordinary("n = 1\ndef bump():\n    global n\n    n += 1"),
        distributed("bump()\nbump()"),
        ordinary("bump()"),
        distributed("bump()"),
    ],
    "imports": [
        distributed(
            "import math\nimport os.path as path\nfrom collections import OrderedDict as OD\nimport json.decoder"
        ),
        ordinary("a = math.floor(2.5)\nb = json.decoder.JSONDecoder.__name__"),
        distributed("c = math.ceil(a + 0.5)\nd = OD is not None"),
    ],
    "import here, use there": [
        ordinary("import json\nimport xml.dom.minidom\nfrom math import *"),
        distributed(
            "a = json.dumps([1])\nb = xml.dom.minidom.parseString('<a/>').firstChild.tagName\nc = floor(sqrt(16))"
        ),
    ],
    "del": [
        ordinary("a = 1\nb = [1]\nc = 2"),
        distributed("del a\nd = len(b)"),
        ordinary("del b"),
        distributed("known = 'b' in globals()\ndel c\ndel d"),
    ],
    "del then read": [
        ordinary("x = [1]"),
        distributed("n = len(x)"),
        ordinary("del x"),
        distributed("x", raises=NameError),
        ordinary("x = 5"),
        distributed("y = x"),
    ],
    "an error half-way": [
        ordinary("log = []"),
        distributed("a = 1\nlog.append(1)\nb = [a]\n1 / 0\nc = 3", raises=ZeroDivisionError),
        distributed("b.append(a)\nlog.append(2)"),
        ordinary("n = len(log)"),
    ],
    "enums, dataclasses, namedtuples": [
        ordinary(
            f"{_IMPORTS}\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2\n@dataclasses.dataclass\nclass Conf:\n    lr: float = 0.1\n    tags: list = dataclasses.field(default_factory=list)\nP = collections.namedtuple('P', 'x y')"
        ),
        distributed("c = Color.BLUE\nconf = Conf()\nconf.tags.append(c)\np = P(1, 2)\nok = c is Color.BLUE"),
        ordinary("same = c is Color.BLUE\nconf2 = Conf(0.5)\ntotal = p.x + p.y"),
        distributed("conf2.lr *= 2\nconf2.tags.append(p)\nred = Color.RED"),
    ],
    "modules of torch": [
        ordinary(
            f"{_IMPORTS}\nimport torch.nn.functional as F\nloss_fn = torch.nn.CrossEntropyLoss()\nx = torch.ones(2, 3)\ny = torch.tensor([0, 2])"
        ),
        distributed("value = loss_fn(F.relu(x), y).item()"),
        ordinary("x[0, 0] = 5"),
        distributed("value2 = loss_fn(F.relu(x), y).item()"),
    ],
    "leaf tensors and gradients": [
        ordinary(f"{_IMPORTS}\nw = torch.ones(2, requires_grad=True)"),
        distributed("(w * 3).sum().backward()\ng = w.grad.sum().item()"),
        ordinary("h = w.grad.sum().item()\nw.grad.zero_()"),
        distributed("k = w.grad.sum().item()"),
    ],
    "random numbers": [
        ordinary(f"{_IMPORTS}\ntorch.manual_seed(1)\nnp.random.seed(1)\nrandom.seed(1)\na = torch.rand(1).item()"),
        distributed(
            "b = torch.rand(1).item()\nc = float(np.random.rand())\nd = random.random()\nn1 = float(np.random.normal())"
        ),
        ordinary(
            "e = torch.rand(1).item()\nf = float(np.random.rand())\ng = random.random()\nn2 = float(np.random.normal())"
        ),
        distributed("h = torch.randperm(5).tolist()\nh = str(h)"),
    ],
    "default dtype": [
        ordinary(f"{_IMPORTS}\ntorch.set_default_dtype(torch.float64)"),
        distributed("d = torch.ones(1).dtype"),
        distributed("torch.set_default_dtype(torch.float32)"),
        ordinary("e = torch.ones(1).dtype"),
    ],
    "gradients on and off": [
        ordinary(f"{_IMPORTS}\ntorch.set_grad_enabled(False)"),
        distributed("a = torch.is_grad_enabled()\ntorch.set_grad_enabled(True)"),
        ordinary("b = torch.is_grad_enabled()"),
        distributed("c = torch.is_grad_enabled()"),
    ],
    "big arrays": [
        ordinary(f"{_IMPORTS}\nbig = np.arange(300_000.)"),
        distributed("s = float(big.sum())"),
        ordinary("big[0] = 7"),
        distributed("t = float(big.sum())\nbig[1] = 5"),
        ordinary("u = float(big[:2].sum())"),
    ],
    "an array that grows": [
        ordinary(f"{_IMPORTS}\na = np.zeros(2)\nbox = [a]"),
        distributed("n = a.size"),
        ordinary("a = np.append(a, 1)\nbox.append(a)"),
        distributed("n = a.size, len(box)\na[0] = 3"),
    ],
    "comprehensions and walrus": [
        ordinary("xs = [1, 2, 3]"),
        distributed(
            "ys = [x * k for k in xs for x in range(k)]\nif (n := len(ys)) > 2:\n    m = n\nd = {str(k): v for k, v in zip('ab', xs)}"
        ),
    ],
    "conditional assignment": [
        ordinary("flag = False\nx = 1"),
        distributed("if flag:\n    x = 2\ny = x"),
        ordinary("flag = True"),
        distributed("if flag:\n    x = 2\ny = x"),
    ],
    "IPython syntax": [
        ordinary("data = [3, 1, 2]\ntext = 'hi'"),
        distributed("%time out = sorted(data)\nlines = !echo {text} $text\nlines = list(lines)"),
    ],
    "f-strings": [ordinary("who = 'you'\nn = 3"), distributed("s = f'{who:>{n + 2}}{n!r}'")],
    "globals()": [
        ordinary("alpha = 1\nbeta = [2]"),
        distributed("t = globals()['alpha'] + eval('len(beta)')\nexec('gamma = t + 1')"),
    ],
    "generic objects": [
        ordinary(
            "import types, pathlib, datetime, decimal\nns = types.SimpleNamespace(a=[1])\np = pathlib.Path('x')\nd = datetime.date(2020, 1, 2)"
        ),
        distributed("ns.a.append(2)\nns.b = p / 'y'\nwhen = d.replace(year=2021)\nm = decimal.Decimal('1.5')"),
        ordinary("ns.c = 1"),
        distributed("n = ns.c + len(ns.a)"),
    ],
    "switching with state": [
        *both("try:\n    state['n'] += 1\nexcept NameError:\n    state = {'n': 0}\nn = state['n']")[:1],
        distributed("state['n'] += 1\nn = state['n']"),
        ordinary("state['n'] += 1\nn = state['n']"),
        distributed("state['n'] += 1\nn = state['n']"),
    ],
    "generator replaced by list": [
        ordinary("g = (i for i in range(3))\nxs = list(range(3))"),
        distributed("total = sum(xs)"),
        distributed("n = sum(g2 for g2 in xs)\ng = None"),
    ],
    "context managers": [
        ordinary(
            "import contextlib\nlog = []\n@contextlib.contextmanager\ndef note(x):\n    log.append(x)\n    yield x\n    log.append(-x)"
        ),
        distributed("with note(3) as k:\n    log.append('in')"),
        ordinary("n = len(log)"),
    ],
    "match": [
        ordinary("value = {'kind': 'a', 'n': 3}"),
        distributed("match value:\n    case {'kind': 'a', 'n': k}:\n        r = k\n    case _:\n        r = None"),
    ],
    "slots, and objects in objects": [
        ordinary(
            "class Node:\n    __slots__ = ('value', 'next')\n    def __init__(self, value, next=None):\n"
            "        self.value, self.next = value, next\nhead = Node(1, Node(2))\ntail = head.next"
        ),
        distributed("head.value = 10\ntail.value = 20\nhead.next.next = Node(3)"),
        ordinary("tail.next.value += 1\nhead.value += 1"),
        distributed("total = head.value + head.next.value + tail.next.value"),
    ],
    "generators of random numbers": [
        ordinary(
            f"{_IMPORTS}\ng = torch.Generator().manual_seed(3)\nr = np.random.default_rng(4)\np = random.Random(5)"
        ),
        distributed("a = torch.rand(1, generator=g).item()\nb = float(r.random())\nc = p.random()"),
        ordinary("d = torch.rand(1, generator=g).item()\ne = float(r.random())\nf = p.random()"),
        distributed("h = torch.rand(1, generator=g).item()\ni = float(r.random())\nj = p.random()"),
    ],
    "data of a notebook": [
        ordinary(
            f"{_IMPORTS}\nclass Squares(torch.utils.data.Dataset):\n    def __init__(self, n):\n"
            "        self.x = torch.arange(n)\n    def __len__(self):\n        return len(self.x)\n"
            "    def __getitem__(self, i):\n        return self.x[i] ** 2\n"
            "loader = torch.utils.data.DataLoader(Squares(6), batch_size=4)"
        ),
        distributed("n = 0\nfor batch in loader:\n    n += int(batch.sum())\nsize = len(loader.dataset)"),
        ordinary("loader.dataset.x += 1"),
        distributed("m = sum(int(b.sum()) for b in loader)"),
    ],
    "modules without parameters": [
        ordinary(
            f"{_IMPORTS}\nclass Scale(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.k = 2\n    def forward(self, x):\n        return x * self.k + BIAS\n"
            "BIAS = 1\nscale = torch.nn.Sequential(Scale(), torch.nn.ReLU())"
        ),
        distributed("a = scale(torch.ones(2)).sum().item()"),
        ordinary("BIAS = 5\nscale[0].k = 3"),
        distributed("b = scale(torch.ones(2)).sum().item()\nscale[0].k = 10"),
        ordinary("c = scale(torch.ones(2)).sum().item()"),
    ],
    "tables": [
        ordinary("import pandas as pd\ndf = pd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})"),
        distributed("n = int(df['a'].sum())\ndf['c'] = df['a'] * 2\nlabel = df.loc[1, 'b']"),
        ordinary("columns = ','.join(df.columns)\ndf.loc[0, 'a'] = 100"),
        distributed("m = int(df['a'].sum())"),
    ],
    "estimators": [
        ordinary(
            "import numpy as np\nfrom sklearn.linear_model import LinearRegression\n"
            "est = LinearRegression()\nx = np.arange(4.).reshape(-1, 1)\ny = 2 * x[:, 0] + 1"
        ),
        distributed("est.fit(x, y)\nslope = round(float(est.coef_[0]), 6)"),
        ordinary("again = round(float(est.predict([[10.]])[0]), 6)"),
    ],
    "cached functions": [
        ordinary(
            f"{_IMPORTS}\nK = 2\n@functools.lru_cache\ndef f(x):\n    return x * K\nclass A:\n"
            "    @functools.cached_property\n    def v(self):\n        return f(3)\n    @staticmethod\n    def s():\n        return K"
        ),
        distributed("a = f(2)\nb = A().v + A.s()"),
        distributed(
            "@functools.lru_cache(maxsize=None)\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\nc = fib(20)"
        ),
        distributed("d = fib(10)"),
    ],
    "arrays of objects and of text": [
        ordinary(
            "import numpy as np\no = np.array([[1], {'a': 2}], dtype=object)\nt = np.array(['a', 'bc'])\nd = np.array(['2020-01-01'], dtype='datetime64[D]')\nst = np.zeros(2, dtype=[('x', 'f4'), ('y', 'i4')])"
        ),
        distributed("o[0].append(5)\nt[0] = 'zz'\nyear = str(d[0])\nst['x'][1] = 3"),
        ordinary("o[1]['a'] = 9\nst['y'][0] = 4"),
        distributed("n = o[1]['a'] + len(o[0])\nm = float(st['x'][1]) + int(st['y'][0])"),
    ],
    "a large text": [
        ordinary("text = 'x' * 200_000\nparts = [text, text]"),
        distributed("n = len(parts[1])\nsame = parts[0] is parts[1]"),
        ordinary("text += 'y'\nparts[0] = text"),
        distributed("m = len(parts[0])\nmore = text + 'z'"),
    ],
    "methods kept in names": [
        ordinary(
            "class C:\n    def __init__(self):\n        self.n = 0\n    def up(self):\n        self.n += 1\n        return self.n\nc = C()\nup = c.up\nlog = []\nadd = log.append"
        ),
        distributed("a = up()\nadd(a)"),
        ordinary("b = up()\nadd(b)"),
        distributed("d = c.up()\nn = len(log)"),
    ],
    "a class that others derive from": [
        ordinary(
            "import abc\nclass Shape(abc.ABC):\n    registry = {}\n    def __init_subclass__(cls):\n        Shape.registry[cls.__name__] = cls\n    @abc.abstractmethod\n    def area(self): ..."
        ),
        distributed(
            "class Square(Shape):\n    def area(self):\n        return 4\nn = len(Shape.registry)\na = Shape.registry['Square']().area()"
        ),
        ordinary("b = Square().area()\nk = sorted(Shape.registry)\nk = str(k)"),
        distributed("c = isinstance(Square(), Shape)\nm = len(Shape.registry)"),
    ],
    "exceptions": [
        ordinary("class Oops(Exception):\n    def __init__(self, x):\n        super().__init__(x)\n        self.x = x"),
        distributed("try:\n    raise Oops(5)\nexcept Oops as e:\n    value = e.x\n    kept = e.args"),
        distributed("raise ValueError('no')", raises=ValueError),
        ordinary("ok = isinstance(Oops(1), Exception)"),
    ],
    "swapping": [
        ordinary("a, b = [1], [2]"),
        distributed("a, b = b, a"),
        distributed("a.append(3)"),
        ordinary("a, b = b, a\nb.append(4)"),
        distributed("n = a + b\nn = str(n)"),
    ],
    "names that shadow builtins": [
        ordinary("list_ = [1]\nsum = lambda xs: 42\nid = 7"),
        distributed("n = sum(list_) + id"),
        ordinary("del sum, id"),
        distributed("m = sum(list_)"),
    ],
    "threads of both": [
        ordinary("import threading\nout = []\ndef work():\n    out.append(1)"),
        distributed("t = threading.Thread(target=work)\nt.start()\nt.join()\ndel t"),
        ordinary("n = len(out)"),
    ],
    "a tuple that holds an array": [
        ordinary(f"{_IMPORTS}\na = np.arange(3)\ne = (a, 23)\nf = 0"),
        distributed("e += (7,)"),
        distributed("f = 1"),
        ordinary("e[0][0] = 9"),
        distributed("n = int(e[0].sum()) + len(e)"),
    ],
    "swapped with what lives there": [
        distributed("class Box:\n    pass\ng = Box()"),
        ordinary("def keep(v):\n    return lambda: v\nc = keep(3)\nx = [1]"),
        distributed("c, g = g, c"),
        distributed("c, x = x, c"),
        ordinary("n = g() + len(c)"),
        distributed("m = g() + len(c)"),
    ],
    "moved from one list to another": [
        ordinary("class Box:\n    pass\nxs = [Box(), {1}]\nys = []\nxs[0].v = 1"),
        distributed("ys.append(xs.pop(0))\nys.append(xs.pop())\nys[0].v += 1"),
        distributed("b = ys.pop(0)\nb.v += 1"),
        ordinary("b.v += 1"),
        distributed("n = b.v\nxs.append(b)\ndel b"),
        distributed("b, xs = xs[0], None\nb.v += 1"),
    ],
    "attributes of a tensor": [
        ordinary(f"{_IMPORTS}\nt = torch.zeros(2)\nw = torch.ones(2, requires_grad=True)"),
        distributed("t.tag = None\nw.tag = [1]"),
        ordinary("w.tag.append(2)\nt.more = t"),
        distributed("n = len(w.tag)\nsame = t.more is t\ndel t.tag"),
        ordinary("known = hasattr(t, 'tag')\ndel t.more"),
        distributed("m = hasattr(t, 'more')"),
    ],
    "the last attribute": [
        ordinary(
            "class Box:\n    pass\nclass Slot:\n    __slots__ = ('v', 'w')\nb = Box()\nb.v = 1\ns = Slot()\ns.v = s.w = 1"
        ),
        distributed("del b.v, s.w"),
        ordinary("n = hasattr(b, 'v'), hasattr(s, 'w')\ndel s.v"),
        distributed("m = hasattr(s, 'v')\ns.w = b.v = 2"),
        ordinary("del s.w, b.v"),
        distributed("k = hasattr(s, 'w') or hasattr(b, 'v')"),
    ],
    "changed on both sides": [
        ordinary("inner = {}\nouter = [inner]\nclass Box:\n    pass\nbox = Box()\nbox.v = inner"),
        distributed("outer[0]['a'] = 1\nn = box.v['a']"),
        ordinary("box.n = 80\nouter.append(2)"),
        distributed("inner['b'] = 2"),
        distributed("m = box.n + len(outer)"),
    ],
    "held there alone, changed here": [
        ordinary("import collections\nc = collections.OrderedDict(k=1)\nclass Box:\n    pass\nx = [1]"),
        distributed("d = c\nc = Box()\nc.v = d\nc.x = x\nd = None\nx = None"),
        ordinary("c.v.setdefault('l', []).append(81)\nc.x.append(2)"),
        distributed("n = len(c.v['l']) + len(c.x)"),
        ordinary("m = c.v['l'][0]"),
    ],
    "given to a part of what lives there": [
        distributed("c = [{}, 1]"),
        ordinary("c[0].setdefault('l', []).append(59)"),
        distributed("n = len(c[0]['l'])"),
    ],
    "made there, held by both": [
        ordinary(
            "tags = []\nclass Box:\n    def __init__(self):\n        self.n = 0\n    def up(self):\n        self.n += 1"
        ),
        distributed("b = Box()\nup = b.up\ntags.append(b.__dict__)\nmore = [tags[0]]\ndel b"),
        distributed("more[0]['m'] = 5"),
        ordinary("n = len(tags[0])\ntags[0]['k'] = 1"),
        distributed("n = len(more[0])"),
    ],
    "items that are methods": [
        distributed("base = [1]\nds = [base.append, base.copy]"),
        ordinary("ds[0](5)\nn = len(ds[1]())"),
        distributed("m = len(base)"),
    ],
    "what cannot travel, in a list of the notebook": [
        ordinary("import threading\nxs = []"),
        distributed("xs.append(i for i in range(3))\nxs.append(threading.Lock())\nn = next(xs[0])"),
        distributed("n += next(xs[0])\nfree = xs[1].acquire(False)"),
        ordinary("count = len(xs)\nxs.clear()"),
    ],
    "a loss with its graph, in a list of the notebook": [
        ordinary(f"{_IMPORTS}\nlosses = []\nw = torch.ones(2, requires_grad=True)"),
        distributed("losses.append((w * 3).sum())"),
        ordinary("value = losses[0].item()"),
        distributed("losses[0].backward()\ng = w.grad.sum().item()\nlosses.clear()"),
    ],
    "views of an array": _views("np.zeros(4)"),
    "views of a tensor": _views("torch.zeros(4)"),
    "a view of what lives there": [
        ordinary(f"{_IMPORTS}\nxs = []"),
        distributed("a = np.zeros(3)\nt = torch.zeros(3)\nxs += [a[1:], t[1:]]"),
        distributed("a[1] = 5\nt[1] = 6"),
        ordinary("n = float(xs[0].sum()) + float(xs[1].sum())\nxs[0][1] = 7\nxs[1][1] = 8"),
        distributed("m = float(a.sum()) + float(t.sum())"),
    ],
    "a slice first, the whole array later": [
        ordinary(f"{_IMPORTS}\na = np.zeros(100)\nv = a[:2]\nbox = [v]"),
        distributed("n = float(v.sum()) + len(box)"),
        distributed("a[0] = 3\nn = float(v.sum())"),
        distributed("v[1] = 4\nn = float(box[0].sum() + a.sum())"),
    ],
    "a view there of what changes here": [
        ordinary(f"{_IMPORTS}\nf = np.arange(4)"),
        distributed("d = f.T"),
        ordinary("f[:] = 71\nn = int(d[0])"),
    ],
    "an attribute that is as that of the base": [
        ordinary("class Base:\n    kind = None\nclass Made(Base):\n    kind = None"),
        distributed("Base.kind = 5\nn = Made.kind"),
        ordinary("m = Made.kind"),
    ],
    "given to what holds itself": [
        ordinary("import collections"),
        distributed("c = collections.Counter('aab')\nc['c'] = c"),
        ordinary("c.setdefault('l', []).append(37)"),
        distributed("n = c['l'][0]\ndel c['c']"),
    ],
    "a method that is an attribute": [
        ordinary("def call(f, x):\n    f(x)\nxs = [1]"),
        distributed("class Box:\n    pass\nh = Box()\nh.v = [].append\nh.w = xs"),
        ordinary("fs = [h.v]"),
        distributed("fs[0](5)\nn = len(h.v.__self__)\nfs = None"),
    ],
    "a dict given to what lives there": [
        ordinary("x = {'k': 1}\nc = [x]"),
        distributed("d = {}\nl = []"),
        ordinary("d['x'] = x\nl.append(c[0])"),
        distributed("same = d['x'] is c[0] is l[0]\nd['x']['m'] = 1"),
        ordinary("n = len(x)"),
    ],
    "attributes in another order": [
        ordinary("class A:\n    pass\na = A()\na.x = 1\na.y = 2"),
        distributed("del a.x\na.x = 3"),
        ordinary("r = list(vars(a))\ndel a.y\na.y = 1"),
        distributed("q = list(vars(a))"),
    ],
    **MODES,
    **SHARING,
}
