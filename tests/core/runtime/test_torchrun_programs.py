"""Programs for torchrun beyond training: compiling, giving the group back."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

_PROGRAM = """
import distnb, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

strategy = distnb.MirroredStrategy()
strategy.run(lambda: None)
net = torch.nn.Linear(4, 1)
model = torch.compile(DistributedDataParallel(net), backend="eager")
for _ in range(2):
    net.zero_grad()
    model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()

@torch.compile(backend="eager")
def twice_the_sum(x):
    dist.all_reduce(x)
    return x * 2

result = {"gradient": net.weight.grad.tolist(), "sum": twice_the_sum(torch.ones(2)).tolist()}
states = [dist.is_initialized()]
dist.destroy_process_group()
states.append(dist.is_initialized())
try:
    dist.all_reduce(torch.ones(1))
except ValueError as error:
    states.append("initialized" in str(error))
total = strategy.reduce("sum", strategy.run(lambda: torch.ones(1)), axis=None)  # a strategy's group is its own
dist.init_process_group("gloo")
states += [float(total), dist.is_initialized(), dist.get_world_size()]
result["states"] = states
"""


@pytest.fixture(scope="module")
def results():
    return [rank.check().result for rank in run_ranks(_PROGRAM, n=2, timeout_s=170)]


def test_a_compiled_ddp_trains(results):
    for result in results:
        assert result["gradient"] == [[1.5] * 4]
        assert result["sum"] == [4.0, 4.0]


def test_a_destroyed_group_is_unavailable_until_it_is_created_again(results):
    for result in results:
        assert result["states"] == [True, False, True, 2.0, True, 2]
