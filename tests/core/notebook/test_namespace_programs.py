"""The same code here, on the replicas and here again; cases of the namespace that need separate engines."""

from __future__ import annotations

import ast
import gc
import linecache
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distnb import MirroredStrategy
from distnb.cluster.start_options import StartOptions
from distnb.errors import CannotTravelError, ContextError
from distnb.magics.scope_transformer import ScopeDispatch, ScopeTransformer
from distnb.notebook.handles.handle import HANDLES
from distnb.notebook.remote_runtime import Remote
from distnb.notebook.session import Session
from distnb.options import StrategySpec
from distnb.runtime.this_process import this_process
from distnb.values import Mirrored
from distnb.wire.messages import UsersFunction
from tests.support.worlds import Process, modes_kept

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SPEC = StrategySpec(kind="mirrored")


@pytest.fixture(scope="module")
def notebook() -> Process:
    return Process()


@pytest.fixture(scope="module")
def session(notebook: Process) -> Iterator[Session]:
    torch.set_num_threads(1)
    session = Session.start(StartOptions(n=2, devices="cpu:0,cpu:1"), user_ns=notebook.user_ns)
    this_process.remote = lambda strategy: Remote(strategy, lambda: session)
    yield session
    session.stop()


class World:
    """A notebook whose cells run here or on the replicas."""

    def __init__(self, session: Session, notebook: Process) -> None:
        self.session, self.notebook = session, notebook
        self.ns = notebook.user_ns
        self._number = 0
        self.clear()

    def clear(self) -> None:
        """Clear both namespaces."""
        for name in list(self.notebook.names()):
            del self.ns[name]

    def here(self, text: str) -> None:
        """Run a cell under the default strategy."""
        self._number += 1
        with self.session.namespace.localise(text):
            self.notebook.run(text, self._number)

    def there(self, text: str) -> None:
        """Run a cell under the mirrored strategy."""
        self._number += 1
        self.session.cells.run(text, SPEC, filename=f"<cell {self._number}>")

    def plain(self, name: str) -> Any:
        """Return the first replica's value."""
        value = self.ns[name]
        return value.values[0] if isinstance(value, HANDLES) else value


@pytest.fixture
def world(session: Session, notebook: Process) -> Iterator[World]:
    with modes_kept():
        world = World(session, notebook)
        yield world
        world.clear()
        gc.collect()


_MODEL = (
    "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
    "x, y = torch.randn(8, 3), torch.randn(8, 1)\nmodel = nn.Linear(3, 1)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
)

PROGRAMS = {
    "the graph of a loss": _MODEL + "for epoch in range(2):\n    optimizer.zero_grad()\n"
    "    loss = ((model(x) - y) ** 2).mean()\n    loss.backward()\n    optimizer.step()\n"
    "if epoch > 5:\n    print(loss)\nresult = round(loss.item(), 5)",
    "the iterator of a loader": _MODEL + "from torch.utils.data import DataLoader, TensorDataset\n"
    "loader = DataLoader(TensorDataset(x, y), batch_size=4)\niterator = iter(loader)\ntotal = 0.0\n"
    "for batch, target in iterator:\n    out = model(batch)\n    total += float((out - target).detach().sum())\n"
    "result = round(total, 4)",
    "a lock": "import threading\nlock = threading.Lock()\ncount = 0\nfor i in range(3):\n    with lock:\n        count += i\n"
    "def locked():\n    with lock:\n        return count\nresult = locked()",
    "an open file": "import os\nf = open(os.devnull)\nfor line in f:\n    print(line)\nwith open(os.devnull) as g:\n"
    "    text = g.read()\nresult = text, f.closed",
    "a generator": "def numbers():\n    yield from range(4)\ngenerator = numbers()\nfirst = next(generator)\n"
    "rest = list(generator)\nresult = first, rest",
    "an error that was caught": "class Bad(Exception):\n    def __init__(self, code, *, where):\n"
    "        super().__init__(str(code))\n        self.code, self.where = code, where\n"
    "try:\n    raise Bad(3, where='x')\nexcept Bad as error:\n    kept = error\n    text = str(error)\n"
    "result = kept.code, kept.where, text",
    "an enum and its members": "import enum\nclass Mode(enum.Enum):\n    TRAIN = 1\n    TEST = 2\n"
    "mode = Mode.TRAIN\nseen = {Mode.TRAIN: 1}\nresult = mode is Mode.TRAIN, seen[Mode(1)]",
    "a dataclass and functions": "from dataclasses import dataclass, field\n@dataclass\nclass Config:\n    lr: float = 0.1\n"
    "    steps: list = field(default_factory=list)\nconfig = Config()\nscale = 2\ndef step(c):\n    c.steps.append(scale * c.lr)\n"
    "    return len(c.steps)\nresult = step(config), config.steps[0]",
    "hooks": _MODEL + "seen = []\nhandle = model.register_forward_hook(lambda m, i, o: seen.append(tuple(o.shape)))\n"
    "model(x)\nhandle.remove()\nresult = seen[:1]",
    "a scheduler": _MODEL + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\nfor epoch in range(2):\n"
    "    optimizer.step()\n    scheduler.step()\nresult = optimizer.param_groups[0]['lr']",
    "metrics in lists": _MODEL
    + "from collections import Counter, defaultdict\nhistory = defaultdict(list)\ncounts = Counter()\n"
    "for epoch in range(3):\n    out = model(x)\n    history['mean'].append(round(out.mean().item(), 4))\n    counts[epoch % 2] += 1\n"
    "best = max(history['mean'])\nresult = dict(history), dict(counts), best",
    "DistributedDataParallel": _MODEL + "import torch.distributed as dist\n"
    "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
    "if not dist.is_initialized():\n    dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=1)\n"
    "    own = True\nelse:\n    own = False\nddp = nn.parallel.DistributedDataParallel(model)\n"
    "out = ddp(x)\nif own:\n    dist.destroy_process_group()\nresult = tuple(out.shape)",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_same_result_here_and_on_replicas(name: str, world: World) -> None:
    text = PROGRAMS[name]
    results = []
    for run in (world.here, world.there, world.here, world.there):
        run(text)
        results.append(world.plain("result"))
    assert results == results[:1] * 4


def test_an_object_that_cannot_be_unpickled_does_not_affect_others(world: World) -> None:
    world.here(PROGRAMS["DistributedDataParallel"] + "\nnumbers = [1]")
    world.there("numbers.append(2)\nif not numbers:\n    print(ddp)\nn = len(numbers)")
    assert (world.ns["numbers"], world.ns["n"]) == ([1, 2], 2)
    with pytest.raises(CannotTravelError, match=r"`ddp`.*cure"):
        world.there("ddp(x)")


def test_a_compiled_function_can_be_used(world: World) -> None:
    world.there(
        "import torch\n@torch.compile(backend='eager')\ndef f(x):\n    return x * 2\ny = f(torch.ones(1)).item()\nn = [3]"
    )
    assert world.ns["y"] == 2.0
    assert world.plain("n") == [3]
    world.there("z = f(torch.ones(1) * 3).item()")
    assert world.ns["z"] == 6.0


def test_a_class_from_a_path_that_only_the_replicas_have(world: World, tmp_path: Path) -> None:
    (tmp_path / "from_a_path.py").write_text("class Base:\n    def double(self, x):\n        return 2 * x\n")
    path = f"sys.path.append({str(tmp_path)!r})"
    world.there(
        f"import sys\n{path}\nimport from_a_path\nclass Sub(from_a_path.Base):\n    pass\nsub = Sub()\nn = sub.double(2)"
    )
    assert world.ns["n"] == 4
    assert world.ns["Sub"]().double(3) == 6
    (tmp_path / "there_only.py").write_text("class Base:\n    number = 7\n")
    world.there("import there_only\nsys.path.pop()\nclass Other(there_only.Base):\n    pass\nm = [5]")
    assert isinstance(world.ns["Other"], Mirrored)
    assert world.plain("m") == [5]
    world.there("k = Other().number\ndel there_only")
    assert world.ns["k"] == 7


def test_classes_that_a_smaller_team_received_keep_their_identity(world: World) -> None:
    world.here(
        "class Base: pass\nclass Sub(Base):\n    kind = 'some words'\n    def __init__(self, kind=kind):\n"
        "        super().__init__()\n        self.of_the_base = isinstance(self, Base)"
    )
    made = world.ns["Sub"]
    for spec in (SPEC, StrategySpec(kind="mirrored", num_replicas=1), SPEC):
        world.session.cells.run("right = Sub().of_the_base", spec, filename="<cell>")
        assert world.ns["right"] is True
        assert world.ns["Sub"] is made, "not a handle of different classes"
    world.session.cells.run("import distnb\nif distnb.replica_id():\n    Sub.__annotations__", SPEC, filename="<cell>")
    assert world.ns["Sub"] is made, "reading the annotations changes nothing"


def test_an_error_of_the_users_own_class_is_raised(world: World) -> None:
    text = "class Own(Exception):\n    def __init__(self, code, *, where):\n        super().__init__(code)\n        self.where = where"
    for define, run in ((world.here, "raise Own(3, where=[4])"), (world.there, "raise Own(5, where=[4])")):
        define(text)
        with pytest.raises(world.ns["Own"]) as raised:
            world.there(run)
        assert raised.value.where == [4]


def test_a_scope_works_in_a_function(world: World, session: Session) -> None:
    def run(source: str, spec: StrategySpec, filename: str, function: UsersFunction | None) -> None:
        session.cells.run(source, spec, filename=filename, in_scope=True, function=function)

    ScopeDispatch(run).install(world.notebook.shell)
    world.here("from torch import nn\nimport torch\nmodel = 'global'")
    text = (
        "def train(strategy, width):\n    try:\n        with strategy.scope():\n            model = nn.Linear(width, 1)\n"
        "            count = width + 1\n    finally:\n        done = True\n    return model, count, done\n"
        "def twice(strategy):\n    built, *rest = train(strategy, 3)\n"
        "    return built, strategy.run(lambda: built(torch.ones(1, 3)).shape[0]), rest\n"
        "class Model(nn.Module):\n    def __init__(self, strategy):\n        super().__init__()\n"
        "        with strategy.scope():\n            self.mlp = nn.Linear(2, 1)\n"
    )
    linecache.cache["<scope cell>"] = (len(text), None, text.splitlines(keepends=True), "<scope cell>")
    tree = ast.fix_missing_locations(ScopeTransformer().visit(ast.parse(text)))
    exec(compile(tree, "<scope cell>", "exec"), world.ns)
    world.ns["strategy"] = MirroredStrategy()
    world.here("found, ran, rest = twice(strategy)")
    assert isinstance(world.ns["found"], Mirrored)
    assert world.ns["rest"] == [4, True]
    assert world.ns["model"] == "global"
    world.there("again, ran_there, rest_there = twice(strategy)")
    assert world.plain("rest_there") == [4, True]
    with pytest.raises(ContextError, match="changed 'self', a Model that was made in the notebook"):
        world.ns["Model"](world.ns["strategy"])
