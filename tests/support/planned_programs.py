"""Random programs of calls, changes between them, and cells, for a comparison with the same program without call plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from distnb.errors import ProgramAborted, StaleHandleError, UnassignedError
from distnb.notebook.handles.handle import HANDLES
from distnb.notebook.plans.call_plans import CallPlans
from distnb.notebook.session import Session
from distnb.objects.modes.environment import cell_began
from distnb.options import RunOptions
from distnb.values import Future, structure
from tests.support.sessions import run_cell

Step = tuple[str, str]
"""A kind, and a text: "here" executes it in the notebook, "there" in a distributed cell. "call" and "pipe" call the
function of that name a few times and record the results, waiting for each or for all; "give" calls it with arguments.
"cell" begins another cell of the notebook. "act" calls a function of the test."""

SETUP = """
import os, random, time, torch
torch.manual_seed(0)
random.seed(0)
ONE, TWO = 1.25, 2.5  # objects to which a name is bound again
LR, n, k, name, extra, bad, rows, table = 0.5, 3, 2, 'a', 5, False, [1], {'a': [1]}
data = torch.arange(3.)
def helper(z, by=2):
    return z * by + LR
def scale():
    return n * LR
def count():
    global n
    n = n + 1
    return n
def nested():
    return helper(k) + helper(1, by=3)
def with_default(x=1, y='b'):
    return f'{x}{y}{name}'
def read():
    return len(rows), sum(rows), sorted(table), table['a'][-1]
def grow():
    rows.append(len(rows))
    return len(rows)
def put():
    table['a'].append(n)
    return len(table['a'])
def renew():
    global rows
    rows = [n]
    return rows
def extend():
    table['b'] = rows
    rows.append(n)
    return table
def total():
    return float(data.sum()) + n
def double():
    data.mul_(2)
    return float(data[1])
def draw():
    return float(torch.rand(1)) + random.random()
def seed_it():
    torch.manual_seed(n)
def modes():
    return (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled('cpu'),
            torch.ones(1).dtype, os.environ.get('DNB_PLANNED'), torch.get_float32_matmul_precision())
def set_dtype():
    torch.set_default_dtype(torch.float64 if n % 2 else torch.float32)
def set_variable():
    os.environ['DNB_PLANNED'] = str(n)
def fail():
    if bad:
        raise ValueError(f'bad {n}')
    return n
def fail_on_one():
    if bad and distnb.replica_id() == 1:
        raise ValueError(f'bad {n}')
    return n
def drop():
    globals().pop('extra', None)
def unset():
    global extra
    try:
        del extra
    except NameError:
        return 'none'
def has_extra():
    try:
        return extra
    except NameError:
        return None
def make():
    return torch.ones(2) * LR
def make_number():
    return torch.tensor(LR) * (1 + distnb.replica_id())
def make_rows():
    return [n, LR]
def make_pair():
    return {'a': torch.ones(1) * n, 'b': (n, 'x')}
def use():
    return float(made.sum()) if isinstance(made, torch.Tensor) else made
def change_made():
    made.add_(1)
    return float(made.sum())
def train():
    x = torch.ones(2, 3) * (1 + distnb.replica_id())
    loss = model(x).sum() / 8
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
def training():
    return model.training, round(float(sum(p.sum() for p in model.parameters())), 4)
def annotated(x: int = 1) -> str:
    return str(x + k)
def keep(v):
    held = [v]
    def kept(x=1):
        held.append(x)
        return len(held) + v + k
    return kept
def pure(v):
    def kept(x=1):
        return v * x + k
    return kept
def wait_long():
    time.sleep(30)
def mark():
    helper.tag = n
def change_default():
    helper.__defaults__ = (n,)
def both():
    return (float(made.sum()) if isinstance(made, torch.Tensor) else made) * LR
def sizes(first, second=(), by=1):
    return [float(torch.as_tensor(each, dtype=torch.float64).sum()) * by for each in (first, *second)]
def change_given(values):
    if isinstance(values, list):
        values.append(n)
    else:
        values.mul_(k)
    return values
def is_data(value):
    return value is data
def weigh():
    return sum(sizes(n, held))
def hold():
    held.append(made)
    return len(held)
closed, pured = keep(1), pure(2)
made = 1
held = [made]
"""

MODEL = """
model = torch.nn.Linear(3, 1)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
"""

_CALLS = [
    *(
        "scale",
        "count",
        "nested",
        "with_default",
        "read",
        "grow",
        "put",
        "renew",
        "extend",
        "total",
        "double",
        "draw",
        "seed_it",
        "modes",
    ),
    *("set_dtype", "set_variable", "fail", "fail_on_one", "drop", "unset", "has_extra", "make", "make_number"),
    *("make_rows", "make_pair", "use", "change_made", "train", "training", "annotated", "closed", "pured", "mark"),
    *("change_default", "lambda: n + k", "lambda: LR", "lambda x=k: x", "weigh", "hold"),
]
_GIVEN = [
    *(
        "sizes, (data,)",
        "sizes, (data, (rows, data))",
        "sizes, (rows, (n, 2.5), k)",
        "sizes, (n,)",
        "sizes, (data + n,)",
    ),
    *(
        "sizes, (made,)",
        "sizes, (data, [data, rows])",
        "change_given, (data,)",
        "change_given, (rows,)",
        "is_data, (data,)",
        "sizes, (n, held)",
        "sizes, (n, [made, made], k)",
    ),
]
_OFTEN = [
    "scale",
    "scale",
    "both",
    "both",
    "nested",
    "with_default",
    "train",
    "make_number",
    "draw",
    "modes",
    "use",
    "has_extra",
    "read",
    "pured",
    "weigh",
]

_HERE = [
    "LR = {f}",
    "LR = {i}",
    "LR = ONE",
    "LR = TWO",
    "LR, made = ONE, first_made",
    "LR, made = TWO, other_made",
    "n = {i}",
    "k = {i}",
    "name = 't{i}'",
    "extra = {i}",
    "globals().pop('extra', None)",
    "rows.append({i})",
    "rows = [{i}]",
    "first = rows",
    "table['a'].append({i})",
    "table = {{'a': [{i}], 'b': rows}}",
    "data[0] = {f}",
    "data = torch.arange({i}.)",
    "bad = True",
    "bad = False",
    "def helper(z, by={i}):\n    return z * by - LR",
    "def helper(z, by=2):\n    return z * by + LR",
    "helper.__defaults__ = ({i},)",
    "helper.__defaults__ = (True,)",
    "helper.tag = {i}",
    "helper.__code__ = (lambda z, by=2: z - by).__code__",
    "scale, nested = nested, scale",
    "def scale():\n    return n * LR + {i}",
    "len = lambda value: {i}",
    "globals().pop('len', None)",
    "closed = keep({i})",
    "pured = pure({i})",
    "pured.__closure__[0].cell_contents = {i}",
    "made = strategy.run(make)",
    "made = strategy.run(make_number)",
    "made = {i}",
    "made = torch.ones(2) * {i}",
    "held.append(made)",
    "held = [made, {i}]",
    "held[0] = made",
    "torch.manual_seed({i})",
    "torch.rand(1)",
    "random.seed({i})",
    "torch.set_default_dtype(torch.float64)",
    "torch.set_default_dtype(torch.float32)",
    "torch.set_grad_enabled(False)",
    "torch.set_grad_enabled(True)",
    "torch.set_autocast_enabled('cpu', True)",
    "torch.set_autocast_enabled('cpu', False)",
    "torch.set_float32_matmul_precision('high')",
    "os.environ['DNB_PLANNED'] = '{i}'",
    "os.environ.pop('DNB_PLANNED', None)",
    "model.train()",
    "model.eval()",
    "results.append(strategy.local_results(made) if not isinstance(made, int) else made)",
]
_THERE = [
    "n = n + 1",
    "LR = LR * 2",
    "rows.append(n)",
    "table['a'] = [n]",
    "def helper(z, by={i}):\n    return z + by",
    "helper.tag = n",
    "extra = n",
    "made = torch.ones(2) * LR",
    "held[0] = made",
    "torch.manual_seed({i})",
    "torch.set_grad_enabled(not torch.is_grad_enabled())",
    "model.eval()",
    "x = 1",
    "raise KeyError(n)",
]


def program(seed: int, length: int = 24, acts: int = 0) -> list[Step]:
    """Return a random program. `acts` is the number of the test's functions, of which it calls some, too."""
    draw = random.Random(seed)
    steps: list[Step] = []
    for _ in range(length):
        kinds = {"call": 10, "give": 3, "pipe": 3, "here": 8, "there": 2, "cell": 1, "act": 1 if acts else 0}
        (kind,) = draw.choices([*kinds], [*kinds.values()])
        if kind in ("call", "pipe"):
            steps.append((kind, draw.choice(_OFTEN if draw.random() < 0.6 else _CALLS)))
        elif kind == "give":
            steps.append((kind, draw.choice(_GIVEN)))
        elif kind in ("here", "there"):
            text = draw.choice(_HERE if kind == "here" else _THERE)
            steps.append((kind, text.format(i=draw.randrange(1, 9), f=draw.choice([0.25, 1.5, -0.0, 0.0]))))
        else:
            steps.append((kind, str(draw.randrange(acts)) if kind == "act" else ""))
    return steps


def run_program(session: Session, steps: list[Step], acts: list[Callable[[Session], object]]) -> list[Any]:
    """Run a program from the beginning. Return all its results and errors, and the values of its names at the end."""
    namespace, strategy = session.user_ns, session.user_ns["strategy"]
    before, found, no_wait = set(namespace), list[Any](), RunOptions(wait=False)
    cell_began()
    namespace["results"] = found
    try:
        exec(SETUP, namespace)
        run_cell(session, "random.seed(0)\ntorch.manual_seed(0)", "<setup>")
        session.cells.run(MODEL, strategy.spec, filename="<model>", in_scope=True)
        exec("first_made, other_made = strategy.run(make), strategy.run(make)", namespace)
        for number, (kind, text) in enumerate(steps):
            failed = False
            try:
                if kind == "here":
                    exec(text, namespace)
                elif kind == "there":
                    run_cell(session, text, f"<cell {number}>")
                elif kind == "call":
                    for _ in range(4):
                        found.append(strategy.run(eval(text, namespace)))
                elif kind == "give":
                    for _ in range(4):
                        function, args = eval(text, namespace)
                        found.append(strategy.run(function, args=args))
                elif kind == "pipe":
                    results = _pipelined(lambda text=text: strategy.run(eval(text, namespace), options=no_wait))
                    failed = results == ["failed"]
                    found += results
                elif kind == "act":
                    acts[int(text)](session)
                else:
                    cell_began()
            except Exception as error:
                failed = True
                found.append((number, type(error).__name__, str(error).partition("\n")[0]))
            except KeyboardInterrupt:
                failed = True
                found.append((number, "interrupted"))
            if failed:  # it depends on the moment how far the other replica came, and which numbers it drew
                random.seed(number)
            try:
                session.calls.finish()
            except (Exception, ProgramAborted):
                pass  # of a pipelined call, which has failed above
        own = {name: value for name, value in namespace.items() if name not in before and name[0] != "_"}
        del own["results"]
        values = {name: value for name, value in own.items() if type(value).__name__ not in ("module", "function")}
        names = [(name, _shown(values[name])) for name in sorted(values) if name not in ("model", "optimizer")]
        return [_shown(each) for each in found] + [("names", sorted(own)), *names]
    finally:
        for name in set(namespace) - before:
            del namespace[name]
        exec(
            "torch.set_default_dtype(torch.float32); torch.set_grad_enabled(True); import os\n"
            "torch.set_autocast_enabled('cpu', False); os.environ.pop('DNB_PLANNED', None); del os\n"
            "torch.set_float32_matmul_precision('highest')",
            namespace,
        )


def _pipelined(send: Callable[[], Future]) -> list[Any]:
    """Return the results of a few calls; "failed" if one fails, since it depends on the moment what the others do."""
    try:
        return [each.result() for each in [send() for _ in range(4)]]
    except (Exception, ProgramAborted):
        return ["failed"]


def _shown(value: Any) -> str:
    """Return a value on all replicas as text."""
    leaves, shape = structure.flatten(value)
    return f"{shape} {list(map(_shown_leaf, leaves))}"


def _shown_leaf(leaf: Any) -> Any:
    try:
        return list(map(repr, leaf.values)) if isinstance(leaf, HANDLES) else repr(leaf)
    except (StaleHandleError, UnassignedError) as error:
        return str(error).partition("\n")[0]


@contextmanager
def without_plans() -> Iterator[None]:
    """Return a context in which no call makes a plan."""
    make = CallPlans.make
    CallPlans.make = lambda *args, **keywords: False  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        CallPlans.make = make  # type: ignore[method-assign]


@contextmanager
def counted_plans() -> Iterator[list[int]]:
    """Return a context whose value has one item for each call by plan."""
    next_call, found = CallPlans.next_call, list[int]()

    def counted(*args: Any) -> Any:
        planned = next_call(*args)
        if planned is not None:
            found.append(planned.plan.program)
        return planned

    CallPlans.next_call = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        CallPlans.next_call = next_call  # type: ignore[method-assign]


def compare(
    session: Session,
    seed: int,
    capfd: pytest.CaptureFixture[str],
    length: int,
    acts: list[Callable[[Session], object]],
) -> int:
    """Compare a random program with and without plans. Return the number of calls by plan."""
    steps = program(seed, length, len(acts))
    size = len(session.status())
    with counted_plans() as planned:
        found = run_program(session, steps, acts)
    output = capfd.readouterr()
    session.resize(size)
    capfd.readouterr()
    with without_plans():
        expected = run_program(session, steps, acts)
    assert found == expected, steps
    assert output == capfd.readouterr(), steps
    session.resize(size)
    return len(planned)
