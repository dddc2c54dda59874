"""Errors that a program catches: one that leaves a collective undone ends the program on all replicas, others nothing."""

from __future__ import annotations

import textwrap

import pytest

from distnb.errors import CollectiveMismatchError
from tests.support.ranks import Rank, run_ranks
from tests.support.sessions import run_cell, started

pytestmark = pytest.mark.processes

_BEGIN = """
import time
import torch, distnb
import torch.distributed as dist

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
        # A step of training, whose gradient is the sum of all replicas'; a sum, and the same by torch's name.
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

# Replica 0, or 1, catches an error that leaves a collective undone. Each is a function `case(net, step, after)`.
_ENDS = {
    "before a step": """
    def f():
        if me() == 0:
            raise KeyError("mine")
        step()
    try:
        strategy.run(f)
    except KeyError:
        pass
    after()
    """,
    "and does nothing more": """
    def f():
        if me() == 1:
            raise KeyError("mine")
        step()
    try:
        strategy.run(f)
    except KeyError:
        pass
    """,
    "and computes for ever": """
    def f():
        if me() == 0:
            raise KeyError("mine")
        step()
    try:
        strategy.run(f)
    except KeyError:
        pass
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass
    """,
    "and goes on at the same line with the next element": """
    total = torch.zeros(1)
    def f(k):
        if me() == 0 and k == 0:
            raise KeyError("mine")
        value = torch.full((1,), float(k))
        dist.all_reduce(value)
        total.add_(value)
    for k in range(3):
        try:
            strategy.run(f, args=(k,))
        except KeyError:
            pass
    """,
    "in a loop that catches everything on all replicas": """
    def f():
        if me() == 0:
            raise KeyError("mine")
        step()
    while True:
        try:
            strategy.run(f)
        except Exception:
            pass
    """,
    "between two collectives, of which the others wait for the second in Gloo": """
    def f():
        dist.all_reduce(torch.ones(4))
        if me() == 0:
            raise KeyError("mine")
        dist.all_reduce(torch.ones(3_000_000))
    try:
        strategy.run(f)
    except KeyError:
        pass
    after()
    """,
    "in a scope": """
    try:
        with strategy.scope():
            other = torch.nn.Linear(2, 2)
            if me() == 1:
                raise KeyError("mine")
    except KeyError:
        pass
    after()
    """,
}
_MISMATCH = """
    try:
        dist.all_reduce(torch.ones(3 if me() else 2))
    except Exception:
        pass
    after()
"""
# No collective is missed, and the program continues.
_GOES_ON = {
    "on all replicas": """
    def f():
        raise KeyError("all")
    for _ in range(2):
        try:
            strategy.run(f)
        except KeyError:
            pass
    """,
    "of the first call, while the others compare what they returned": """
    def f():
        if me() == 0:
            raise KeyError("mine")
        return torch.ones(1)
    try:
        value, = strategy.local_results(strategy.run(f))
        assert value.tolist() == [1.0]
    except KeyError:
        assert me() == 0
    """,
    "of a call that returns plain values elsewhere": """
    def f(k):
        if me() == k % 2:
            raise KeyError("mine")
        time.sleep(0.02 * k)
        return k
    for k in range(4):
        try:
            assert strategy.run(f, args=(k,)) == k
        except KeyError:
            assert me() == k % 2
    assert strategy.run(lambda: 5) == 5
    """,
    "of a call within a call": """
    def f():
        if me() == 0:
            raise KeyError("mine")
        return 3
    def outer():
        def within(strategy):
            try:
                return strategy.run(f)
            except KeyError:
                return 3
        return distnb.get_replica_context().merge_call(within)
    assert strategy.run(outer) == 3
    """,
    "arguments refused on all replicas": """
    try:
        dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(3))
    except (ValueError, RuntimeError):
        pass
    """,
}


def _program(case: str) -> str:
    return (
        f"{_BEGIN}\ndef case(net, step, after):\n{textwrap.indent(textwrap.dedent(case), '    ')}\n"
        "net, step, after = begin()\ncase(net, step, after)\n"
    )


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.soak)])
def session(request):
    with started(request.param) as made:
        yield made


def _next_works(session):
    run_cell(session, "total = strategy.reduce('sum', strategy.run(lambda: torch.ones(1)), axis=None).item()", "<next>")
    assert session.user_ns["total"] == session.user_ns["strategy"].num_replicas_in_sync


@pytest.mark.parametrize("name", list(_ENDS))
def test_an_error_that_leaves_a_collective_undone_ends_the_cell_on_all_replicas(session, name):
    with pytest.raises(KeyError, match="mine") as caught:
        run_cell(session, _program(_ENDS[name]), "<caught>")
    assert "although the program went on after it" in "\n".join(caught.value.__notes__)
    assert 'raise KeyError("mine")' in str(caught.value.__cause__)  # its traceback
    _next_works(session)


def test_a_mismatch_ends_the_cell_even_if_all_replicas_catch_it(session):
    with pytest.raises(CollectiveMismatchError, match=r"float32\[2\].*float32\[3\]"):
        run_cell(session, _program(_MISMATCH), "<caught>")
    _next_works(session)


@pytest.mark.parametrize("name", list(_GOES_ON))
def test_an_error_without_a_missed_collective_ends_nothing(session, name):
    run_cell(session, f"{_program(_GOES_ON[name])}found = after()\n", "<caught>")
    weights, total, plain = session.user_ns["found"]
    size = session.user_ns["strategy"].num_replicas_in_sync
    assert len(set(weights)) == 1
    assert total == size * (size + 1) / 2
    assert plain == [size] * 2


def test_an_uncaught_error_ends_the_cell_on_all_replicas(session):
    cell = """
def f():
    if distnb.replica_id() == 1:
        raise KeyError("mine")
    return 5
strategy.run(f)
strategy.reduce("sum", torch.ones(1), axis=None)
"""
    with pytest.raises(KeyError, match="mine") as caught:
        run_cell(session, cell, "<uncaught>")
    assert "although" not in "\n".join(caught.value.__notes__)


def test_ordinary_cells_can_catch_a_calls_error(session):
    strategy = session.user_ns["strategy"]

    def f():
        import distnb

        if distnb.replica_id() == 1:
            raise KeyError("mine")
        return 5

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            strategy.run(f)
        assert strategy.run(lambda: 5) == 5


# -- scripts ----------------------------------------------------------------------------------------------------------


def _in_script(case: str, n: int = 2) -> list[Rank]:
    return run_ranks(f"result = {{}}\nimport distnb\nstrategy = distnb.MirroredStrategy()\n{case}", n)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("before a step", 2),
        ("in a loop that catches everything on all replicas", 2),
        *(pytest.param(name, 4, marks=pytest.mark.soak) for name in _ENDS if name != "and computes for ever"),
    ],
)
def test_a_script_ends_on_all_replicas_and_shows_the_error_first(name, n):
    ranks = _in_script(_program(_ENDS[name]), n)
    raised = [rank for rank in ranks if "KeyError: 'mine'" in rank.stderr]
    assert len(raised) == 1, [rank.stderr for rank in ranks]
    text = raised[0].stderr
    assert text.index("KeyError: 'mine'") < text.index("although the program went on after it")
    for rank in ranks:
        if rank is not raised[0]:
            assert rank.returncode == 1, rank.stderr
            assert f"Replica {raised[0].rank} raised KeyError in strategy." in rank.stderr, rank.stderr


def test_a_script_continues_after_an_error_without_a_missed_collective():
    cases = "".join(f"{_program(case)}\nresult[{name!r}] = after()\n" for name, case in _GOES_ON.items())
    for rank in _in_script(cases):
        for name, (weights, total, plain) in rank.check().result.items():
            assert len(set(weights)) == 1, name
            assert (total, plain) == (3.0, [2.0, 2.0]), name
