"""Collectives of replicas without shared memory: they do not wait for the store through which they compare calls."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

_PROGRAM = """
import threading
from distnb.collectives.shared_memory import host
from distnb.collectives.verify.replicated_log import ReplicatedLog
import distnb
import torch.distributed as dist

host.identity = lambda: f"machine {os.getpid()}"  # no memory is shared
distnb.MirroredStrategy()

asked, done, late = threading.Event(), threading.Event(), []
exchange = ReplicatedLog.exchange

def slow(log):
    asked.set()
    if not done.wait(20):
        late.append(threading.current_thread().name)
    exchange(log)

for number in range(20):
    dist.all_reduce(torch.ones(8))
    if number == 0:
        ReplicatedLog.exchange = slow
    if number == 1:
        assert asked.wait(60), "nothing is compared any more"
done.set()
result = late
"""


def test_a_slow_store_does_not_delay_known_collectives() -> None:
    for rank in run_ranks(_PROGRAM, 2):
        assert rank.returncode == 0, rank.stderr
        assert rank.result == [], rank.stderr
