"""A method of a handle that communicates does so among the engines that hold the object, whoever ran last."""

from __future__ import annotations

import pytest

import distnb
import distnb.session

pytestmark = pytest.mark.timeout(170)


def test_a_metric_is_read_by_its_handle_after_another_team_ran() -> None:
    distnb.start(3)
    session = distnb.session.current()
    names = session.user_ns
    names["distnb"] = distnb
    try:
        three = distnb.MirroredStrategy()
        names["strategy"] = three
        two = distnb.MirroredStrategy(devices=list(three.worker_devices[:2]))
        session.run_cell(
            "with strategy.scope():\n    metric = distnb.metrics.Mean()\n"
            "strategy.run(lambda: metric.update(float(distnb.replica_id())))\n",
            three.spec,
            filename="cell-1",
        )
        assert two.num_replicas_in_sync == 2
        two.run(lambda: distnb.get_replica_context().all_reduce("sum", 1.0))
        assert float(names["metric"].compute()) == 1.0  # of 0, 1 and 2
        with pytest.raises(ZeroDivisionError):
            three.run(lambda: 1 // 0)
        assert float(names["metric"].compute()) == 1.0  # also in the new group that follows on a failure
        assert "Mean" in repr(names["metric"])
    finally:
        distnb.stop()
        for name in ("metric", "strategy"):
            names.pop(name, None)
