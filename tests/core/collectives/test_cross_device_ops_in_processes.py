"""`cross_device_ops`: every algorithm gives the default's numbers, the same bits on all replicas, and never hangs."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.support.kernel import Notebook
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

_START = """
import os
import distnb
from distnb import HierarchicalCopyAllReduce, ReductionToOneDevice

if "APART" in os.environ:  # as on machines that share no memory
    from distnb.collectives.shared_memory.shared_sum import SharedSum
    SharedSum.of = classmethod(lambda cls, log: None)


class Ring(distnb.CrossDeviceOps):
    '''Every tensor goes round; replica 0's sum is everyone's.'''

    def __init__(self, num_packs=1):
        self.num_packs = num_packs
        self.sizes = []

    def reduce_implementation(self, op, tensor, replicas):
        self.sizes.append(tensor.numel())
        n, travelling, total = replicas.size, tensor, tensor.clone()
        for _ in range(n - 1):
            travelling = replicas.exchange(travelling, [(r, (r + 1) % n) for r in range(n)])
            total += travelling
        if op is distnb.ReduceOp.MEAN:
            total /= n
        return replicas.broadcast(total)


def add_up(tensors):
    return torch.stack(tensors).sum(0)


ALGORITHMS = {
    "tree": HierarchicalCopyAllReduce(),
    "tree, unpacked": HierarchicalCopyAllReduce(num_packs=0),
    "one device": ReductionToOneDevice(),
    "one device, own sum": ReductionToOneDevice("cpu", add_up),
    "own": Ring(2),
}
"""


@pytest.mark.parametrize(("n", "env"), [(2, {}), (3, {"APART": "1"})], ids=["in shared memory", "by sockets"])
def test_each_algorithm_computes_the_same_as_the_default(n: int, env: dict[str, str]) -> None:
    program = """
    import numpy as np

    DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.int64]
    SIZES = [(), (3, 5), (0, 4), (70_001,)]

    def values(rank, dtype):
        generator = torch.Generator().manual_seed(rank)
        made = [torch.randint(-50, 50, size, generator=generator) for size in SIZES]
        return [m.to(dtype) if not dtype.is_floating_point else (m / 7).to(dtype) for m in made]

    def everything(strategy):
        found = {}
        for dtype in DTYPES:
            for op in ("sum", "mean"):
                one = lambda: values(distnb.replica_id(), dtype)
                here = lambda: distnb.get_replica_context().all_reduce(op, one())
                alone = lambda: distnb.get_replica_context().all_reduce(op, one()[1].t())
                found[dtype, op, "all_reduce"] = strategy.local_results(strategy.run(here))[0]
                found[dtype, op, "alone"] = [strategy.local_results(strategy.run(alone))[0]]
                found[dtype, op, "reduce"] = strategy.reduce(op, strategy.run(one), axis=None)
                found[dtype, op, "axis"] = [strategy.reduce(op, strategy.run(lambda: one()[1]), axis=0)]
        # Python numbers, None, and gradients through it
        context = lambda: distnb.get_replica_context().all_reduce("mean", {"a": 2 * distnb.replica_id(), "b": None})
        found["numbers"] = strategy.local_results(strategy.run(context))[0]
        def through():
            x = torch.ones(3, dtype=torch.float64, requires_grad=True)
            (distnb.get_replica_context().all_reduce("sum", x) * (distnb.replica_id() + 1)).sum().backward()
            return x.grad
        found["gradient"] = [strategy.local_results(strategy.run(through))[0]]
        return found

    expected = everything(distnb.MirroredStrategy())
    size = distnb.MirroredStrategy().num_replicas_in_sync
    assert expected["numbers"] == {"a": size - 1.0, "b": None}
    assert expected["gradient"][0].tolist() == [size * (size + 1) / 2] * 3
    bits = []
    for name, ops in ALGORITHMS.items():
        found = everything(distnb.MirroredStrategy(cross_device_ops=ops))
        assert found.pop("numbers") == expected["numbers"]
        for case, tensors in found.items():
            for got, want in zip(tensors, expected[case], strict=True):
                assert (got.dtype, got.shape) == (want.dtype, want.shape), (name, case)
                assert torch.allclose(got, want, rtol=1e-2 if got.dtype.itemsize < 4 else 1e-6, atol=1e-5), (name, case)
                bits.append(got.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    result = bits
    """
    results = [rank.check().result for rank in run_ranks(_START + dedent(program), n, env=env, timeout_s=120)]
    assert all(result == results[0] for result in results)


def test_second_order_and_sparse_gradients_are_correct() -> None:
    program = """
    import warnings
    def grads(ops):
        strategy = distnb.MirroredStrategy(cross_device_ops=ops)
        with strategy.scope():
            torch.manual_seed(1)
            model = torch.nn.Linear(3, 2).double()
            table = torch.nn.Embedding(5, 2, sparse=True).double()
        def step():
            x = torch.full((2, 3), 1.0 + distnb.replica_id(), dtype=torch.float64)
            loss = model(x).square().sum() + table(torch.tensor([distnb.replica_id()])).sum()
            loss.backward()
            first = [model.weight.grad.clone(), table.weight.grad.to_dense()]
            model.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(x).pow(3).sum().backward(create_graph=True)
            (second,) = torch.autograd.grad(model.weight.grad.square().sum(), model.weight)
            return [*first, second]
        return strategy.local_results(strategy.run(step))[0]
    expected = grads(None)
    for name, ops in ALGORITHMS.items():
        for got, want in zip(grads(ops), expected, strict=True):
            assert torch.allclose(got, want, rtol=1e-12), name

    # An algorithm that rounds: messages of distnb other than the tensors must not be affected.
    class InHalfPrecision(distnb.CrossDeviceOps):
        def reduce_implementation(self, op, tensor, replicas):
            return replicas.all_reduce(tensor.half(), op).to(tensor.dtype)
    for got, want in zip(grads(InHalfPrecision()), expected, strict=True):
        assert torch.allclose(got, want, rtol=1e-2)
    strategy = distnb.MirroredStrategy(cross_device_ops=InHalfPrecision())
    for seed in range(20):  # of layouts
        total = strategy.reduce("sum", strategy.run(lambda: [torch.ones(seed), torch.ones(2, seed)]), axis=None)
        assert total[1].tolist() == [[2.0] * seed] * 2
    """
    for rank in run_ranks(_START + dedent(program), 2):
        rank.check()


def test_an_algorithm_that_fails_on_one_replica_ends_the_call_on_all() -> None:
    program = """
    seen = []
    def accumulate(tensors):
        seen.append(len(tensors))
        if len(seen) == 2:
            raise ZeroDivisionError("no sum today")
        return sum(tensors)
    strategy = distnb.MirroredStrategy(cross_device_ops=ReductionToOneDevice(accumulation_fn=accumulate))
    for _ in range(2):
        strategy.reduce("sum", strategy.run(lambda: torch.ones(3)), axis=None)
    """
    first, second, third = run_ranks(_START + dedent(program), 3)
    assert first.returncode == second.returncode == third.returncode == 1
    assert "ZeroDivisionError: no sum today" in first.stderr
    for other in (second, third):
        assert "CollectiveError: " in other.stderr  # about its error or its process's end, whichever is noticed first
    caught = """
    def refuse(tensors):
        raise ZeroDivisionError("no sum today")
    strategy = distnb.MirroredStrategy(cross_device_ops=ReductionToOneDevice(accumulation_fn=refuse))
    try:
        strategy.reduce("sum", strategy.run(lambda: torch.ones(3)), axis=None)
    except ZeroDivisionError:
        pass
    strategy.gather(strategy.run(lambda: torch.ones(3)), axis=0)
    """
    for rank in run_ranks(_START + dedent(caught), 2):
        assert "CollectiveMismatchError: The replicas called different collectives" in rank.stderr


def test_an_algorithm_that_does_not_communicate_is_detected() -> None:
    """Check that an algorithm without communication raises an error, and one that broadcasts its result does not."""
    program = """
    class Forgets(distnb.CrossDeviceOps):
        def reduce_implementation(self, op, tensor, replicas):
            return tensor * replicas.size
    rank = int(os.environ["RANK"])
    value = lambda: torch.ones(3) * (rank + 1)
    strategy = distnb.MirroredStrategy(cross_device_ops=Forgets())
    try:
        strategy.reduce("sum", strategy.run(value), axis=None)
    except distnb.errors.OptionError as error:
        result = str(error)
    strategy = distnb.MirroredStrategy(cross_device_ops=Ring())
    for _ in range(5):
        assert strategy.reduce("sum", strategy.run(value), axis=None).tolist() == [3.0] * 3
    """
    for rank in run_ranks(_START + dedent(program), 2):
        assert "Forgets.reduce_implementation returned another result on replica 1" in rank.check().result
        assert "replicas.all_reduce(tensor, op)" in rank.result


def test_mismatched_steps_are_detected() -> None:
    program = """
    rank = int(os.environ["RANK"])
    class Confused(distnb.CrossDeviceOps):
        def reduce_implementation(self, op, tensor, replicas):
            replicas.exchange(tensor, [(0, 1)] if replicas.rank == 0 else [(1, 0)])
            return tensor
    try:
        distnb.MirroredStrategy(cross_device_ops=Confused()).run(
            lambda: distnb.get_replica_context().all_reduce("sum", 1.0)
        )
    except distnb.errors.CollectiveMismatchError as error:
        result = str(error)
    """
    for rank in run_ranks(_START + dedent(program), 2):
        assert "distnb's exchange(float64[], root=0→1)" in rank.result, rank
        assert "distnb's exchange(float64[], root=1→0)" in rank.result
    shapes = """
    ones = torch.ones(2, 3) if os.environ["RANK"] == "0" else torch.ones(3, 2)
    strategy = distnb.MirroredStrategy(cross_device_ops=HierarchicalCopyAllReduce())
    try:
        strategy.reduce("sum", strategy.run(lambda: [ones, torch.ones(1)]), axis=None)
    except distnb.errors.CollectiveMismatchError as error:
        result = str(error)
    """
    for rank in run_ranks(_START + dedent(shapes), 2):
        assert "distnb's pack(float32[2, 3], float32[1])" in rank.result, rank
        assert "distnb's pack(float32[3, 2], float32[1])" in rank.result


def test_an_algorithm_can_use_devices_ranks_and_collectives() -> None:
    program = """
    from distnb.collectives.group.memberships import memberships
    replicas = group = memberships.join_from_env()
    rank, size = replicas.rank, replicas.size
    assert list(map(str, replicas.devices)) == ["cpu:0"] * 3
    for in_memory in (True, False):
        group.process_group.prefer(None, in_memory)
        own = (torch.arange(6.0) + rank).to(torch.bfloat16).reshape(2, 3).t()  # not contiguous, and not known to Gloo
        kept = own.clone()
        assert torch.equal(replicas.all_reduce(own.float()), sum((torch.arange(6.0) + r) for r in range(3)).reshape(2, 3).t())
        mean = replicas.reduce(own.double(), to=2, op="mean")
        assert (mean is None) == (rank != 2)
        if rank == 2:
            assert torch.equal(mean, (torch.arange(6.0) + 1).double().reshape(2, 3).t())
        parts = replicas.gather(own, to=1)
        assert (parts is None) == (rank != 1)
        for each in (parts or [], replicas.all_gather(own)):
            assert [part[0, 0].item() for part in each] in ([0, 1, 2], [])
            assert all(part.shape == (3, 2) and part.dtype is torch.bfloat16 for part in each)
        got = replicas.exchange(own, [(0, 2), (2, 0)])
        assert (got is None) == (rank == 1)
        if got is not None:
            assert torch.equal(got, kept + (2 if rank == 0 else -2))
        assert torch.equal(own, kept)
        assert replicas.broadcast(own.clone(), source=2)[0, 0] == 2
        for pairs in ([(0, 1), (0, 2)], [(0, 1), (2, 1)], [(1, 1)], [(0, 3)]):
            try:
                replicas.exchange(own, pairs)
            except ValueError:
                continue
            raise AssertionError(pairs)
    result = "done"
    """
    for rank in run_ranks(_START + dedent(program), 3):
        assert rank.check().result == "done"


def test_tensors_are_packed_into_few_messages() -> None:
    program = """
    from distnb.collectives.group.process_group import GuardedProcessGroup
    sent = []
    plain = GuardedProcessGroup.start_in_memory
    def noted(self, key, tensor, op, *rest, **named):
        sent.append(tensor.numel() * tensor.dtype.itemsize)
        return plain(self, key, tensor, op, *rest, **named)
    GuardedProcessGroup.start_in_memory = noted

    def messages(strategy, call):
        strategy.run(lambda: None)
        sent.clear()
        call(strategy)
        return list(sent)

    def reduced(strategy):
        values = strategy.run(lambda: [torch.full((10,), float(i)) for i in range(300)])
        for i, total in enumerate(strategy.reduce("sum", values, axis=None)):
            assert total.tolist() == [2.0 * i] * 10

    def trained(strategy):
        with strategy.scope():
            weights = [torch.nn.Parameter(torch.ones(10)) for _ in range(300)]
        def step():
            sum((i * weight).sum() for i, weight in enumerate(weights)).backward()
        strategy.run(step)
        sent.clear()
        strategy.run(step)
        assert weights[7].grad.tolist() == [2 * 2 * 7.0] * 10

    options = distnb.CommunicationOptions
    multi = lambda **given: distnb.MultiWorkerMirroredStrategy(communication_options=options(**given))
    ring = Ring(4)
    mirrored = distnb.MirroredStrategy(cross_device_ops=ring)
    messages(mirrored, reduced)
    packs, ring.sizes = ring.sizes, []
    messages(mirrored, trained)
    result = {
        "default": [len(messages(multi(), call)) for call in (reduced, trained)],
        "1000 bytes": [len(messages(multi(bytes_per_pack=1000), call)) for call in (reduced, trained)],
        "1 byte": [len(messages(multi(bytes_per_pack=1), call)) for call in (reduced, trained)],
        "4 packs": [packs, len(ring.sizes)],
    }
    """
    for rank in run_ranks(_START + dedent(program), 2, env={"TF_CONFIG": ""}):
        counts = rank.check().result
        assert counts["default"] == [1, 1]
        # 300 tensors of 10 numbers are sent as float64 in reduce, and as float32 as gradients: over 1000 bytes each.
        assert counts["1000 bytes"] == [-(-300 // 13), -(-300 // 26)]
        assert counts["1 byte"] == [300, 300]
        assert counts["4 packs"] == [[750] * 4, 2 * 4]


@pytest.mark.timeout(150)
def test_algorithm_objects_travel_from_a_notebook_to_its_engines(notebook: Notebook) -> None:
    notebook.run(
        "import distnb, torch\nFACTOR = 1\n"
        "class Mine(distnb.CrossDeviceOps):\n"
        "    def __init__(self): self.calls = 0\n"
        "    def reduce_implementation(self, op, tensor, replicas):\n"
        "        self.calls += 1\n"
        "        return FACTOR * replicas.all_reduce(tensor, op)\n"
        "mine = Mine()\n"
        "chosen = distnb.MirroredStrategy(cross_device_ops=mine)\n"
        "tree = distnb.MirroredStrategy(cross_device_ops=distnb.HierarchicalCopyAllReduce())"
    )
    for name in ("chosen", "tree"):
        notebook.run(f"%%distribute {name}\nwith strategy.scope():\n    w = torch.nn.Parameter(torch.ones(2))")
        # Another cell, and a call. Both need the same strategy, or its variable would belong to another one.
        notebook.run(
            f"%%distribute {name}\ndef step():\n    (w * (distnb.replica_id() + 1)).sum().backward()\n"
            "strategy.run(step)\ngradient = sum(w.grad.tolist())"
        )
        assert notebook.value("gradient") == 6.0
        total = f"{name}.reduce('sum', {name}.run(lambda: torch.ones(2)), axis=None).numpy().tolist()"
        assert notebook.value(total) == [2.0, 2.0]
    notebook.run("%%distribute chosen\ncalls = strategy.spec.option('cross_device_ops').calls")
    assert notebook.value("calls") == 2  # the gradient of one cell, the call after it
    assert notebook.value(
        "[distnb.MirroredStrategy(cross_device_ops=distnb.HierarchicalCopyAllReduce()) is tree, "
        "distnb.MirroredStrategy(cross_device_ops=mine) is chosen]"
    ) == [True, True]
    failed = notebook.try_run("distnb.MirroredStrategy(cross_device_ops=distnb.NcclAllReduce())")
    assert failed.error_name == "OptionError"
    assert "needs a GPU of its own for each replica, and the replicas have cpu:0, cpu:1" in failed.error_text
    failed = notebook.try_run(
        "import threading\nlocked = Mine()\nlocked.lock = threading.Lock()\n"
        "distnb.MirroredStrategy(cross_device_ops=locked)"
    )
    assert "cannot be sent to the replicas" in failed.error_text
    notebook.run(
        "def failing(tensors): raise ZeroDivisionError('no sum today')\n"
        "bad = distnb.MirroredStrategy(cross_device_ops=distnb.ReductionToOneDevice('cpu:1', failing))"
    )
    for cell in ("%%distribute bad\n", ""):
        failed = notebook.try_run(cell + "bad.reduce('sum', bad.run(lambda: torch.ones(2)), axis=None)")
        assert failed.error_name == "ZeroDivisionError"
    assert notebook.value(total) == [2.0, 2.0]
