"""Repeated calls without waiting: they are sent one after the other, and each has its own effect."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distnb
from distnb.errors import EngineDied
from distnb.notebook import compose as sessions
from distnb.wire.messages import Output
from tests.support.processes import wait_until
from tests.support.sessions import started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

NO_WAIT = distnb.RunOptions(wait=False)


@pytest.fixture(scope="module")
def strategy() -> Iterator[Any]:
    with started() as session:
        yield session.user_ns["strategy"]


def make_counter() -> Any:
    """Return a function that counts its calls on its engine."""

    def counted(name: str) -> int:
        import builtins

        number = getattr(builtins, name, 0) + 1
        setattr(builtins, name, number)
        return number

    return counted


def call_often(strategy: Any, fn: Any, *args: Any, calls: int) -> list[Any]:
    """Return the expected results."""
    return [strategy.run(fn, args=args, options=NO_WAIT) for _ in range(calls)]


def test_calls_keep_their_order(strategy: Any) -> None:
    results = call_often(strategy, make_counter(), "ordered", calls=200)
    assert [one.result() for one in results] == list(range(1, 201))


def test_a_future_can_be_used_by_cells_and_calls(strategy: Any) -> None:
    def add(future: Any, number: int) -> int:
        return int(future.result()) + number

    (late,) = call_often(strategy, make_counter(), "passed", calls=1)
    assert strategy.run(add, args=(late, 4)) == 5
    tensor = strategy.run(lambda: torch.ones(2) * distnb.replica_id(), options=NO_WAIT)
    assert strategy.reduce("sum", tensor.result(), axis=None).numpy().tolist() == [1.0, 1.0]


def test_a_result_used_late_does_not_reset_modes(strategy: Any) -> None:
    def use(dtype: Any) -> None:
        torch.set_default_dtype(dtype)

    early = strategy.run(use, args=(torch.float64,), options=NO_WAIT)
    strategy.run(use, args=(torch.float32,))
    assert early.result() is None
    assert torch.get_default_dtype() is torch.float32


def test_a_failed_call_does_not_fail_the_others(strategy: Any) -> None:
    def fails_once(name: str) -> int:
        import builtins

        number = getattr(builtins, name, 0) + 1
        setattr(builtins, name, number)
        if number == 20 and distnb.replica_id() == 1:
            raise KeyError(name)
        return number

    def on_replica_1(result: Any) -> int:
        return int(strategy.local_results(result)[-1])

    results = call_often(strategy, fails_once, "failing", calls=40)
    assert [one.result() for one in results[:19]] == list(range(1, 20))
    with pytest.raises(KeyError, match="failing"):
        results[19].result()
    # Replica 0 was ordered to end the failed call, perhaps before it had counted it.
    assert [on_replica_1(one.result()) for one in results[20:]] == list(range(21, 41))
    assert on_replica_1(strategy.run(fails_once, args=("failing",))) == 41


def test_random_numbers_equal_those_of_separate_calls(strategy: Any) -> None:
    def draw() -> float:
        return float(torch.rand(1))

    torch.manual_seed(7)
    expected = [strategy.local_results(strategy.run(draw)) for _ in range(8)]
    after = torch.rand(1)
    torch.manual_seed(7)
    found = [strategy.local_results(one.result()) for one in call_often(strategy, draw, calls=8)]
    assert found == expected
    assert torch.equal(torch.rand(1), after)
    assert len({number for numbers in expected for number in numbers}) == 16


def test_prints_of_calls_stay_in_order(strategy: Any) -> None:
    def says() -> None:
        print("said", distnb.replica_id(), end="\n", flush=True)

    session = sessions.require()
    received: list[Output] = []
    unsubscribe = session.events.subscribe(lambda event: received.append(event) if isinstance(event, Output) else None)
    try:
        for one in call_often(strategy, says, calls=30):
            one.result()
        assert session.flush_events(60)
    finally:
        unsubscribe()
    for replica in range(2):
        mine = [event for event in received if event.replica == replica]
        assert "".join(event.text for event in mine) == f"said {replica}\n" * 30
        assert [event.program for event in mine] == sorted(event.program for event in mine)


def test_calls_are_sent_even_if_nothing_waits_for_them(strategy: Any, tmp_path: Path) -> None:
    def leaves_a_mark(folder: str) -> None:
        import tempfile

        tempfile.mkstemp(dir=folder)

    call_often(strategy, leaves_a_mark, str(tmp_path), calls=50)
    wait_until(lambda: len(os.listdir(tmp_path)) == 100, 60, "all calls were performed")
    sessions.require().calls.finish()


def test_a_slow_call_does_not_delay_earlier_replies(strategy: Any, tmp_path: Path) -> None:
    def third_waits(name: str, path: str) -> int:
        import builtins
        import os
        import time

        number = getattr(builtins, name, 0) + 1
        setattr(builtins, name, number)
        while number == 10 and not os.path.exists(path):
            time.sleep(0.01)
        return number

    go = tmp_path / "go"
    results = call_often(strategy, third_waits, "slow", str(go), calls=12)
    assert [one.result() for one in results[:9]] == list(range(1, 10))
    go.touch()
    assert [one.result() for one in results[9:]] == [10, 11, 12]


def test_an_interrupt_ends_all_calls(strategy: Any, tmp_path: Path) -> None:
    def begins_and_sleeps(folder: str) -> None:
        import tempfile
        import time

        tempfile.mkstemp(dir=folder)
        time.sleep(1000)

    session = sessions.require()
    results = call_often(strategy, begins_and_sleeps, str(tmp_path), calls=30)
    # A sleeping call must exist to be interrupted.
    wait_until(lambda: len(os.listdir(tmp_path)) == 2, 60, "the first call began")
    threading.Timer(0.1, session.interrupt).start()
    for one in results:
        with pytest.raises(KeyboardInterrupt):
            one.result()
    with pytest.raises(KeyboardInterrupt):
        session.calls.finish()
    assert len(os.listdir(tmp_path)) == 2, "none of the others began"
    assert strategy.run(lambda: 3) == 3


def test_a_killed_engine_ends_pending_calls(strategy: Any) -> None:
    session = sessions.require()
    pid = session.status()[1].pid

    def dies(name: str, pid: int) -> int:
        import builtins

        number = getattr(builtins, name, 0) + 1
        setattr(builtins, name, number)
        if number == 20 and os.getpid() == pid:
            os.kill(pid, signal.SIGKILL)
        return number

    with pytest.raises(EngineDied):  # from a result, or from the next call if the engine is already dead
        [one.result() for one in call_often(strategy, dies, "killed", pid, calls=40)]
    with contextlib.suppress(EngineDied):  # from calls sent before its end was known
        session.calls.finish()
    session.restart(missing=True)
    assert [one.result() for one in call_often(strategy, make_counter(), "afterwards", calls=9)] == list(range(1, 10))
    distnb.stop()  # the cluster has an engine that this test replaced
