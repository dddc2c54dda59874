"""Variables, buffers and the drift check from ordinary notebook code, through engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import distnb
from distnb.notebook.variable_placement import drift_reports
from tests.support.sessions import run_cell, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]

_MAKING = """\
with strategy.scope():
    v = distnb.Variable(1.0, name="v", aggregation="sum")
    total = distnb.Variable(0, synchronization="on_read", aggregation="sum")
    apart = distnb.Variable(1.0, synchronization="on_read")
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1, momentum=1.0), torch.nn.Linear(1, 1))
    model.total = total
"""


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    with started() as session:
        run_cell(session, _MAKING, "cell-1")
        yield session.user_ns


def test_a_variables_handle_can_be_assigned_and_read(names: dict[str, Any]) -> None:
    strategy, v = names["strategy"], names["v"]
    assert isinstance(v, distnb.Mirrored)
    assert (v.name, float(v), v.numpy().shape) == ("v", 1.0, ())
    assert v.assign_add(2.0) is v
    assert strategy.run(lambda: v.assign_add(1.0)) is v
    assert float(v) == 5.0
    assert "<Variable 'v'" in repr(v)
    assert "tensor(5.)" in repr(v)
    # A program's changes are shown, whether it got the handle itself or an object that contains it.
    model, weight = names["model"], names["model"][1].weight
    before = weight.item()
    assert f"{before:.4f}" in repr(weight)
    strategy.run(lambda: model.load_state_dict({**model.state_dict(), "1.weight": torch.tensor([[before + 1.0]])}))
    assert f"{before + 1.0:.4f}" in repr(weight)
    with pytest.raises(TypeError, match="PerReplica"):
        v.assign(distnb.PerReplica([1.0, 2.0]))
    assert v.item() == 5.0
    (here, _) = strategy.local_results(v)
    assert isinstance(here, distnb.Variable)
    assert float(here.assign_add(1.0)) == 6.0  # a copy
    assert float(v) == 5.0


def test_several_variables_are_read_together(names: dict[str, Any]) -> None:
    strategy, total, apart, model = (names[name] for name in ("strategy", "total", "apart", "model"))
    strategy.run(lambda: total.assign_add(distnb.replica_id() + 1))
    assert (int(total), float(total), total.item()) == (3, 3.0, 3)
    assert "3" in repr(total)
    assert [int(each) for each in strategy.local_results(total)] == [1, 2]
    assert int(strategy.reduce("sum", total, axis=None)) == 3
    assert int(total.assign(4).read_value()) == 4
    assert "PerReplica" in repr(apart)
    with pytest.raises(TypeError):
        float(apart)
    with pytest.raises(RuntimeError, match="aggregation='NONE'"):
        apart.read_value()
    strategy.run(lambda: model(torch.tensor([[0.0], [2.0]]) + 10 * distnb.replica_id()))
    mean = model[0].running_mean
    assert [float(each) for each in strategy.local_results(mean)] == [6.0, 6.0]
    assert float(model.state_dict()["total"]) == 4.0


def test_drift_is_reported(names: dict[str, Any]) -> None:
    strategy, model = names["strategy"], names["model"]
    reports = drift_reports(names)
    assert {"v", "total", "model"} <= set(reports)
    assert reports.pop("total").startswith("nothing to compare")
    assert all("in sync" in text for text in reports.values())
    names["opaque"] = strategy.run(lambda: torch.utils.data.DataLoader([1]))
    assert drift_reports(names, ["opaque"])["opaque"].startswith("a PerReplica: each replica has a value of its own")

    def spoil() -> None:
        with torch.no_grad():
            model[1].bias += distnb.replica_id()

    strategy.run(spoil)
    text = drift_reports(names, ["model"])["model"]
    assert "OUT OF SYNC. 1 of" in text
    assert "Sequential['1.bias']: replica 1: 1 of 1 elements, the first at [0]" in text
    assert "at most 1 apart" in text
    with pytest.raises(distnb.errors.OutOfSyncError, match="replica 1"):
        strategy.assert_in_sync(model)
    assert "model.load_state_dict(strategy.broadcast(model.state_dict()))" in text  # the cure from the error works
    model.load_state_dict(strategy.broadcast(model.state_dict()))
    strategy.assert_in_sync(model)
    with pytest.raises(distnb.errors.OptionError, match="is not a variable"):
        drift_reports(names, ["nothing"])
