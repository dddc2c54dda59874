"""Calls by plan do what the same calls do without plans, and take few calls of Python."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from distnb.notebook.session import Session
from tests.support.calls_of_python import COUNT_ON_ENGINES, CallCount
from tests.support.planned_programs import compare, counted_plans, without_plans
from tests.support.processes import wait_until
from tests.support.sessions import started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with started() as session:
        yield session


def interrupt(session: Session) -> None:
    """Interrupt a call that waits, as the stop button does."""

    def press() -> None:
        try:
            wait_until(lambda: all("in wait_long" in text for text in session.stacks().values()), 20)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        session.user_ns["strategy"].run(session.user_ns["wait_long"])
    finally:
        thread.join()


def test_random_programs_are_the_same_without_plans(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    assert sum(compare(session, seed, capfd, 24, [interrupt]) for seed in range(3)) > 20


def test_calls_with_data_of_the_notebook_have_plans(session: Session) -> None:
    """Two functions take turns, as training and evaluation do: what one was given is not sent again after the other."""
    namespace = session.user_ns
    exec("x, y = [1.5], [2.5]\ndef first(x):\n    return x[0]\ndef second(y):\n    return y[0] + 1", namespace)
    strategy, results = namespace["strategy"], []
    with counted_plans() as planned:
        for number in range(6):
            if number == 4:
                namespace["x"].append(namespace["x"].pop() + 10)
            results += [
                strategy.run(namespace[each], args=(namespace[data],))
                for each, data in (("first", "x"), ("second", "y"))
            ]
    assert results == [1.5, 3.5] * 4 + [11.5, 3.5] * 2
    assert len(planned) >= 4


def test_an_equal_default_of_another_type_is_another_default(session: Session) -> None:
    namespace, run = session.user_ns, session.user_ns["strategy"].run
    exec("def show(x=1):\n    return repr(x)", namespace)
    show, found = namespace["show"], []
    for default in (1, True, 1.0):
        show.__defaults__ = (default,)
        found += [run(show), run(show)]
    assert found == ["1", "1", "True", "True", "1.0", "1.0"]


def test_results_of_several_values_are_the_same_as_without_plans(session: Session) -> None:
    namespace = session.user_ns
    exec(
        """
def act(kind):
    replica = distnb.get_replica_context().replica_id_in_sync_group
    number, rows = torch.tensor(replica + 0.5), torch.full((2,), float(replica))
    return {
        "tensors": (number, [rows, number * 2]),
        "plain": {"b": 1, "a": (True, "text")},
        "mixed": {"z": number, "y": None, "x": [rows.requires_grad_()]},
        "one": (number,),
        "own": (number, replica),
        "unlike": (number, number if replica else None),
        "empty": (),
        "sparse": (number, torch.eye(2).to_sparse()),
        "long": [number, "x" * 1000],
    }[kind]
""",
        namespace,
    )
    act, strategy = namespace["act"], namespace["strategy"]
    for kind in ("tensors", "plain", "mixed", "one", "own", "unlike", "empty", "sparse", "long"):
        with without_plans():
            expected = strategy.run(act, args=(kind,))
        with counted_plans() as planned:
            found = [strategy.run(act, args=(kind,)) for _ in range(3)]
        assert len(planned) >= 2
        for each in found:
            assert repr(each) == repr(expected), kind
            read = [str(strategy.local_results(one)) for one in (each, expected)]
            assert read[0] == read[1], kind


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_programs_are_the_same_without_plans(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    assert sum(compare(session, seed, capfd, 40, [interrupt]) for seed in range(200)) > 2000


# -- the cost of a call ------------------------------------------------------------------------------------------------

_TEXTS = """
def nothing():
    pass
def number():
    return torch.ones(())
def several():
    return torch.ones(()), {"rows": torch.ones(3), "count": 3}
"""


@pytest.mark.parametrize(
    ("name", "wait", "here", "there"),
    [
        ("nothing", True, 98, 150),
        ("nothing", False, 107, 152),
        ("number", True, 113, 172),
        ("several", True, 190, 322),
    ],
)
def test_a_call_takes_few_calls_of_python(session: Session, name: str, wait: bool, here: int, there: int) -> None:
    """A loss of speed shows here, exactly and on any machine. Comprehensions count as calls until Python 3.12."""
    import distnb

    strategy, options = session.user_ns["strategy"], distnb.RunOptions(wait=wait)
    exec(_TEXTS + COUNT_ON_ENGINES, session.user_ns)
    call, begin, end = (session.user_ns[each] for each in (name, "begin", "end"))
    counted = CallCount()

    def loop(calls: int) -> None:
        found = [strategy.run(call, options=options) for _ in range(calls)]
        if not wait:
            for each in found:
                each.result()

    def measure(calls: int) -> tuple[int, float]:
        loop(10)
        counted.calls = 0
        sys.setprofile(counted)
        try:
            loop(calls)
        finally:
            sys.setprofile(None)
        strategy.run(begin)
        loop(calls)
        return counted.calls, min(strategy.local_results(strategy.run(end)))

    def cost() -> tuple[float, float]:
        few, many = measure(20), measure(120)
        return (many[0] - few[0]) / 100, (many[1] - few[1]) / 100

    # On a busy machine some calls wait longer, which takes some calls of Python more.
    costs = [cost() for _ in range(3)]
    assert min(each[0] for each in costs) <= 1.15 * here
    assert min(each[1] for each in costs) <= 1.15 * there
