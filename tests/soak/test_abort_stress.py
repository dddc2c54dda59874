"""Aborts during traffic: every replica is free, and the next generation's sums are right."""

from __future__ import annotations

import pytest

from benchmarks.abort_stress import TRAFFIC, stress

pytestmark = pytest.mark.processes

ROUNDS = {2: 4, 4: 2}
_LIMIT_S = 15.0  # the benchmark measures the time; this test only requires an end


@pytest.mark.soak
@pytest.mark.timeout(150)
@pytest.mark.parametrize("size", ROUNDS)
def test_an_abort_frees_every_replica(size):
    for replica in stress(size, ROUNDS[size], TRAFFIC, timeout_s=120, seed=size):
        assert len(replica["records"]) == ROUNDS[size] * len(TRAFFIC)
        for record in replica["records"]:
            assert record["right"], record
            assert record["freed_s"] < _LIMIT_S, record
            assert record["error"] in ("ProgramAborted", "stopped", "RuntimeError"), record
