"""Sparse gradients and tensors over the replicas; options of single calls of all_reduce or all_gather."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

_TRAIN = """
import distnb
data = torch.utils.data.TensorDataset(
    torch.randint(0, 10, (12, 4), generator=torch.Generator().manual_seed(1)),
    torch.randn(12, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
)
OPTIMIZERS = {
    "SparseAdam": lambda m: [torch.optim.SparseAdam([m[0].weight], lr=0.1), torch.optim.SGD(m[1].parameters(), lr=0.1)],
    "SGD": lambda m: [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9)],
    "Adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.5)],
}

def train(strategy, optimizers, accumulate=False, mean=False):
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.ModuleList([torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 1)]).double()
        optimizers = optimizers(model)

    def loss_of(batch):
        tokens, targets = batch
        each = (model[1](model[0](tokens).mean(1)) - targets).square().squeeze(1)
        return each.mean() if mean else distnb.nn.compute_average_loss(each)

    def step(batch):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if accumulate:
            with strategy.no_sync():
                loss_of(batch).backward()
        loss_of(batch).backward()
        assert model[0].weight.grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(2):
        for batch in strategy.distribute_dataset(data, batch_size=5):
            strategy.run(step, args=(batch,))
    strategy.assert_in_sync(model)
    return [parameter.detach().clone() for parameter in model.parameters()]

MODES = [(name, accumulate, mean) for name in OPTIMIZERS for accumulate in (False, True) for mean in (False, True)]
"""


def test_sparse_gradients_train_like_one_replica_under_every_algorithm() -> None:
    program = """
    class Own(distnb.CrossDeviceOps):
        def reduce_implementation(self, op, tensor, replicas):
            return replicas.all_reduce(tensor, op)

    ways = [None, distnb.HierarchicalCopyAllReduce(), distnb.ReductionToOneDevice(), Own()]
    result = [
        train(distnb.MirroredStrategy(cross_device_ops=ops, gradient_reduction="mean" if mean else "sum"),
              OPTIMIZERS[name], accumulate, mean)
        for ops in ways for name, accumulate, mean in (MODES if ops is None else MODES[::5])
    ]
    """
    alone = {}
    exec("import torch" + _TRAIN, alone)
    one = alone["distnb"].OneDeviceStrategy("cpu:0")
    expected = [alone["train"](one, alone["OPTIMIZERS"][name], *rest) for name, *rest in alone["MODES"]]
    expected += 3 * expected[::5]
    for rank in run_ranks(_TRAIN + dedent(program), 2, timeout_s=150):
        for found, wanted in zip(rank.check().result, expected, strict=True):
            for got, want in zip(found, wanted, strict=True):
                assert torch.allclose(got, want, rtol=1e-10)


def test_sparse_tensors_are_summed_and_options_of_a_call_are_applied() -> None:
    program = """
    import distnb
    from distnb import CommunicationOptions, ReduceOp
    from distnb.collectives.group.process_group import GuardedProcessGroup

    class Seen(distnb.CrossDeviceOps):
        sizes = []
        def reduce_implementation(self, op, tensor, replicas):
            self.sizes.append(tensor.numel())
            return replicas.all_reduce(tensor, op)

    by_sockets = []
    plain = GuardedProcessGroup.run
    def noted(self, key, method, tensors, *rest, **named):
        if method == "allreduce":
            by_sockets.append(tensors[0][0].numel())
        return plain(self, key, method, tensors, *rest, **named)
    GuardedProcessGroup.run = noted

    def error(call):
        try:
            call()
        except distnb.errors.OptionError as found:
            return str(found)

    def entries():
        return torch.sparse_coo_tensor([[distnb.replica_id(), 2, 2]], torch.ones(3, 2, dtype=torch.float64), (4, 2))

    def here():
        context, values = distnb.get_replica_context(), [torch.ones(100) for _ in range(4)]
        found = {}
        sparse, dense = context.all_reduce("sum", [entries(), torch.ones(1)])
        found["sparse"] = sparse.to_dense()[:, 0].tolist(), dense.item(), sparse.is_sparse
        found["sparse mean"] = context.all_reduce("mean", entries()).to_dense()[:, 1].tolist()
        assert not by_sockets  # the default way here: through memory
        x = torch.ones(3, requires_grad=True)
        context.all_reduce("sum", x, CommunicationOptions(implementation="ring")).sum().backward()
        found["ring"] = list(by_sockets), x.grad.tolist()
        gathered = context.all_gather(torch.ones(1), 0, CommunicationOptions(implementation="ring", timeout_seconds=60))
        found["gathered"] = gathered.tolist()
        found["nccl"] = error(lambda: context.all_reduce("sum", values, CommunicationOptions(implementation="nccl")))
        found["word"] = error(lambda: context.all_reduce("sum", values, "ring"))
        found["packed gather"] = error(lambda: context.all_gather(values[0], 0, CommunicationOptions(bytes_per_pack=8)))
        return found

    def packed():
        context = distnb.get_replica_context()
        for nbytes in (0, 1000):
            context.all_reduce("sum", [torch.ones(100) for _ in range(4)], CommunicationOptions(bytes_per_pack=nbytes))
        given = CommunicationOptions(implementation="ring")
        return error(lambda: context.all_reduce("sum", torch.ones(1), given))

    strategy, own = distnb.MirroredStrategy(), distnb.MirroredStrategy(cross_device_ops=Seen())
    result = strategy.local_results(strategy.run(here))[0]
    result["refused"] = strategy.local_results(own.run(packed))[0]
    result["packs"] = Seen.sizes
    result["reduced"] = strategy.reduce("sum", strategy.run(entries), axis=None).to_dense()[:, 0].tolist()
    """
    for rank in run_ranks(program, 2):
        found = rank.check().result
        assert found["sparse"] == ([1.0, 1.0, 4.0, 0.0], 2.0, True)
        assert found["sparse mean"] == [0.5, 0.5, 2.0, 0.0]
        assert found["reduced"] == [1.0, 1.0, 4.0, 0.0]
        assert found["ring"] == ([3, 3], [2.0, 2.0, 2.0])
        assert found["gathered"] == [1.0, 1.0]
        assert found["packs"] == [400, 200, 200]
        assert "implementation='NCCL' cannot be honoured by these replicas: gloo connects them" in found["nccl"]
        assert "options='ring': give a distnb.CommunicationOptions" in found["word"]
        assert "bytes_per_pack=8 cannot be honoured by all_gather" in found["packed gather"]
        assert "implementation='RING' cannot be honoured" in found["refused"]
        assert "Seen()" in found["refused"]


def test_different_options_and_a_missing_replica_are_errors(tmp_path: Path) -> None:
    mixed = """
    import distnb
    def step():
        context = distnb.get_replica_context()
        given = distnb.CommunicationOptions(implementation=["auto", "ring"][context.replica_id_in_sync_group])
        context.all_reduce("sum", torch.ones(1), given)
    distnb.MirroredStrategy().run(step)
    """
    for rank in run_ranks(mixed, 2):
        assert rank.returncode == 1
        assert "CollectiveMismatchError" in rank.stderr
        assert "implementation" in rank.stderr
    late = """
    import distnb, time
    def step():
        context = distnb.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            context.all_reduce("sum", torch.ones(1), distnb.CommunicationOptions(timeout_seconds=0.5))
        while not os.path.exists(os.environ["ENDED"]):
            time.sleep(0.05)
    result = None
    try:
        distnb.MirroredStrategy().run(step)
    except distnb.errors.CollectiveError as error:
        result = str(error)
        open(os.environ["ENDED"], "w").close()
    """
    first = run_ranks(late, 2, env={"ENDED": str(tmp_path / "ended")})[0].check().result
    assert "did not end within the time limit of 0.5 s" in first
    assert "Not there yet: replica 1" in first
