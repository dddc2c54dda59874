"""`cross_device_ops` on GPUs: through host memory if replicas share one, through NCCL if each has its own."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

TRAIN = """
import distnb

def train(ops):
    strategy = distnb.MirroredStrategy(cross_device_ops=ops)
    with strategy.scope():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
    def step():
        inputs = torch.full((3, 4), distnb.replica_id() + 1.0)
        model(inputs).sum().backward()
        return distnb.get_replica_context().all_reduce("mean", inputs[0])
    mean = strategy.local_results(strategy.run(step))[0]
    total = strategy.reduce("sum", strategy.run(lambda: torch.ones(5_000_000)), axis=None)
    return [model.weight.grad.tolist(), mean.tolist(), total[-1].item(), str(total.device)]

expected = train(None)
"""


def test_replicas_that_share_a_gpu_reduce_correctly() -> None:
    program = """
for ops in (distnb.HierarchicalCopyAllReduce(), distnb.ReductionToOneDevice(), distnb.ReductionToOneDevice("cpu")):
    assert train(ops) == expected, ops
try:
    distnb.MirroredStrategy(cross_device_ops=distnb.NcclAllReduce())
except ValueError as error:
    result = str(error)
"""
    for rank in run_ranks(TRAIN + program, 2, env={"DISTNB_DEVICE": "cuda:0"}, timeout_s=120):
        assert "needs a GPU of its own for each replica" in rank.check().result


def test_replicas_with_a_gpu_each_reduce_correctly() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"NCCL needs a GPU for each replica, and there is {count}")
    program = """
for ops in (distnb.NcclAllReduce(), distnb.NcclAllReduce(num_packs=0), distnb.HierarchicalCopyAllReduce(),
            distnb.ReductionToOneDevice("cuda:1"), distnb.ReductionToOneDevice("cpu")):
    assert train(ops) == expected, ops
"""
    for rank in run_ranks(TRAIN + program, 2, timeout_s=120):
        rank.check()
