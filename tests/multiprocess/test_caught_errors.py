"""An error that a program catches ends nothing: what replicas meet in afterwards works, in scripts and in cells."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.multiprocess.sessions import run_cell, started
from tests.ranks import run_ranks

_BEGIN = """
import threading, time
from types import SimpleNamespace
import torch, distnb
import torch.distributed as dist
from distnb.errors import CollectiveError, CollectiveMismatchError

def begin():
    torch.manual_seed(0)
    with strategy.scope():
        net = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            net.weight.fill_(1.0)
        sgd = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)

    def step():
        sgd.zero_grad()
        net(torch.ones(1, 3)).sum().backward()
        sgd.step()
        return net.weight.detach().clone()

    def after():
        # What all replicas meet in: a step of training, whose gradient is the sum, a sum, and the same by torch's name.
        strategy.run(step)
        strategy.assert_in_sync(net)
        total = strategy.reduce("sum", strategy.run(lambda: torch.tensor(float(distnb.replica_id() + 1))), axis=None)
        plain = torch.ones(2)
        dist.all_reduce(plain)
        return [net.weight.flatten().tolist(), float(total), plain.tolist()]

    return net, step, after

def me():
    return distnb.replica_id()
"""

_LEFT = """
    try:
        strategy.run(f)
    except KeyError:
        return "KeyError"
    except CollectiveError as error:
        assert "Replica 0 left strategy.run by KeyError" in str(error), error
        return "CollectiveError"
"""

# Each case is a function `case(net, step)` that returns the name of the error that this replica caught, or None.
_CASES = {
    "on one replica": """
    def f():
        if me() == 0:
            raise KeyError("x")
        return torch.ones(1)
    try:
        strategy.run(f)
    except KeyError:
        return "KeyError"
    """,
    "on one replica, a number": """
    def f():
        if me() == 1:
            raise KeyError("x")
        return 5
    try:
        strategy.run(f)
    except KeyError:
        return "KeyError"
    """,
    "on all replicas": """
    def f():
        raise KeyError("x")
    try:
        strategy.run(f)
    except KeyError:
        return "KeyError"
    """,
    "before a step": """
    def f():
        if me() == 0:
            raise KeyError("x")
        step()
    """
    + _LEFT,
    "inside a collective's callers": """
    def f():
        x = torch.ones(4)
        dist.all_reduce(x)
        if me() == 0:
            raise KeyError("x")
        big = torch.ones(3_000_000)  # by Gloo
        dist.all_reduce(big)
    """
    + _LEFT,
    "with what follows skipped": """
    caught = []
    for k in range(3):
        def f():
            if me() == 0 and k == 0:
                raise KeyError("x")
            return torch.ones(1)
        try:
            assert float(strategy.reduce("sum", strategy.run(f), axis=None)) == 2
        except (KeyError, CollectiveError) as error:
            caught.append(f"{k} {type(error).__name__}")
    return caught
    """,
    "mismatched": """
    try:
        if me() == 0:
            dist.all_reduce(torch.ones(2))
        else:
            dist.all_reduce(torch.ones(3))
    except CollectiveMismatchError as error:
        return type(error).__name__
    """,
    "mismatched in run": """
    def f():
        if me() == 0:
            dist.all_reduce(torch.ones(2))
        else:
            dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
    try:
        strategy.run(f)
    except CollectiveMismatchError as error:
        return type(error).__name__
    """,
    "arguments refused": """
    try:
        dist.all_gather([torch.ones(4 if me() else 3) for _ in range(2)], torch.ones(3))
    except CollectiveMismatchError as error:
        return type(error).__name__
    except (ValueError, RuntimeError) as error:
        return "its own"
    """,
    # Refused while the thread that tends the group has begun to look for what others called.
    "arguments refused under a look": """
    current = dist.distributed_c10d._get_default_group().ready()[0]
    looking, posting = threading.Event(), current.posting

    class Posting:
        def __enter__(self):
            if current.open and threading.current_thread() is not threading.main_thread():
                looking.set()
            posting.acquire()
        def __exit__(self, *error):
            posting.release()

    def refuse(*args):
        assert looking.wait(60)
        while current.verifier.absent(current.verifier.number):
            time.sleep(0.001)
        raise ValueError("refused")

    if me():
        current.posting, current.backends.backends["cpu"] = Posting(), SimpleNamespace(allgather=refuse)
    try:
        dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
    except (CollectiveMismatchError, ValueError) as error:
        return type(error).__name__
    """,
    "in a scope": """
    try:
        with strategy.scope():
            other = torch.nn.Linear(2, 2)
            if me() == 1:
                raise KeyError("x")
    except (KeyError, CollectiveError) as error:
        return type(error).__name__
    """,
    "twice": """
    def f(one):
        if me() == one:
            raise KeyError("x")
        step()
    for one in (0, 1):
        try:
            strategy.run(f, args=(one,))
        except (KeyError, CollectiveError) as error:
            caught = type(error).__name__
    return caught
    """,
    "half a step": """
    def f():
        net(torch.ones(1, 3)).sum().backward()
        if me() == 0:
            raise KeyError("x")
        with torch.no_grad():
            net.weight.mul_(3)
        sum_of_all = distnb.get_replica_context().all_reduce("sum", torch.ones(1))
    try:
        strategy.run(f)
    except (KeyError, CollectiveError) as error:
        return type(error).__name__
    """,
}
_CAUGHT = {
    "on one replica": ["KeyError", None],
    "on one replica, a number": [None, "KeyError"],
    "before a step": ["KeyError", "CollectiveError"],
    "inside a collective's callers": ["KeyError", "CollectiveError"],
    "with what follows skipped": [["0 KeyError"], ["0 CollectiveError"]],
    "on all replicas": ["KeyError"] * 2,
    "mismatched": ["CollectiveMismatchError"] * 2,
    "mismatched in run": ["CollectiveMismatchError"] * 2,
    "arguments refused": ["CollectiveMismatchError", "its own"],
    "arguments refused under a look": ["CollectiveMismatchError", "ValueError"],
    "in a scope": ["CollectiveError", "KeyError"],
    "twice": ["CollectiveError", "KeyError"],
    "half a step": ["KeyError", "CollectiveError"],
}


def _function(name: str) -> str:
    return "def case(net, step):\n" + textwrap.indent(textwrap.dedent(_CASES[name]), "    ")


def _right(name: str, found: list[object]) -> None:
    for rank, (caught, (weights, total, plain)) in enumerate(found):
        assert caught == _CAUGHT[name][rank], name
        assert total == 3.0, name
        assert plain == [2.0, 2.0], name
        # Two replicas with a gradient of one each: the step is 0.5 * 2.
        assert len(set(weights)) == 1, name
    assert found[0][1] == found[1][1], name


@pytest.fixture(scope="module")
def in_script():
    cases = "\n".join(
        f"{_function(name)}\nnet, step, after = begin()\nresult[{name!r}] = [case(net, step), after()]"
        for name in _CASES
    )
    program = "result = {}\n" + _BEGIN + "\nstrategy = distnb.MirroredStrategy()\n" + cases
    ranks = run_ranks(program, n=2)
    told = "\n".join(f"rank {each.rank}: {each.stderr}" for each in ranks)
    assert all(each.returncode == 0 for each in ranks), told
    return [rank.result for rank in ranks]


@pytest.mark.parametrize("name", list(_CASES))
def test_in_a_script(in_script, name):
    _right(name, [rank[name] for rank in in_script])


@pytest.fixture(scope="module")
def session():
    with started(2) as made:
        yield made


@pytest.mark.parametrize(
    "name", ["on one replica", "on all replicas", "before a step", "with what follows skipped", "mismatched"]
)
def test_in_a_cell(session, name, tmp_path):
    where = f"{str(tmp_path)!r} + f'/{{me()}}.json'"
    write = f"import json\nwith open({where}, 'w') as file:\n    json.dump([case(net, step), after()], file)\n"
    run_cell(session, f"{_BEGIN}\n{_function(name)}\nnet, step, after = begin()\n{write}", "<caught>")
    _right(name, [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)])
    # The next cell has whole replicas, and so has a call from an ordinary one.
    run_cell(session, "total = strategy.reduce('sum', strategy.run(lambda: torch.ones(1)), axis=None).item()", "<next>")
    assert session.user_ns["total"] == 2.0


def test_what_nobody_catches_ends_the_cell_on_all(session):
    cell = """
def f():
    if distnb.replica_id() == 1:
        raise KeyError("mine")
    return 5
strategy.run(f)
strategy.reduce("sum", torch.ones(1), axis=None)
"""
    with pytest.raises(KeyError, match="mine"):
        run_cell(session, cell, "<uncaught>")


def test_in_ordinary_cells(session):
    strategy = session.user_ns["strategy"]

    def f():
        import distnb

        if distnb.replica_id() == 1:
            raise KeyError("mine")
        return 5

    with pytest.raises(KeyError, match="mine"):
        strategy.run(f)
    assert strategy.run(lambda: 5) == 5
