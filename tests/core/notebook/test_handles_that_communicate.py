"""A handle's method that communicates does so among the engines that hold the object, whichever ran last."""

from __future__ import annotations

import pytest

import distnb
from tests.support.sessions import run_cell, started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(170)]


def test_a_metric_can_be_read_after_another_team_ran() -> None:
    with started(3) as session:
        names = session.user_ns
        three = names["strategy"]
        two = distnb.MirroredStrategy(devices=list(three.worker_devices[:2]))
        run_cell(
            session,
            "with strategy.scope():\n    metric = distnb.metrics.Mean()\n"
            "strategy.run(lambda: metric.update(float(distnb.replica_id())))\n",
            "cell-1",
        )
        assert two.num_replicas_in_sync == 2
        two.run(lambda: distnb.get_replica_context().all_reduce("sum", 1.0))
        assert float(names["metric"].compute()) == 1.0  # of 0, 1 and 2
        with pytest.raises(ZeroDivisionError):
            three.run(lambda: 1 // 0)
        assert float(names["metric"].compute()) == 1.0  # also in the new group that follows on a failure
        assert "Mean" in repr(names["metric"])
