"""Workers and servers killed during training: every closure is applied exactly once by count."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import distnb
from distnb.coordinator import ClusterCoordinator
from distnb.errors import ServerLost
from distnb.notebook.compose import require
from distnb.runtime.scopes import metric_binding
from tests.support import processes
from tests.support.processes import wait_until
from tests.support.sessions import pids_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]
_WITHIN_S = 60.0


class Training:
    """A regression whose loss falls, and counts of all its changes. One cluster has one coordinator."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.strategy = distnb.ParameterServerStrategy()
        self.coordinator = ClusterCoordinator(self.strategy)
        self.wanted = torch.randn(8, 1)
        with self.strategy.scope():
            self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.5)
            self.counter = distnb.Variable(0, dtype=torch.int64)
            self.ones = torch.nn.Parameter(torch.zeros(3))
            self.unit = torch.optim.SGD([self.ones], lr=1.0)
            self.losses = distnb.metrics.Mean()

    def step(self) -> Any:
        """Take a step; this function is scheduled."""
        model, optimizer, counter, ones, unit = self.model, self.optimizer, self.counter, self.ones, self.unit
        losses, wanted = self.losses, self.wanted

        def step(number: int, seconds: float) -> int:
            x = torch.randn(32, 8, generator=torch.Generator().manual_seed(number))
            loss = (model(x) - (x @ wanted).tanh()).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(seconds * random.random())  # it may be killed between any two changes
            counter.assign_add(1)
            losses.update(loss.detach())
            ones.grad = -torch.ones(3)
            unit.step()
            return number

        return step

    def check(self, done: int) -> None:
        """Check that everything was changed this often."""
        access = self.strategy.runtime.access
        assert int(self.counter) == done
        assert access.requests.read(access.represented.stored_of(self.ones)).tolist() == [done] * 3
        assert (self.optimizer.iterations, self.unit.iterations) == (done, done)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    distnb.start(workers=3, ps=2)
    yield
    distnb.stop()


@pytest.fixture
def training(cluster: None) -> Iterator[Training]:
    yield Training()
    require().restart(missing=True)
    processes.OF_MODULE.update(pids_of(require()))


def counted(metric: Any) -> int:
    """Return the number of workers' updates."""
    return int(metric_binding.whole_state(metric)["updates"])


def kill(engine: int) -> None:
    os.kill(require().status()[engine].pid, signal.SIGKILL)


def run_chaos(training: Training, seconds: float, every_s: float, at_once: int, least: int = 0) -> tuple[int, int]:
    """Train for some time, until this many workers were killed and have come back.

    Return the numbers of closures and of kills.
    """
    draws, step, ended = random.Random(1), training.step(), threading.Event()
    kills, before = 0, training.coordinator.status().done

    def kill_some() -> None:
        nonlocal kills
        while not ended.wait(every_s):
            for engine in draws.sample(range(3), at_once):
                kill(engine)
                kills += 1
            require().restart(missing=True)

    pool = ThreadPoolExecutor(1)
    killing = pool.submit(kill_some)
    numbers: list[int] = []
    found: list[int] = []
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until or (kills < least and not killing.done()):
            training.losses.reset()
            values = [training.coordinator.schedule(step, args=(len(numbers) + each, 0.02)) for each in range(100)]
            numbers += range(len(numbers), len(numbers) + 100)
            training.coordinator.join()
            found += training.coordinator.fetch(values)
            training.check(len(numbers))
            assert counted(training.losses) == 100, "counts of a lost worker count once"
    finally:
        ended.set()
        pool.shutdown()
    killing.result()
    assert found == numbers
    assert training.coordinator.status().done - before == len(numbers)
    return len(numbers), kills


@pytest.mark.soak
def test_closures_of_killed_workers_run_exactly_once(training: Training) -> None:
    count, _ = run_chaos(training, 10, 0.5, 1, least=2)
    assert training.coordinator.status().retried >= 1
    values = [training.coordinator.schedule(training.step(), args=(count + each, 0.0)) for each in range(300)]
    training.losses.reset()
    training.coordinator.join()
    assert sorted(training.coordinator.fetch(values)) == list(range(count, count + 300))
    assert float(training.losses.compute()) < 0.15


@pytest.mark.soak
@pytest.mark.parametrize(("at_once", "every_s"), [(1, 3.0), (2, 3.0), (3, 10.0)])
def test_a_minute_of_chaos_loses_no_closure(training: Training, at_once: int, every_s: float) -> None:
    """Give new workers time to load libraries if all have been killed."""
    _, kills = run_chaos(training, 60, every_s, at_once, least=4 * at_once)
    assert kills >= 4 * at_once
    assert float(training.losses.compute()) < 0.15


def test_an_acknowledged_change_is_not_repeated_after_the_kill(training: Training, tmp_path: Path) -> None:
    flag = tmp_path / "reached"
    step = training.step()

    def dies_at_the_end(number: int) -> int:
        step(number, 0.0)
        try:
            flag.touch(exist_ok=False)
        except FileExistsError:
            return number
        time.sleep(120)
        return -1

    before = training.coordinator.status().retried
    value = training.coordinator.schedule(dies_at_the_end, args=(5,))
    wait_until(flag.exists, _WITHIN_S)
    training.check(1)
    [running] = [each.worker for each in training.coordinator.status().workers if each.state == "running"]
    kill(running)
    training.coordinator.join()
    assert value.fetch() == 5
    training.check(1)
    assert training.coordinator.status().retried == before + 1
    assert counted(training.losses) == 1


@pytest.mark.soak
def test_a_killed_server_is_an_error_at_once_and_a_checkpoint_restores_it(training: Training, tmp_path: Path) -> None:
    coordinator, step = training.coordinator, training.step()
    objects = {name: getattr(training, name) for name in ("model", "optimizer", "counter", "ones", "unit")}
    manager = distnb.CheckpointManager(distnb.Checkpoint(**objects), tmp_path / "saved")
    for number in range(20):
        coordinator.schedule(step, args=(number, 0.0))
    coordinator.join()
    training.check(20)
    manager.save()
    lost = coordinator.schedule(time.sleep, args=(120,))
    for number in range(50):
        coordinator.schedule(step, args=(number, 0.01))
    kill(4)
    with pytest.raises(ServerLost, match=r"server 1 .*recover"):
        coordinator.join()
    with pytest.raises(ServerLost, match="server 1"):
        coordinator.schedule(step, args=(0, 0.0))
    assert lost.state == "cancelled"
    require().restart(missing=True)
    coordinator.recover(manager)
    training.check(20)
    coordinator.fetch([coordinator.schedule(step, args=(number, 0.0)) for number in range(30)])
    training.check(50)
