"""A table of data as in notebooks: how to make each value, how to change it, and how to describe it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SETUP", "VALUES", "DataValue"]


class DataValue(NamedTuple):
    """A kind of data. In its expressions, `v` is the value.

    Attributes:
        made: An expression that makes it.
        change: A statement that changes it in place, or binds `v` to another value if it is immutable.
        seen: An expression that describes it. Equal values have equal descriptions.
        immutable: True if it has no identity to be kept.
    """

    made: str
    change: str = ""
    seen: str = "repr(v)"
    immutable: bool = False


SETUP = """
import abc, argparse, array, collections, copy, dataclasses, datetime, decimal, enum, fractions, functools, io, ipaddress
import itertools, json, logging, operator, pathlib, random, re, string, types, typing, urllib.parse, uuid, zoneinfo
import numpy as np, pandas as pd, scipy.sparse, sklearn.linear_model, sklearn.pipeline, sklearn.preprocessing, torch
import sklearn.metrics, matplotlib.figure
class Color(enum.Enum):
    RED = 1
    BLUE = 2
class Access(enum.Flag):
    READ = 1
    WRITE = 2
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
@dataclasses.dataclass
class Config:
    lr: float = 0.1
    tags: list = dataclasses.field(default_factory=list)
    inner: typing.Any = None
@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str
    items: list
@dataclasses.dataclass(slots=True)
class Slotted:
    a: int = 1
    b: list = dataclasses.field(default_factory=list)
class Account:
    rate = 2
    def __init__(self, owner):
        self.owner, self.items = owner, []
    def add(self, x):
        self.items.append(x * self.rate)
        return self
    @property
    def total(self):
        return sum(self.items)
class Stateful:
    def __init__(self):
        self.kept, self.dropped = [1], 'cache'
    def __getstate__(self):
        return {'kept': self.kept}
    def __setstate__(self, state):
        self.kept, self.dropped = state['kept'], 'cache'
class Slots:
    __slots__ = ('a', 'b')
    def __init__(self):
        self.a, self.b = 1, []
class Stack(list):
    def top(self):
        return self[-1]
class Registry(dict):
    kind = 'registry'
class Name(str):
    pass
class Key:
    def __init__(self, n):
        self.n = n
    def __hash__(self):
        return hash(self.n)
    def __eq__(self, other):
        return isinstance(other, Key) and self.n == other.n
    def __repr__(self):
        return f'Key({self.n})'
class Oops(Exception):
    def __init__(self, code, *, where):
        super().__init__(code)
        self.where = where
class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...
class Square(Shape):
    def __init__(self, side):
        self.side = side
    def area(self):
        return self.side ** 2
Point = collections.namedtuple('Point', 'x y')
class Row(typing.NamedTuple):
    id: int
    cells: list
def counter(start):
    counts = [start]
    def up():
        counts[0] += 1
        return counts[0]
    return up
def scaled(x, factor=2, *, seen=None):
    return x * factor
@functools.lru_cache
def cached(n):
    return n * n
def node():
    a = {'next': None}
    a['next'] = a
    return a
def fitted():
    x = np.arange(12.0).reshape(6, 2)
    return sklearn.linear_model.LinearRegression().fit(x, x.sum(1))
def figure():
    made = matplotlib.figure.Figure()
    made.add_subplot().plot([1, 2, 3])
    return made
def table():
    return pd.DataFrame({'a': [1, 2, 3], 'b': ['x', 'y', 'z'], 'c': [0.5, None, 1.5]})
""".strip()

_ARRAY = "v[...] = 7", "(v.dtype.str, v.shape, v.tolist(), v.flags.writeable)"
_FRAME = "v['new'] = range(len(v))", "(v.to_string(), str(v.dtypes.tolist()), v.index.tolist(), list(v.columns))"

VALUES: dict[str, DataValue] = {
    # Python's containers
    "list": DataValue("[1, 2.5, 'x', None, True]", "v.append(3)"),
    "empty list": DataValue("[]", "v.append(3)"),
    "rows": DataValue("[{'epoch': 1, 'loss': 2.0}, {'epoch': 2, 'loss': 1.0}]", "v[0]['more'] = 1; v.reverse()"),
    "dict": DataValue("{'lr': 0.1, 'n': 3, 4: 'four', None: ()}", "v['new'] = len(v)"),
    "history": DataValue("{'loss': [2.0, 1.0], 'acc': [0.1, 0.5]}", "v['loss'].append(0.5)"),
    "nested": DataValue("{'a': {'b': {'c': [1, {'d': {2, 3}}]}}}", "v['a']['b']['c'][1]['d'].add(4)"),
    "set": DataValue("{1, 2, 'x', (1, 2)}", "v.add(3)", "sorted(map(repr, v))"),
    "set of strings": DataValue("{f'word{i}' for i in range(50)}", "v.discard('word3')", "sorted(v)"),
    "frozenset": DataValue("frozenset({1, (2, 3)})", "v = v | {9}", "sorted(map(repr, v))", True),
    "tuple": DataValue("(1, 'a', (2.0, None))", "v = (*v, 3)", immutable=True),
    "tuple with a list": DataValue("(1, [2, 3])", "v[1].append(4)", immutable=True),
    "list of tuples": DataValue("[(1, 'a'), (2, 'b')]", "v.append((3, 'c'))"),
    "cycle": DataValue("node()", "v['more'] = 1", "(sorted(v), v['next'] is v)"),
    "shared": DataValue("(lambda x: [x, x, {'x': x}])([1])", "v[0].append(2)", "(v, v[0] is v[1] is v[2]['x'])"),
    "bytearray": DataValue("bytearray(b'abc')", "v.extend(b'd')"),
    "bytes": DataValue("b'abc' * 50_000", "v = v + b'd'", "(len(v), v[-3:])", True),
    "text": DataValue("'text' * 50_000", "v += 'more'", "(len(v), v[-6:])", True),
    "list of text": DataValue("['some words'] * 20 + [f'word {i}' for i in range(20)]", "v[0] = 'other'"),
    "deque": DataValue("collections.deque([1, 2], maxlen=3)", "v.extend([3, 4])", "(repr(v), v.maxlen)"),
    "Counter": DataValue("collections.Counter('hello')", "v.update('low')", "sorted(v.items())"),
    "OrderedDict": DataValue("collections.OrderedDict(b=1, a=[2])", "v.move_to_end('b')"),
    "defaultdict": DataValue("collections.defaultdict(list, a=[1])", "v['b'].append(2)"),
    "defaultdict of a lambda": DataValue(
        "collections.defaultdict(lambda: [0])", "v[len(v)].append(2)", "(dict(v), type(v.default_factory).__name__)"
    ),
    "ChainMap": DataValue("collections.ChainMap({'a': 1}, {'b': [2]})", "v['c'] = 3; v['b'].append(3)"),
    "UserDict": DataValue("collections.UserDict(a=[1])", "v['a'].append(2)"),
    "UserList": DataValue("collections.UserList([1])", "v.append(2)"),
    "namedtuple": DataValue("Point(1, [2])", "v.y.append(3)", "(repr(v), type(v) is Point)", True),
    "NamedTuple": DataValue("Row(1, [2])", "v.cells.append(3)", "(repr(v), type(v) is Row)", True),
    "array.array": DataValue("array.array('d', [1.0, 2.0])", "v.append(3.0)"),
    # Values of the library
    "SimpleNamespace": DataValue("types.SimpleNamespace(a=[1], b=types.SimpleNamespace(c=2))", "v.b.c = [3]; v.n = 1"),
    "argparse.Namespace": DataValue("argparse.Namespace(lr=0.1, layers=[1, 2])", "v.layers.append(3); v.seed = 1"),
    "decimals": DataValue("[decimal.Decimal('1.10'), fractions.Fraction(1, 3), 1 + 2j]", "v.append(1)"),
    "dates": DataValue(
        "{'d': datetime.date(2024, 2, 29), 't': datetime.datetime(2024, 1, 1, 12, tzinfo=zoneinfo.ZoneInfo('UTC'))}",
        "v['dt'] = datetime.timedelta(days=1)",
    ),
    "paths": DataValue("[pathlib.Path('a') / 'b', pathlib.PurePosixPath('/c')]", "v.append(pathlib.Path())"),
    "ids": DataValue("{uuid.UUID(int=5): ipaddress.ip_address('10.0.0.1')}", "v[uuid.UUID(int=6)] = 1"),
    "pattern": DataValue("{'p': re.compile('a+', re.I)}", "v['n'] = v['p'].match('AAb').end()"),
    "url": DataValue("urllib.parse.urlparse('http://a/b?c=d')", "v = v._replace(path='/e')", immutable=True),
    "Template": DataValue("string.Template('$a and $b')", "v.more = 1", "(v.substitute(a=1, b=2), vars(v))"),
    "StringIO": DataValue("io.StringIO('text')", "v.write('more')", "v.getvalue()"),
    "BytesIO": DataValue("io.BytesIO(b'text')", "v.write(b'more')", "v.getvalue()"),
    "logger": DataValue("logging.getLogger('of.a.cell')", "", "v.name"),
    "Random": DataValue("random.Random(3)", "v.random()", "v.getstate()"),
    "NumPy's Generator": DataValue("np.random.default_rng(3)", "v.normal()", "v.bit_generator.state"),
    "RandomState": DataValue("np.random.RandomState(3)", "v.rand()", "v.get_state()[1].tolist()"),
    "torch's Generator": DataValue(
        "torch.Generator().manual_seed(3)", "torch.rand(1, generator=v)", "v.get_state().tolist()"
    ),
    "iterator": DataValue("iter([1, 2, 3, 4, 5, 6])", "next(v)", "list(copy.copy(v))"),
    "range iterator": DataValue("iter(range(9))", "next(v)", "list(copy.copy(v))"),
    "itemgetter": DataValue("operator.itemgetter(1)", "", "v('abc')"),
    # Classes of a cell
    "enum member": DataValue("Color.RED", "v = Color.BLUE", "(v is Color(v.value), v in {Color(v.value)})", True),
    "enum members": DataValue("{Color.RED: [Color.BLUE], 'a': Access.READ | Access.WRITE}", "v[Level.HIGH] = 1"),
    "flag": DataValue("Access.READ | Access.WRITE", "v = Access.READ", "(repr(v), Access.READ in v)", True),
    "IntEnum": DataValue("[Level.LOW, Level.HIGH]", "v.sort(reverse=True)", "(repr(v), v[0] is Level(int(v[0])))"),
    "dataclass": DataValue("Config(tags=['a'])", "v.lr = 0.2; v.tags.append('b')", "(v, isinstance(v, Config))"),
    "nested dataclass": DataValue("Config(inner=[Config(), {'c': Config(2)}])", "v.inner[1]['c'].lr = 3", "v"),
    "frozen dataclass": DataValue("Frozen('a', [1])", "v.items.append(2)", "v"),
    "dataclass with slots": DataValue("Slotted(b=[1])", "v.a = 5; v.b.append(2)", "v"),
    "instance": DataValue(
        "Account('me').add(1)", "v.add(2); v.extra = 'e'", "(vars(v), v.total, isinstance(v, Account))"
    ),
    "instances": DataValue(
        "[Account(n) for n in 'abc']", "v[1].add(5); v.append(Account('z'))", "[vars(each) for each in v]"
    ),
    "instance with slots": DataValue("Slots()", "v.a = 2; v.b.append(1)", "(v.a, v.b, type(v) is Slots)"),
    "instance with a state": DataValue("Stateful()", "v.kept.append(2)", "(v.kept, v.dropped)"),
    "abstract class": DataValue("Square(3)", "v.side += 1", "(v.area(), isinstance(v, Shape))"),
    "list of one's own": DataValue("Stack([1, 2])", "v.append(3); v.note = 'n'", "(list(v), v.top(), vars(v))"),
    "dict of one's own": DataValue("Registry(a=[1])", "v['a'].append(2); v.note = 'n'", "(dict(v), v.kind, vars(v))"),
    "str of one's own": DataValue("{'name': Name('n')}", "v['n'] = 1", "(v, type(v['name']) is Name)"),
    "keys of one's own": DataValue("{Key(1): 'a', Key(2): 'b'}", "v[Key(3)] = 'c'", "(repr(v), v[Key(1)])"),
    "set of one's own": DataValue("{Key(1), Key(2)}", "v.add(Key(3))", "(len(v), Key(1) in v)"),
    "exception": DataValue("Oops(3, where=[4])", "v.where.append(5)", "(v.args, v.where, isinstance(v, Oops))"),
    "exception of Python's": DataValue("KeyError('k')", "v.add_note('n')", "(repr(v), vars(v))"),
    "class": DataValue(
        "type('Made', (Account,), {'rate': 3})", "v.more = [1]", "(v('x').add(1).items, vars(v).get('more'))"
    ),
    # Functions
    "function": DataValue("scaled", "", "(v(3), v.__name__)"),
    "lambda": DataValue("lambda x, k=[1]: (x, k)", "v.__defaults__[0].append(2)", "v(1)"),
    "closure": DataValue("counter(5)", "v()", "v.__closure__[0].cell_contents"),
    "partial": DataValue("functools.partial(scaled, factor=3)", "v.note = [1]", "(v(2), v.keywords, vars(v))"),
    "cached function": DataValue("cached", "", "v(4)"),
    "callbacks": DataValue("[lambda x: x + 1, str.upper, len, counter(1)]", "v.pop(0)", "len(v), v[-1].__name__"),
    # NumPy
    "floats": DataValue("np.arange(6.0).reshape(2, 3)", *_ARRAY),
    "integers": DataValue("np.arange(5, dtype=np.int16)", *_ARRAY),
    "booleans": DataValue("np.array([True, False])", *_ARRAY),
    "scalar array": DataValue("np.array(3.5)", *_ARRAY),
    "view": DataValue("np.arange(10)[2:8:2]", *_ARRAY),
    "Fortran order": DataValue("np.asfortranarray(np.arange(6.0).reshape(2, 3))", *_ARRAY),
    "empty array": DataValue("np.empty((0, 3))", "", "(v.shape, v.dtype.str)"),
    "large array": DataValue("np.zeros(300_000)", "v[5] = 7", "(v.shape, v.sum())"),
    "read-only array": DataValue("np.broadcast_to(np.arange(3), (2, 3))", "", "(v.tolist(), v.flags.writeable)"),
    "structured": DataValue(
        "np.array([(1, 2.0)], dtype=[('a', 'i4'), ('b', 'f8')])", "v['a'] = 5", "(v.dtype, v.tolist())"
    ),
    "text array": DataValue("np.array(['a', 'bc'])", "v[0] = 'zz'", "(v.dtype.str, v.tolist())"),
    "datetime64": DataValue("np.array(['2024-01-01'], 'M8[D]')", "v[0] += 1", "(v.dtype.str, v.tolist())"),
    "object array": DataValue("np.array([1, 'a', [2]], dtype=object)", "v[2].append(3)", "v.tolist()"),
    "masked array": DataValue("np.ma.array([1, 2, 3], mask=[0, 1, 0])", "v[0] = 9", "(v.tolist(), v.mask.tolist())"),
    "NumPy's numbers": DataValue("{'f': np.float32(1.5), 'i': np.int64(2), 'b': np.bool_(True)}", "v['n'] = 1"),
    "results with arrays": DataValue("{'y': np.arange(3), 'score': np.float64(0.5)}", "v['y'][0] = 9"),
    # pandas
    "DataFrame": DataValue("table()", *_FRAME),
    "Series": DataValue("table()['b']", "v[1] = 'new'", "(v.tolist(), v.name, v.index.tolist())"),
    "index of dates": DataValue("table().set_index(pd.date_range('2024-01-01', periods=3))", *_FRAME),
    "MultiIndex": DataValue("table().set_index(['a', 'b'])", *_FRAME),
    "categories": DataValue("pd.DataFrame({'k': pd.Categorical(['a', 'b', 'a'])})", *_FRAME),
    "Timestamp": DataValue("[pd.Timestamp('2024-01-01'), pd.Timedelta('1h')]", "v.append(pd.NaT)"),
    "grouped": DataValue("table().groupby('b').agg({'a': 'sum'})", *_FRAME),
    # other libraries
    "sparse matrix": DataValue("scipy.sparse.eye(3, format='csr')", "v.data[0] = 5", "v.toarray().tolist()"),
    "estimator": DataValue("fitted()", "v.coef_[0] = 9.0", "(v.coef_.tolist(), v.get_params())"),
    "pipeline": DataValue(
        "sklearn.pipeline.make_pipeline(sklearn.preprocessing.StandardScaler(), fitted())",
        "v.steps[0][1].with_mean = False",
        "repr(v)",
    ),
    "report": DataValue("sklearn.metrics.classification_report([0, 1, 1], [0, 1, 0], output_dict=True)", "v['n'] = 1"),
    "figure": DataValue(
        "figure()", "v.axes[0].set_title(v.axes[0].get_title() + 't')", "(v.axes[0].get_title(), len(v.axes[0].lines))"
    ),
}
"""The values by the names that tests use."""
