"""Sparse gradients and tensors over the replicas; options of single calls of all_reduce or all_gather."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


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
