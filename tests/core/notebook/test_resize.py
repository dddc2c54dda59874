"""A cluster that grows and shrinks between cells and in the middle of an epoch, and resizes that fail half-way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distnb
from distnb.errors import EngineDied, OptionError, StartError
from distnb.notebook.session import Session
from tests.core.notebook.resize_cases import ADAM, MAKE, STATE, TRAIN, flat, one_replicas
from tests.support.processes import OF_MODULE, wait_until
from tests.support.sessions import lose, pids_of, run_cell, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]
IMPORTED_LATE = "torchmetrics,torch._dynamo"
"""The modules that an engine's first metric and first optimizer import, for more than a second each."""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DISTNB_PRELOAD", IMPORTED_LATE)
            session = stack.enter_context(started())
        yield session


@pytest.fixture(autouse=True)
def _module_owns_the_engines(session: Session) -> Iterator[None]:
    yield
    OF_MODULE.update(pids_of(session))


def sizes(session: Session) -> tuple[int, int]:
    """Return the number of engines, and the number of replicas of a strategy that was made before any resize."""
    assert all(row.state == "idle" for row in session.status())
    strategy: Any = session.user_ns["strategy"]
    return len(session.status()), strategy.num_replicas_in_sync


@pytest.mark.soak  # conformance/test_pauses.py resizes programs, and compares their numbers
def test_training_in_cells_goes_on_through_all_sizes(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTNB_PRELOAD", IMPORTED_LATE)
    run_cell(session, MAKE + ADAM, "make")
    run_cell(session, TRAIN, "train-2")
    for size in (4, 1, 3):
        session.resize(size)
        assert sizes(session) == (size, size)
        run_cell(session, TRAIN + STATE + "strategy.assert_in_sync([model, optimizer])\n", f"train-{size}")
    assert flat(session.user_ns["found"]) == pytest.approx(flat(one_replicas()), abs=1e-5)


@pytest.mark.soak  # conformance/test_pauses.py resizes programs, and compares their numbers
def test_training_in_an_ordinary_cell_goes_on_through_all_sizes(session: Session) -> None:
    names = session.user_ns
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.rand(96, 5), torch.rand(96, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)

    def train(strategy: Any, step: Any, resize: Any = lambda size: None) -> list[float]:
        losses = []
        for batch in strategy.distribute_dataset(loader):
            losses.append(float(strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)))
            if len(losses) in (3, 5, 6):
                resize({3: 4, 5: 1, 6: 2}[len(losses)])
        return losses

    run_cell(session, MAKE, "make")
    losses = train(names["strategy"], names["step"], session.resize)
    assert sizes(session) == (2, 2)
    found = losses, [p.tolist() for p in names["model"].parameters()], float(names["count"])
    alone: Any = {"strategy": distnb.get_strategy(), "distnb": distnb, "torch": torch}
    exec(MAKE, alone)
    wanted = train(alone["strategy"], alone["step"]), [p.tolist() for p in alone["model"].parameters()]
    assert flat(found) == pytest.approx(flat((*wanted, 96.0)), abs=1e-5)


HOLDERS = """
import torchmetrics
class Trainer:
    def __init__(self):
        self.layer = torch.nn.Linear(3, 1)
        self.metrics = {"seen": [distnb.metrics.Mean()]}
    def step(self):
        self.layer.weight.grad = None
        self.layer(torch.ones(2, 3) * distnb.replica_id()).sum().backward()
        with torch.no_grad():
            self.layer.weight -= 0.1 * self.layer.weight.grad
        self.metrics["seen"][0].update(float(distnb.replica_id()))
with strategy.scope():
    trainer = Trainer()
    pearson = torchmetrics.PearsonCorrCoef()
x, y = torch.rand(2, 3, 8)
strategy.run(lambda: pearson.update(x[distnb.replica_id()], y[distnb.replica_id()]))
strategy.run(trainer.step)
own = torch.full((2,), float(distnb.replica_id()))
same = torch.ones(2)
torch.manual_seed(9)
numbers = [torch.rand(1).item()]
drawn = [strategy.run(lambda: torch.rand(1).item())]
"""
READ = """
numbers.append(torch.rand(1).item())
strategy.run(trainer.step)
strategy.assert_in_sync(trainer.layer)
read = float(trainer.metrics["seen"][0].compute()), float(pearson.compute())
total = strategy.reduce("sum", strategy.run(lambda: same.sum()), axis=None).item()
"""


def test_objects_of_all_kinds_follow_the_replicas(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    session.resize(3)
    names = session.user_ns
    run_cell(session, HOLDERS, "holders")  # counts 0, 1 and 2
    capsys.readouterr()
    assert session.resize(1).removed == (1, 2)
    assert "with engines 1, 2, components of `own` are lost" in capsys.readouterr().out
    assert [each.tolist() for each in names["own"].values] == [[0.0, 0.0]]
    run_cell(session, READ, "read-1")  # counts 0
    wanted = torch.corrcoef(torch.stack([names["x"].flatten(), names["y"].flatten()]))[0, 1].item()
    assert names["read"] == pytest.approx((3 / 4, wanted), abs=1e-5)
    assert names["total"] == 2.0
    assert session.resize(2).added == (1,)
    assert repr(names["own"]).count("<unassigned>") == 1
    run_cell(session, READ, "read-2")  # counts 0 and 1
    assert names["read"] == pytest.approx((4 / 6, wanted), abs=1e-5)
    assert names["total"] == 4.0
    with pytest.raises(NameError, match="own"):
        run_cell(session, "own", "unassigned")
    run_cell(session, "pearson.reset()\nstrategy.run(lambda: pearson.update(x[0], y[0]))\n" + READ, "reset")
    assert names["read"][1] == pytest.approx(torch.corrcoef(torch.stack([names["x"][0], names["y"][0]]))[0, 1].item())
    torch.manual_seed(9)
    assert names["numbers"] == [torch.rand(1).item() for _ in range(4)], "the shared stream continues"
    run_cell(session, "drawn = strategy.run(lambda: torch.rand(1).item())", "drawn")
    assert len(set(names["drawn"].values)) == 2


def test_a_resize_that_fails_leaves_the_earlier_size(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cell(session, MAKE, "make")
    before = sizes(session)[0]
    with monkeypatch.context() as patch:
        patch.setenv("DISTNB_PRELOAD", "no_such_module")
        with pytest.raises(StartError, match=rf"no_such_module(.|\n)*The cluster has {before} engines, as before"):
            session.resize(before + 1)
    assert sizes(session) == (before, before)

    def kill(text: str) -> None:
        if text.startswith("copying"):
            os.kill(session.status()[-1].pid, signal.SIGKILL)

    with pytest.raises(EngineDied) as failed:
        session.resize(before + 1, on_progress=kill)
    assert f"The cluster has {before} engines, as before." in failed.value.__notes__
    assert sizes(session) == (before, before)
    run_cell(session, TRAIN + "strategy.assert_in_sync(model)", "train")


def test_an_interrupt_leaves_one_of_both_sizes(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cell(session, MAKE, "make")
    before = sizes(session)[0]
    for moment in ("0 of", "copying"):

        def interrupt(text: str, moment: str = moment) -> None:
            if text.startswith(moment):
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            session.resize(before + 1, on_progress=interrupt)
        assert f"interrupted. The cluster has {before} engines, as before" in capsys.readouterr().err
        assert sizes(session) == (before, before)
        run_cell(session, TRAIN, "train")
    removed = session.namespace.engines_removed

    def interrupt_late(*args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        removed(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(session.namespace, "engines_removed", interrupt_late)
        with pytest.raises(KeyboardInterrupt):
            session.resize(before - 1)
    assert f"too late. The cluster has {before - 1} engine" in capsys.readouterr().err
    assert sizes(session) == (before - 1, before - 1)
    run_cell(session, TRAIN, "train")
    assert len(session.user_ns["losses"]) == 9


def test_engines_that_have_ended_do_not_count(session: Session) -> None:
    assert sizes(session) == (1, 1)
    session.resize(3)
    run_cell(session, MAKE, "make")
    lose(session, 1)
    assert session.resize(2).removed == (1,)
    assert sizes(session) == (2, 2)
    run_cell(session, TRAIN, "train")
    lose(session, 0)
    resized = session.resize(2)
    assert (resized.added, resized.removed) == ((0,), (0,))
    assert sizes(session) == (2, 2)
    run_cell(session, "strategy.run(step, args=(next(batches),))\nstrategy.assert_in_sync(model)", "on")


class _Announced:
    """The turn, with a file that exists from the moment on at which somebody waits for it."""

    def __init__(self, turn: Any, waiting: Path) -> None:
        self._turn, self._waiting = turn, waiting

    def __enter__(self) -> Any:
        self._waiting.touch()
        return self._turn.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self._turn.__exit__(*error)


def test_a_resize_waits_for_a_running_cell(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), []
    waiting = tmp_path / "waiting"

    def note(event: Any) -> None:
        if getattr(event, "state", "") == "started":
            began.set()

    unsubscribe = session.events.subscribe(note)

    def resize() -> None:
        assert began.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(session._dispatch, "turn", _Announced(session._dispatch.turn, waiting))
            ended.append(session.resize(1))

    threading.Thread(target=resize).start()
    waits = f"import os, time\nwhile not os.path.exists({str(waiting)!r}):\n    time.sleep(0.01)\n"
    run_cell(session, waits + "size = strategy.num_replicas_in_sync", "slow")
    assert session.user_ns["size"] == 2
    unsubscribe()
    wait_until(lambda: bool(ended), 20)
    assert sizes(session) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "Give the new number of engines"),
        ({"n": 0}, "0 is no size of a cluster"),
        ({"n": 2.5}, "2.5 is no size"),
        ({"n": 300}, "asked for|further engines need"),
        ({"workers": 2}, "no parameter servers"),
        ({"n": 2, "ps": 1}, "no parameter servers"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(session: Session, arguments: dict[str, Any], text: str) -> None:
    before = sizes(session)
    with pytest.raises((OptionError, StartError), match=text):
        session.resize(**arguments)
    assert sizes(session) == before


LEARN = """
def learn(x):
    total.assign_add(len(x))
    changed.zero_grad()
    distnb.nn.compute_average_loss(changed(x).square().sum(1)).backward()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter -= 0.1 * parameter.grad
def epoch():
    for batch in strategy.distribute_dataset(torch.arange(24.0).view(6, 4) / 24, batch_size=6):
        strategy.run(learn, args=(batch,))
"""
LAYERS = f"""{LEARN}
torch.manual_seed(4)
with strategy.scope():
    changed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    total = distnb.Variable(0, aggregation="sum")
epoch()
with strategy.scope():
    changed[2] = torch.nn.Linear(4, 2)
    changed.append(torch.nn.Linear(2, 1))
del changed[1]
epoch()
"""
# The scope compares what is mirrored, and the gradients of the last step are there only on replicas that took it.
MORE = f"with strategy.scope():\n    torch.nn.Linear(1, 1)\n{LEARN}epoch()\nstrategy.assert_in_sync(changed)\nfound = [p.tolist() for p in changed.parameters()], int(total)\n"


def test_models_with_replaced_added_and_deleted_layers_follow_the_replicas(session: Session) -> None:
    session.resize(2)
    alone: Any = {"strategy": distnb.get_strategy(), "distnb": distnb, "torch": torch}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_cell(session, LAYERS, "layers")
        exec(LAYERS, alone)
        for number, change in enumerate((lambda: session.resize(3), lambda: lose(session, 0), lambda: None)):
            change()
            session.restart(missing=True)
            run_cell(session, MORE, f"more-{number}")
            exec(MORE, alone)
            assert flat(session.user_ns["found"]) == pytest.approx(flat(alone["found"]), abs=1e-5)
