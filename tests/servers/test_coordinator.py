"""Closures on real workers: their results, their errors, and their end when something else ends."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distnb
from distnb.coordinator import ClusterCoordinator
from distnb.errors import CannotTravelError, ClosureCancelled, EndOfDataset, OptionError
from distnb.notebook.compose import require
from tests.support.processes import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
_WITHIN_S = 40.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterCoordinator]:
    distnb.start(workers=2, ps=1)
    try:
        yield ClusterCoordinator(distnb.ParameterServerStrategy())
    finally:
        distnb.stop()


@pytest.fixture
def coordinator(cluster: ClusterCoordinator) -> Iterator[ClusterCoordinator]:
    yield cluster
    assert not cluster._queue.ending
    assert cluster._queue.idle
    assert not cluster._closures
    assert not cluster._link._under_way  # type: ignore[attr-defined]


def whoami() -> int:
    return os.getpid()


def meet(folder: Path) -> None:
    """Wait in a closure until both workers have run one."""
    folder.joinpath(str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.001)


# -- results -----------------------------------------------------------------------------------------------------------


def test_results_inside_structures_are_fetched(coordinator: ClusterCoordinator) -> None:
    one = coordinator.schedule(lambda x, y: x + y, args=(torch.ones(3),), kwargs={"y": 2})
    two = coordinator.schedule(lambda: {"a": [1, 2]})
    found = coordinator.fetch({"sum": one, "both": (two, 7)})
    assert found["sum"].tolist() == [3, 3, 3]
    assert found["both"] == ({"a": [1, 2]}, 7)
    assert one.fetch() is one.get()
    coordinator.join()
    assert coordinator.done()


def test_schedule_returns_at_once_and_copies_its_arguments(coordinator: ClusterCoordinator) -> None:
    values = [1]
    slow = coordinator.schedule(time.sleep, args=(0.3,))
    late = [coordinator.schedule(sum, args=(values,)) for _ in range(4)]
    values.append(10)
    assert not coordinator.done()
    assert repr(slow) in ("<RemoteValue of sleep: running>", "<RemoteValue of sleep: waiting>")
    assert coordinator.fetch(late) == [1, 1, 1, 1]
    coordinator.join()
    assert slow.state == "done"


def test_a_closure_waits_for_results_among_its_arguments(coordinator: ClusterCoordinator) -> None:
    first = coordinator.schedule(lambda: (time.sleep(0.2), torch.full((4,), 2.0))[1])
    second = coordinator.schedule(lambda values: values["x"][0] * 3, args=({"x": [first]},))
    third = coordinator.schedule(lambda a, b: (a + b).sum().item(), args=(first, second))
    assert third.fetch() == 32.0
    assert coordinator.schedule(lambda x: x, args=(third,)).fetch() == 32.0  # an existing resource


def test_a_large_argument_and_result_are_transferred_exactly(coordinator: ClusterCoordinator) -> None:
    sent = torch.randn(1 << 19)
    assert torch.equal(coordinator.schedule(lambda x: x * 1, args=(sent,)).fetch(), sent)


def test_misuse_raises_errors_with_the_received_value(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(OptionError, match="needs a function; got 3"):
        coordinator.schedule(3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="args must be a tuple or list"):
        coordinator.schedule(whoami, args=5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="kwargs must be a dict"):
        coordinator.schedule(whoami, kwargs=[1])  # type: ignore[arg-type]
    with pytest.raises(CannotTravelError, match="argument"):
        coordinator.schedule(whoami, args=(threading.Lock(),))
    with pytest.raises(ValueError, match="needs a ParameterServerStrategy; got OneDeviceStrategy"):
        ClusterCoordinator(distnb.OneDeviceStrategy("cpu"))
    assert ClusterCoordinator(distnb.ParameterServerStrategy()) is coordinator


def test_a_result_that_cannot_be_pickled_is_the_closures_error(coordinator: ClusterCoordinator) -> None:
    coordinator.schedule(threading.Lock)
    with pytest.raises(CannotTravelError, match="result"):
        coordinator.join()


# -- errors ------------------------------------------------------------------------------------------------------------


def fails(word: str, after_s: float = 0.0) -> None:
    time.sleep(after_s)
    raise ValueError(word)


@pytest.mark.parametrize("ask", ["join", "done", "schedule"])
def test_an_error_is_raised_once_and_others_are_cancelled(coordinator: ClusterCoordinator, ask: str) -> None:
    running = coordinator.schedule(time.sleep, args=(60,))
    failed = coordinator.schedule(fails, args=("no good", 0.5))
    queued = [coordinator.schedule(time.sleep, args=(60,)) for _ in range(5)]
    with pytest.raises(ValueError, match="no good"):
        failed.fetch()
    with pytest.raises(ValueError, match="no good") as caught:
        coordinator.schedule(whoami) if ask == "schedule" else getattr(coordinator, ask)()
    assert "in fails" in str(caught.value.__cause__)
    assert "orker" in str(caught.value.__cause__)
    for value in [running, *queued]:
        with pytest.raises(ClosureCancelled, match=r"fails failed on worker \d .ValueError: no good"):
            value.fetch()
    with pytest.raises(ValueError, match="no good"):
        failed.fetch()
    coordinator.join()
    assert coordinator.done()
    assert isinstance(coordinator.schedule(whoami).fetch(), int)


def test_all_of_several_failures_are_reported(coordinator: ClusterCoordinator) -> None:
    def stubborn(word: str, marks: str) -> None:
        open(os.path.join(marks, word), "w").close()
        while len(os.listdir(marks)) < 2:
            time.sleep(0.001)
        raise ValueError(word)

    for _ in range(200):  # each is ordered to end when the other's error is known; usually it has failed by then
        with tempfile.TemporaryDirectory() as marks:
            for word in ("one", "two"):
                coordinator.schedule(stubborn, args=(word, marks))
            with pytest.raises(ValueError, match=r"one|two") as caught:
                coordinator.join()
            coordinator.join()
            others = caught.value.others  # type: ignore[attr-defined]
            if others:
                assert {str(caught.value), str(others[0])} == {"one", "two"}
                assert any("Another closure failed" in note for note in caught.value.__notes__)
                return
    pytest.fail("never both")


def test_closures_that_need_a_failed_result_are_cancelled(coordinator: ClusterCoordinator) -> None:
    failed = coordinator.schedule(fails, args=("first", 0.3))
    needs = coordinator.schedule(lambda x: x, args=(failed,))
    with pytest.raises(ClosureCancelled):
        needs.fetch()
    with pytest.raises(ValueError, match="first"):
        coordinator.join()
    with pytest.raises(ClosureCancelled, match="an argument is the result of fails, which has failed"):
        coordinator.schedule(lambda x: x, args=(failed,)).fetch()


class _Own(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def test_an_exception_keeps_its_type_and_attributes(coordinator: ClusterCoordinator) -> None:
    def raises() -> None:
        raise _Own(5)

    coordinator.schedule(raises)
    with pytest.raises(_Own) as caught:
        coordinator.join()
    assert caught.value.number == 5


# -- per-worker values and datasets ------------------------------------------------------------------------------------


def test_a_per_worker_value_is_made_once_on_each_worker(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    value = coordinator.create_per_worker_value(lambda: [os.getpid()])

    def use(own: list[int]) -> tuple[int, list[int]]:
        meet(tmp_path)
        own.append(len(own))
        return os.getpid(), list(own)

    found = coordinator.fetch([coordinator.schedule(use, args=(value,)) for _ in range(8)])
    assert len({pid for pid, _ in found}) == 2
    for pid, own in found:
        assert own == [pid, *range(1, len(own))]
    assert sum(len(own) == 2 for _, own in found) == 2
    with pytest.raises(OptionError, match="each worker has its own"):
        coordinator.fetch(value)
    with pytest.raises(CannotTravelError, match=r"only be sent as an argument of coordinator\.schedule"):
        pickle.dumps(value)


def test_iterators_give_each_worker_its_own_batches(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    def dataset(context: distnb.InputContext) -> Iterator[tuple[int, int, int]]:
        return ((context.input_pipeline_id, context.num_input_pipelines, n) for n in itertools.count())

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def step(given: Any) -> tuple[int, int, int]:
        meet(tmp_path)
        return next(given["it"])

    found = coordinator.fetch([coordinator.schedule(step, args=({"it": iterator},)) for _ in range(8)])
    for worker in (0, 1):
        own = [n for which, _, n in found if which == worker]
        assert own == list(range(len(own)))
        assert own
    assert {workers for _, workers, _ in found} == {2}
    with pytest.raises(distnb.errors.ProgramError, match="on the workers"):
        next(iterator)


def test_each_iter_restarts_the_dataset_which_is_sent_by_value(coordinator: ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset([10, 20])
    for _ in range(2):
        first = coordinator.schedule(next, args=(iter(dataset),))
        assert first.fetch() == 10


def test_the_end_of_a_dataset_is_an_error_for_next_and_ends_a_for_loop(coordinator: ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(lambda: range(3))
    assert coordinator.schedule(lambda it: sum(it), args=(iter(dataset),)).fetch() == 3
    iterator = iter(dataset)

    def read_on() -> None:
        for _ in range(8):
            coordinator.schedule(lambda it: next(it), args=(iterator,))  # may raise the error of an earlier one
        coordinator.join()

    with pytest.raises(EndOfDataset, match="repeat"):
        read_on()


def test_shuffles_differ_between_workers_and_follow_the_seed(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    def draw() -> tuple[int, float]:
        meet(tmp_path)
        return os.getpid(), torch.rand(()).item()

    found = coordinator.fetch([coordinator.schedule(draw) for _ in range(6)])
    assert len({pid for pid, _ in found}) == 2
    assert len({value for _, value in found}) == 6
    assert len({coordinator._seed_of(worker) for worker in (0, 1)}) == 2
    assert coordinator._seed_of(0) == coordinator._seed_of(0)


# -- many closures -----------------------------------------------------------------------------------------------------


def test_thousands_of_closures_wait_within_bounded_memory(coordinator: ClusterCoordinator) -> None:
    coordinator._max_queued = 64
    try:
        most = 0
        values = []
        for number in range(3000):
            values.append(coordinator.schedule(lambda n: n + 1, args=(number,)))
            most = max(most, coordinator._queue.queued)
        assert most <= 64
        assert coordinator.fetch(values) == list(range(1, 3001))
    finally:
        coordinator._max_queued = 4096
    assert len(coordinator._packer._known) < 50


def test_the_size_of_arguments_bounds_the_queue(coordinator: ClusterCoordinator) -> None:
    coordinator._max_nbytes = 1 << 20
    try:
        for _ in range(12):
            coordinator.schedule(lambda x: (time.sleep(0.005), None)[1], args=(torch.zeros(1 << 17),))
            assert coordinator._nbytes <= (1 << 20) + 5 * (1 << 19) + (1 << 16)
        coordinator.join()
    finally:
        coordinator._max_nbytes = 1 << 30


def test_an_error_unblocks_a_waiting_schedule(coordinator: ClusterCoordinator) -> None:
    coordinator._max_queued = 4
    try:
        coordinator.schedule(fails, args=("while it waits", 0.3))
        with pytest.raises(ValueError, match="while it waits"):
            coordinator.fetch([coordinator.schedule(time.sleep, args=(60,)) for _ in range(100)])
    finally:
        coordinator._max_queued = 4096


def test_closures_waiting_behind_a_long_one_move_to_a_free_worker(coordinator: ClusterCoordinator) -> None:
    long = coordinator.schedule(time.sleep, args=(3,))
    others = [coordinator.schedule(whoami) for _ in range(20)]
    coordinator.fetch(others)
    assert long.state == "running"
    coordinator.join()


def test_ordinary_programs_run_between_closures(coordinator: ClusterCoordinator) -> None:
    strategy = distnb.MirroredStrategy()
    values = [coordinator.schedule(lambda n: n, args=(n,)) for n in range(50)]
    assert float(strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None)) == 2.0
    assert coordinator.fetch(values) == list(range(50))
    assert float(strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None)) == 2.0
    coordinator.schedule(fails, args=("x",))
    with pytest.raises(ValueError, match="x"):
        coordinator.join()
    assert float(strategy.reduce("sum", strategy.run(lambda: torch.ones(())), axis=None)) == 2.0

    def alone() -> tuple[int, float]:
        tensor = torch.ones(2)
        torch.distributed.all_reduce(tensor)
        return torch.distributed.get_world_size(), tensor.sum().item()

    assert coordinator.schedule(alone).fetch() == (1, 2.0)


def test_prints_are_shown(coordinator: ClusterCoordinator, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator.schedule(lambda: print("hello from a closure"))
    coordinator.join()
    assert "hello from a closure" in capsys.readouterr().out


def test_status_shows_the_closure_of_each_worker(coordinator: ClusterCoordinator) -> None:
    before = coordinator.status()
    running = coordinator.schedule(time.sleep, args=(1,))
    wait_until(lambda: running.state == "running", _WITHIN_S)
    status = coordinator.status()
    assert [each.closure for each in status.workers if each.state == "running"] == ["sleep"]
    assert (status.running, status.done) == (1, before.done)
    coordinator.join()
    after = coordinator.status()
    assert (after.waiting, after.running, after.done) == (0, 0, before.done + 1)
    assert sum(each.done for each in after.workers) == after.done
    assert "done" in repr(coordinator)


# -- interrupts --------------------------------------------------------------------------------------------------------


def while_waiting(coordinator: ClusterCoordinator, act: Callable[[], Any]) -> None:
    """Do something in another thread when this one waits for a closure."""

    def thread() -> None:
        wait_until(lambda: bool(coordinator._waiters), _WITHIN_S)
        act()

    threading.Thread(target=thread).start()


@pytest.mark.parametrize("wait", ["join", "fetch", "schedule"])
def test_an_interrupt_cancels_scheduled_closures(coordinator: ClusterCoordinator, wait: str) -> None:
    values = [coordinator.schedule(time.sleep, args=(60,)) for _ in range(30)]  # more than two workers have
    coordinator._max_queued = 2
    wait_until(lambda: sum(value.state == "running" for value in values) >= 2, _WITHIN_S)
    asked: dict[str, Callable[[], Any]] = {
        "join": coordinator.join,
        "fetch": values[0].fetch,
        "schedule": lambda: coordinator.schedule(whoami),
    }
    while_waiting(coordinator, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            asked[wait]()
    finally:
        coordinator._max_queued = 4096
    for value in values:
        with pytest.raises(ClosureCancelled, match="interrupted"):
            value.fetch()
    coordinator.join()
    assert isinstance(coordinator.schedule(whoami).fetch(), int)


def test_an_interrupt_of_the_session_has_ended_when_it_returns(coordinator: ClusterCoordinator) -> None:
    """Check that an interrupt affects the closures scheduled now, and not those of the next cell."""
    coordinator._link._do(lambda: time.sleep(0.3))  # type: ignore[attr-defined]  # its thread is busy
    value = coordinator.schedule(time.sleep, args=(60,))
    require().interrupt()
    assert coordinator._queue.ending or value.state == "cancelled"
    coordinator.join()


def test_an_interrupt_of_the_session_ends_a_join(coordinator: ClusterCoordinator) -> None:
    value = coordinator.schedule(time.sleep, args=(60,))
    wait_until(lambda: value.state == "running", _WITHIN_S)
    while_waiting(coordinator, require().interrupt)
    with pytest.raises(KeyboardInterrupt):
        coordinator.join()
    assert value.state == "cancelled"


def test_a_worker_stuck_in_c_code_is_given_up_and_rejoins(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    def deaf(seconds: float, deafened: str) -> None:
        import ctypes

        open(deafened, "w").close()
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # holds Python's lock, so that no signal is handled

    deafened = tmp_path / "deafened"
    coordinator.schedule(deaf, args=(4.0, str(deafened)))
    wait_until(deafened.exists, _WITHIN_S)
    while_waiting(coordinator, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        coordinator.join()
    assert [each.state for each in coordinator.status().workers].count("stuck") == 1
    assert len(set(coordinator.fetch([coordinator.schedule(whoami) for _ in range(5)]))) == 1
    wait_until(lambda: all(each.state != "stuck" for each in coordinator.status().workers), _WITHIN_S)


def test_a_listener_that_raises_takes_no_event_from_the_coordinator(
    coordinator: ClusterCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(event: Any) -> None:
        raise AssertionError("a defect of another listener")

    listeners = coordinator._link._listeners  # type: ignore[attr-defined]
    listeners.insert(0, (broken, lambda: None))
    try:
        assert coordinator.schedule(lambda: 1).fetch() == 1
    finally:
        del listeners[0]
    assert "a defect of another listener" in capsys.readouterr().err


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_both_spellings_of_metric_methods_work_on_workers(coordinator: ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        accuracy, largest = distnb.metrics.BinaryAccuracy(), distnb.metrics.Max()

    def step(number: int) -> None:
        accuracy.update_state(torch.tensor([1.0, 0.0]), torch.tensor([0.9, number / 10]))
        largest.update(float(number))

    for number in range(10):
        coordinator.schedule(step, args=(number,))
    coordinator.join()
    assert float(accuracy.result()) == pytest.approx(0.8), "in the second batch, predictions from 6 on are wrong"
    assert float(largest.compute()) == 9
    accuracy.reset_state()
    coordinator.fetch(coordinator.schedule(step, args=(9,)))
    assert float(accuracy.result()) == 0.5
