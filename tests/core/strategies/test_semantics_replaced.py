"""Mirrored variables, buffers, optimizer and metrics survive an engine, and stay in sync on its successor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distnb.notebook.session import Session
from tests.support.processes import OF_MODULE
from tests.support.sessions import lose, pids_of, run_cell, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with started() as session:
        yield session


MODEL = """
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model.register_buffer("seen", torch.zeros(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    metric = distnb.metrics.Mean()
def step():
    optimizer.zero_grad()
    loss = model(torch.rand(3, 2) + distnb.replica_id()).sum()
    loss.backward()
    optimizer.step()
    metric.update(float(distnb.replica_id()))
    model(torch.rand(3, 2) + distnb.replica_id())  # no backward pass follows
    model.seen.fill_(distnb.replica_id())
strategy.run(step)
own = strategy.run(lambda: repr(model.seen.tolist()))
statistics = repr(model[1].running_mean.tolist())
"""


def test_a_replaced_engine_keeps_training(session: Session) -> None:
    names = session.user_ns
    run_cell(session, MODEL, "cell-1")
    first, second = names["own"].values
    assert first != second, "a buffer belongs to its replica"
    assert isinstance(names["statistics"], str), "a BatchNorm's are the mean of all replicas'"
    lose(session, 1)
    assert session.restart(missing=True) == (1,)
    OF_MODULE.update(pids_of(session))
    run_cell(
        session,
        "strategy.assert_in_sync([model, optimizer])\n"
        "now = repr(model.seen.tolist()), repr(model[1].running_mean.tolist())\n"
        "before = model[0].weight.detach().clone()\n"
        "strategy.run(step)\n"
        "strategy.assert_in_sync([list(model.parameters()), optimizer])\n"
        "moved = bool((model[0].weight != before).all())\n"
        "mean = float(metric.compute())\n",
        "cell-2",
    )
    assert names["now"] == (first, names["statistics"]), "the replacement has the survivor's buffers"
    assert names["moved"] is True
    assert names["mean"] == pytest.approx(1 / 3)  # what the lost replica counted is lost: 0, and then 0 and 1


def test_buffers_are_made_equal_after_a_partial_step(session: Session) -> None:
    names = session.user_ns
    run_cell(session, MODEL, "cell-1")
    run_cell(session, "strategy.run(lambda: None)\nkept = repr(model.seen.tolist())\n", "cell-2")
    assert names["kept"].values == names["own"].values, "buffers that may differ are unchanged"
    with pytest.raises(ZeroDivisionError):
        run_cell(session, "if distnb.replica_id() == 0:\n    model(torch.ones(3, 2))\nelse:\n    1 / 0\n", "cell-3")
    run_cell(
        session,
        "strategy.run(lambda: None)\nstrategy.assert_in_sync(model)\nn = int(model[1].num_batches_tracked)",
        "cell-4",
    )
    assert names["n"] == 3
