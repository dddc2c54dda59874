"""Data and device objects, and the notebook's version of each, with engines in this process."""

from __future__ import annotations

import collections
import copy
import json
import pickle
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from distnb.engine.namespace.surveys import MOST_DEVICE_OBJECTS, is_container
from distnb.errors import DistributedValueError, OptionError
from distnb.notebook.handles.handle import HANDLES, RemoteMirrored, RemotePerReplica, state_of_handle
from distnb.options import nbytes_of
from distnb.runtime.inspection.device_objects import is_device_object
from distnb.values import Mirrored, PerReplica
from tests.support.worlds import DoubleWorld, distributed, modes_kept, ordinary, run_all

_SETUP = """
import collections, dataclasses, threading, torch
class Agent:
    def __init__(self, net):
        self.net, self.lr, self.history, self.config = net, 0.5, [], {'n': 1}
    def fit(self):
        self.history.append(len(self.history))
        return self.history
    @property
    def fresh(self):
        return [self.lr]
@dataclasses.dataclass
class Run:
    name: str
    model: object = None
class Registry(dict):
    pass
class Guarded(list):
    def append(self, x):
        assert isinstance(x, int)
        super().append(x)
Pair = collections.namedtuple('Pair', 'a b')
net = torch.nn.Linear(2, 1)
"""


@pytest.fixture
def world() -> Iterator[DoubleWorld]:
    torch.set_num_threads(1)
    with modes_kept():
        world = DoubleWorld(2)
        there(world, _SETUP)
        yield world


def there(world: DoubleWorld, text: str) -> None:
    run_all(world, [distributed(text)])


def here(world: DoubleWorld, text: str) -> None:
    run_all(world, [ordinary(text)])


# -- kinds of objects --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "stays"),
    [
        (torch.ones(1), True),
        (torch.nn.Parameter(torch.ones(1)), True),
        (torch.nn.Linear(1, 1), True),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), True),
        (torch.nn.Linear(1, 1).register_forward_hook(lambda *args: None), True),
        (PerReplica([1, 2]), True),
        (torch.Generator(), False),
        (torch.float32, False),
        ([torch.ones(1)], False),
        (np.ones(1), False),
        (object(), False),
    ],
)
def test_device_objects_are_recognised(value: object, stays: bool) -> None:
    assert is_device_object(value) is stays


def test_which_containers_may_hold_handles() -> None:
    """Allow only containers that are unpickled without their own code, which might not accept a handle."""

    class Plain(dict[str, int]):
        extra = 1

    class Checked(list[int]):
        def append(self, item: int) -> None:
            super().append(item)

    class Counted(collections.namedtuple("Counted", "a b")):
        def __new__(cls, a: int) -> Counted:
            return super().__new__(cls, a, a)

    for kind in (list, dict, tuple, set, collections.deque, collections.Counter, collections.OrderedDict, Plain):
        assert is_container(kind), kind
    assert is_container(collections.namedtuple("Point", "x y"))
    for other in (Checked, Counted, collections.UserDict, torch.nn.utils.rnn.PackedSequence, str, object):
        assert not is_container(other), other


def test_containers_are_returned_with_handles_in_them(world: DoubleWorld) -> None:
    there(
        world,
        "t = torch.ones(2) * (1 + rid())\nconfig = {'lr': 0.1, 'net': net, 'own': [t, (t, 3)], 'pair': Pair(net, 5)}\n"
        "registry, window = Registry(net=net), collections.deque([net, 1], maxlen=2)\nalso = {'net': net, 'new': net.weight}",
    )
    ns = world.notebook.user_ns
    config = ns["config"]
    assert type(config) is dict
    assert config["lr"] == 0.1
    assert (
        config["net"] is ns["net"] is config["pair"].a is ns["registry"]["net"] is ns["window"][0] is ns["also"]["net"]
    )
    assert isinstance(config["net"], RemoteMirrored)
    assert config["own"][0] is config["own"][1][0] is ns["t"]
    assert isinstance(ns["t"], RemotePerReplica), "each handle is judged by its own object"
    assert [value.tolist() for value in ns["t"].values] == [[1, 1], [2, 2]]
    assert (type(config["pair"]), type(ns["registry"]), ns["window"].maxlen) == (ns["Pair"], ns["Registry"], 2)
    here(world, "config['lr'] = 0.2\nconfig['own'].append('here')\ndel config['pair']")
    there(
        world,
        "found = config['lr'], len(config['own']), config['net'] is net, config['own'][1][0] is t, 'pair' in config\n"
        "config['more'] = torch.zeros(1)",
    )
    assert ns["found"] == (0.2, 3, True, True, False)
    assert isinstance(config["more"], RemoteMirrored)


def test_an_instance_that_holds_a_device_object_stays_on_the_engines(world: DoubleWorld) -> None:
    there(
        world,
        "agent, run = Agent(net), Run('a', net)\nbare, guarded = Run('b'), Guarded()\nlist.append(guarded, net)\n"
        "box = {'agent': agent, 'runs': [run, bare], 'n': 1}\nlater = [Agent(torch.nn.Linear(1, 1))]",
    )
    ns = world.notebook.user_ns
    for name in ("agent", "run", "guarded"):
        assert isinstance(ns[name], RemoteMirrored), name
    assert ns["bare"] == ns["Run"]("b")
    assert ns["box"]["agent"] is ns["agent"]
    assert ns["box"]["runs"] == [ns["run"], ns["bare"]]
    assert ns["box"]["runs"][1] is ns["bare"]
    assert ns["later"][0].lr == 0.5
    assert (ns["agent"].lr, ns["run"].name, ns["agent"].net is ns["net"]) == (0.5, "a", True)


def test_attributes_of_a_handle_are_data_of_its_object(world: DoubleWorld) -> None:
    there(world, "agent = Agent(net)\nagent.fit()")
    agent = world.notebook.user_ns["agent"]
    history, config = agent.history, agent.config
    assert json.dumps([history, config]) == '[[0], {"n": 1}]'
    assert agent.history is history
    history.append("here")
    config["n"] = 2
    there(world, "found = agent.history[-1], agent.config['n']\nagent.fit()")
    assert world.notebook.user_ns["found"] == ("here", 2)
    assert history == [0, "here", 2]
    assert agent.fit() is history
    assert history == [0, "here", 2, 3]
    assert agent.fresh == [0.5]
    for _ in range(60):
        assert agent.fresh is not agent.fresh
    held = {name for fact in state_of_handle(agent).facts.values() for name in fact.holds}
    assert len(held) < 60, "objects that it no longer holds are forgotten"
    history.append("still known")
    there(world, "found = agent.history[-1]")
    assert world.notebook.user_ns["found"] == "still known"


def test_at_most_a_thousand_device_objects_become_handles(world: DoubleWorld) -> None:
    most = MOST_DEVICE_OBJECTS
    here(world, "grown = []\nalias = grown")
    there(
        world,
        f"some = [torch.tensor(float(i)) for i in range({most})]\nmany = [torch.tensor(float(i)) for i in range({most + 1})]\n"
        "nearby = {'n': len(many)}\ngrown += many",
    )
    ns = world.notebook.user_ns
    assert type(ns["some"]) is list
    assert ns["some"][7].item() == 7
    assert isinstance(ns["many"], Mirrored)
    assert len(ns["many"]) == most + 1
    assert ns["many"][7].item() == 7
    assert ns["nearby"] == {"n": most + 1}
    assert ns["grown"] is ns["alias"]
    assert isinstance(ns["grown"], HANDLES)
    assert any("`grown` now holds too many tensors" in notice for notice in world.notices)
    there(world, "total = float(sum(grown))")
    assert ns["total"] == most * (most + 1) / 2
    with pytest.raises(DistributedValueError, match=r"more than 1,000 objects.*strategy\.run"):
        list(ns["many"])


def test_an_object_that_cannot_be_pickled_is_a_handle_with_the_reason(world: DoubleWorld) -> None:
    there(
        world,
        "lock = threading.Lock()\ngen = (i for i in range(3))\nbox = {'lock': lock, 'n': 1, 'file': open('/dev/null')}\n"
        "class Locked:\n    def __init__(self):\n        self.lock, self.n = threading.Lock(), 3\nlocked = Locked()\nother = [1]",
    )
    ns = world.notebook.user_ns
    assert ns["other"] == [1]
    assert (type(ns["box"]), ns["box"]["n"], ns["box"]["lock"] is ns["lock"]) == (dict, 1, True)
    assert isinstance(ns["box"]["file"], HANDLES)
    assert isinstance(ns["locked"], HANDLES), "an instance that holds it stays whole"
    assert ns["locked"].n == 3
    assert "cannot be pickled" in state_of_handle(ns["lock"]).why
    assert [next(ns["gen"]), *ns["gen"]] == [0, 1, 2]
    there(world, "free = box['lock'].acquire(False), box['lock'] is lock\nlock.release()\nbox['file'].close()")
    assert ns["free"] == (True, True)


def test_large_data_stays_on_the_engines_with_a_notice(world: DoubleWorld) -> None:
    world.namespace.most_nbytes = 10_000
    here(world, "import numpy as np\nmine = np.zeros(10_000)")
    there(
        world,
        "import numpy as np\nsmall, large, text = np.zeros(100), np.zeros(10_000), ['x' * 99] * 200\n"
        "rows = [{'n': n} for n in range(5000)]\nholder = {'mine': mine, 'n': 1}\nmine[0] = 5",
    )
    ns = world.notebook.user_ns
    assert type(ns["small"]) is np.ndarray
    assert ns["text"][0] == "x" * 99, "a shared object counts once"
    assert isinstance(ns["large"], Mirrored)
    assert isinstance(ns["rows"], Mirrored)
    assert ns["holder"]["mine"] is ns["mine"], "objects of the notebook do not count"
    assert ns["mine"][0] == 5
    notices = [notice for notice in world.notices if "stays on the replicas" in notice]
    assert len(notices) == 2
    assert all("strategy.local_results" in notice and "--data-limit" in notice for notice in notices)
    assert ns["large"].component(1).shape == (10_000,)
    assert (len(ns["rows"]), ns["rows"][7], ns["large"][:2].tolist()) == (5000, {"n": 7}, [0, 0])
    with pytest.raises(DistributedValueError, match=r"`rows` .*too large.*local_results\(rows\)\[0\]"):
        list(ns["rows"])
    world.namespace.most_nbytes = 10_000_000
    there(world, "again = large\nlarge = large + 1")
    assert type(ns["large"]) is np.ndarray
    assert isinstance(ns["again"], Mirrored), "it was left there"


def test_sizes_are_parsed() -> None:
    assert [nbytes_of(size) for size in (5, "64MB", "1.5 GB", "2MiB", "7")] == [
        5,
        64_000_000,
        1_500_000_000,
        2 << 20,
        7,
    ]
    for size in ("much", "-1", True, 1.5, "5 XB"):
        with pytest.raises(OptionError, match="is not a size"):
            nbytes_of(size)  # type: ignore[arg-type]


def test_notebook_data_stays_data_if_one_replica_gives_it_another_name(world: DoubleWorld) -> None:
    here(world, "rows = [1]\ndef scaled(x): return 2 * x")
    there(world, "made = [2]\nif rid() == 0: log, best, kept = rows, scaled, made")
    there(world, "config = {'rows': rows, 'made': made, 'f': scaled}\nagain = rows\nrows.append(3)")
    ns = world.notebook.user_ns
    assert type(ns["log"]) is type(ns["best"]) is type(ns["kept"]) is RemotePerReplica
    assert ns["again"] is ns["config"]["rows"] is ns["rows"]
    assert ns["config"] == {"rows": [1, 3], "made": [2], "f": ns["scaled"]}
    assert ns["log"].component(0) == [1, 3]


def test_records_with_tensors_can_be_changed_here_and_then_differently_on_replicas(world: DoubleWorld) -> None:
    there(
        world,
        "def record(step): return {'step': step, 'loss': torch.ones(3) * step, 'tags': ['a']}\n"
        "log = [record(step) for step in range(3)]",
    )
    here(world, "log[0]['tags'].append('b')")
    there(world, "log.append({'step': rid(), 'tags': []})")
    assert [(each[0]["tags"], each[3]["step"]) for each in world.notebook.user_ns["log"].values] == [
        (["a", "b"], 0),
        (["a", "b"], 1),
    ]


def test_data_deep_within_a_handle_can_be_changed(world: DoubleWorld) -> None:
    there(world, "deep = [rid(), [rid(), [rid(), {'tags': [1]}]]]")
    here(world, "deep[1][1][1]['tags'].append(5)")
    there(world, "tags = deep[1][1][1]['tags']")
    assert world.notebook.user_ns["tags"] == [1, 5]


def test_records_in_a_list_that_replicas_changed_differently_remain_equal(world: DoubleWorld) -> None:
    there(world, "log = {'rows': [{'loss': torch.ones(3), 'tags': [1]}]}\nother = {'rows': [{'loss': torch.ones(3)}]}")
    there(world, "log['rows'].append(rid())")
    there(world, "log['rows'][0]['tags'].append(2)")
    there(world, "tags = log['rows'][0]['tags']\nrows = [{'loss': torch.ones(3), 'sub': {'x': 1}}]\nbox = Agent(net)")
    assert world.notebook.user_ns["tags"] == [1, 2]
    there(world, "rows.append([rid()])")
    there(world, "rows[0]['sub']['y'] = 2")
    there(world, "sub = rows[0]['sub']")
    assert world.notebook.user_ns["sub"] == {"x": 1, "y": 2}


# -- in a default cell -------------------------------------------------------------------------------------------------


def test_a_default_cell_finds_plain_objects_inside_notebook_objects(world: DoubleWorld) -> None:
    there(
        world,
        "config = {'net': net, 'pair': (net, [net.weight]), 'window': collections.deque([net])}\n"
        "def of(held):\n    return lambda x, other=held: held(x) + other(x)\nf = of(net)\nlock = {'lock': threading.Lock()}",
    )
    here(world, "class Mine: pass\nmine = Mine()\nmine.net = config['net']\nMine.shared = config['net']")
    ns = world.notebook.user_ns
    before = [config_net := ns["config"]["net"], ns["config"]["pair"], ns["mine"].net, ns["f"].__defaults__]
    text = (
        "kinds = [type(config['net']), type(config['pair'][0]), type(config['pair'][1][0]), type(config['window'][0]),\n"
        "    type(mine.net), type(Mine.shared), type(f(torch.ones(1, 2)))]\none = config['net'] is config['pair'][0] is mine.net\n"
        "f(torch.ones(1, 2)).sum().backward()\nlock"
    )
    with world.namespace.localise(text):
        here(world, text)
    linear = torch.nn.Linear
    assert ns["kinds"] == [linear, linear, torch.nn.Parameter, linear, linear, linear, torch.Tensor]
    assert ns["one"] is True
    assert [config_net, ns["config"]["pair"], ns["mine"].net, ns["f"].__defaults__] == before
    assert type(ns["config"]["net"]) in HANDLES
    assert any("on a copy of replica 0's `Mine.shared`, `config['pair'][1][0]`" in notice for notice in world.notices)
    assert any("changed its copy of `Mine.shared`" in notice for notice in world.notices)


# -- handles are not data ----------------------------------------------------------------------------------------------

_DATA = {
    "rows": [{"e": 1, "l": 2.0}, {"e": 2, "l": 3.0}],
    "mapping": {"lr": 0.1, "n": [1, 2]},
    "floats": [1.0, 2.0, 3.0],
    "array": np.arange(6.0).reshape(2, 3),
    "frame": pd.DataFrame({"a": [1, 2], "b": [3.0, 4.0]}),
    "series": pd.Series([1.0, 2.0], index=["x", "y"], name="s"),
    "members": {1, 2},
    "pair": (1, [2]),
}


def _match(value: object) -> object:
    match value:
        case [first, *_]:
            return "sequence", first
        case {"lr": rate}:
            return "mapping", rate
        case _:
            return None


_USES = {
    "DataFrame": lambda value: pd.DataFrame(value).to_dict(),
    "DataFrame of columns": lambda value: pd.DataFrame({"x": value, "y": 1}).to_dict(),
    "Series": lambda value: pd.Series(value).to_dict(),
    "concat": lambda value: pd.concat([value, value]).to_dict(),
    "asarray": lambda value: np.asarray(value).tolist(),
    "mean": lambda value: float(np.mean(value)),
    "stack": lambda value: np.stack([value, value]).tolist(),
    "tensor": lambda value: torch.tensor(value).tolist(),
    "json": json.dumps,
    "yaml": yaml.safe_dump,
    "list": list,
    "dict": dict,
    "sorted": sorted,
    "length": len,
    "zip": lambda value: list(zip(value, value, strict=True)),
    "in": lambda value: 2 in value,
    "unpacked": lambda value: [*value],
    "keywords": lambda value: dict(**value),
    "items": lambda value: dict(value.items()),
    "values": lambda value: list(value.values()),
    "match": _match,
    "hash": hash,
    "set": lambda value: len({value}),
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "isinstance": lambda value: isinstance(value, list | dict | set | tuple | np.ndarray | pd.DataFrame),
    "buffer": lambda value: bytes(memoryview(value)),
    "join": ",".join,
    "sum": sum,
    "index": lambda value: value[1],
}


@pytest.mark.parametrize("name", _DATA)
def test_a_handle_transfers_everything_or_raises(world: DoubleWorld, name: str) -> None:
    """Use handles like the data that they represent: the result is the same, or an error."""
    world.notebook.user_ns["_data"] = _DATA[name]
    world.namespace.most_nbytes = 0
    there(world, "import copy, numpy as np, pandas as pd\nvalue = copy.deepcopy(_data)\nown = [value, rid()]")
    world.namespace.most_nbytes = 1 << 20
    ns = world.notebook.user_ns
    assert isinstance(ns["value"], RemoteMirrored)
    assert isinstance(ns["own"], RemotePerReplica)
    lies = {}
    for use, function in _USES.items():
        if (use, name) == ("match", "array"):  # since NumPy 2.5 `match` sees a sequence in an array, not in its handle
            continue
        try:
            found = function(ns["value"])  # type: ignore[operator]
        except Exception:
            continue
        expected = function(_DATA[name]) if use != "isinstance" else False  # type: ignore[operator]
        if repr(_plain(found)) != repr(_plain(expected)) and not (use == "pickle" and found == expected):
            lies[use] = found, expected
    assert lies == {}
    for use, function in _USES.items():
        if use not in ("deepcopy", "isinstance", "match", "index"):
            with pytest.raises((TypeError, AttributeError, ValueError, yaml.YAMLError)):
                function(ns["own"])  # type: ignore[operator]
    assert (_match(ns["own"]), isinstance(ns["own"], list)) == (None, False)


def _plain(value: object) -> object:
    return value.component(0) if isinstance(value, HANDLES) else value


def test_the_hash_of_a_handle_agrees_with_equality(world: DoubleWorld) -> None:
    world.namespace.most_nbytes = 0
    there(
        world,
        "class Own:\n    pass\nown = Own()\nword = 'w' * 100_000\nrows = [1]\nmine = 'abc' + str(rid())\nboth = {net: 1, own: 2}",
    )
    ns = world.notebook.user_ns
    assert hash(ns["word"]) == hash("w" * 100_000)
    assert "w" * 100_000 in {ns["word"]}
    assert {ns["net"]: 1, ns["own"]: 2}[ns["own"]] == 2
    for name in ("rows", "mine"):
        with pytest.raises(DistributedValueError, match=r"hash"):
            hash(ns[name])
