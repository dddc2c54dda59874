"""Seed 000, "Types of strategies": how to make each, its ways to communicate, and the default one."""

import os

import torch

import distnb

n = strategy.num_replicas_in_sync
rank = distnb.replica_id()


class Doubling(distnb.CrossDeviceOps):
    """A custom algorithm whose results show that it was called."""

    def reduce_implementation(self, op, tensor, replicas):
        return 2 * replicas.all_reduce(tensor, op)


def refused(make):
    try:
        return not make()
    except ValueError as error:
        return "NCCL" in str(error) or "Nccl" in str(error)


def total(of):
    """Return the sum of 1 … n and of n ones, computed by the strategy."""
    return of.reduce("sum", of.run(lambda: torch.tensor([rank + 1.0, 1.0])), axis=None).tolist()


triangle = [n * (n + 1) / 2, float(n)]
assert total(strategy) == triangle

if strategy.kind == "mirrored":
    # Without devices: all that there are.
    assert len(distnb.MirroredStrategy().worker_devices) == n
    for ops in (
        distnb.HierarchicalCopyAllReduce(),
        distnb.HierarchicalCopyAllReduce(num_packs=2),
        distnb.ReductionToOneDevice(),
    ):
        assert total(distnb.MirroredStrategy(cross_device_ops=ops)) == triangle
    assert total(distnb.MirroredStrategy(cross_device_ops=Doubling())) == [2 * each for each in triangle]
    assert refused(lambda: distnb.MirroredStrategy(cross_device_ops=distnb.NcclAllReduce()))  # there are no GPUs
elif strategy.kind == "central_storage":
    # All devices that there are; variables on the CPU.
    assert distnb.experimental.CentralStorageStrategy() is strategy
    assert total(distnb.CentralStorageStrategy(parameter_device="/cpu:0")) == triangle
elif strategy.kind == "multi_worker":
    experimental = distnb.experimental
    assert experimental.MultiWorkerMirroredStrategy() is strategy
    assert total(experimental.MultiWorkerMirroredStrategy(experimental.CollectiveCommunication.RING)) == triangle
    assert refused(lambda: experimental.MultiWorkerMirroredStrategy(experimental.CollectiveCommunication.NCCL))
    # Seed 001, "cluster_resolver": what is only for one kind of task.
    task = strategy.cluster_resolver
    if task.cluster_spec():  # else a notebook's engines are the replicas, without TF_CONFIG
        assert (task.task_type, task.task_id) == ("worker", rank)
        assert len(task.cluster_spec().as_dict()["worker"]) == n
    assert distnb.is_chief() == (rank == 0)
elif strategy.kind == "tpu":
    # One replica on each chip, found by the package that knows them.
    assert distnb.experimental.TPUStrategy() is strategy
    assert strategy.worker_devices == tuple(f"tpu:{chip}" for chip in range(n))
    assert strategy.run(lambda: str(torch.ones(1).device)) == "tpu:0"  # a process sees its own chip only
else:
    # One device, no TF_CONFIG: strategies of several replicas have one, as the guide's output says of its own. In a
    # notebook they have its engines, of which the tests start two.
    there = int(os.environ.get("WORLD_SIZE", "2"))
    assert distnb.MirroredStrategy().num_replicas_in_sync == there
    assert distnb.MultiWorkerMirroredStrategy().num_replicas_in_sync == there
    assert distnb.CentralStorageStrategy().num_replicas_in_sync == there

# Seed 001: strategies of one worker have no resolver.
assert (strategy.cluster_resolver is None) == (strategy.kind != "multi_worker")

# There is one default strategy, for code that shall not care.
default = distnb.get_strategy()
assert default is distnb.get_strategy()
assert not distnb.has_strategy()
reduced = default.reduce("SUM", 1.0, axis=None)
assert reduced == 1.0

chosen = distnb.MirroredStrategy() if torch.cuda.is_available() else distnb.get_strategy()
values = []
for each in (chosen, strategy):
    with each.scope():
        assert distnb.get_strategy() is each
        values.append(torch.nn.Parameter(torch.tensor(1.0)).item())
assert values == [1.0, 1.0]
result = [reduced, values]
