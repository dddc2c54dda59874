"""n replicas on the same global batches give one replica's numbers; with scopes, randomness and metrics."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

from tests.support.ranks import Rank, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


def ranks(program: str, n: int, prelude: str = "import distnb\nstrategy = distnb.MirroredStrategy()\n") -> list[Any]:
    ended: list[Rank] = run_ranks(prelude + textwrap.dedent(program), n, timeout_s=120)
    return [rank.check().result for rank in ended]


def test_scope_makes_replicas_equal() -> None:
    program = """
    import copy
    torch.manual_seed(distnb.replica_id())  # what must not matter
    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 2)  # made by deepcopy
            self.norm = torch.nn.BatchNorm1d(8)
            self.register_buffer("noise", torch.randn(3))
    with strategy.scope():
        deep = Deep()
        alone = torch.nn.Parameter(torch.randn(2))
        twin = copy.deepcopy(deep)
        half = torch.nn.Linear(2, 2).to(torch.bfloat16)
        lazy = torch.nn.LazyLinear(2)
        frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    for each in (deep, alone, twin, half, frozen):
        strategy.assert_in_sync(each)
    def use():
        return lazy(torch.ones(1, 3)).detach()
    strategy.run(use)
    strategy.assert_in_sync(lazy)
    from distnb.collectives.gradients.parameter_groups import find_mirror
    every = [*deep.parameters(), alone, *twin.parameters(), *half.parameters(), *lazy.parameters()]
    result = all(map(find_mirror, every))
    from distnb.runtime.scopes.mirrored_objects import is_mirrored as made
    assert made(deep) and made(alone) and made(torch.optim.SGD(deep.parameters(), lr=1))
    assert not made(torch.nn.Linear(1, 1))
    assert not made(torch.nn.ReLU()) and torch.nn.Parameter.__new__.__qualname__ == "Parameter.__new__"
    with strategy.scope():
        strategy.reduce("mean", 1, None)
        extra = torch.nn.Linear(8, 1)
        deep.head = extra
    strategy.assert_in_sync(deep)
    """
    assert ranks(program, 2) == [True, True]


def test_a_scope_that_differs_or_fails_is_an_error() -> None:
    program = """
    result = []
    try:
        with strategy.scope():
            torch.nn.Linear(2, 2)
            raise KeyError("x")
    except KeyError:
        pass
    kept = []
    try:
        with strategy.scope():
            kept.append(torch.nn.Linear(2, 2 + distnb.replica_id()))
    except Exception as error:
        result = type(error).__name__, str(error)
    options = [{"check_mean_loss": False}, {"gradient_reduction": "mean"}]
    mine = distnb.MirroredStrategy(**options[distnb.replica_id()])
    try:
        with mine.scope():
            kept.append(torch.nn.Linear(2, 2))
    except Exception as error:
        result = *result, type(error).__name__, str(error)
    """
    for name, text, other, arguments in ranks(program, 2):
        assert name == other == "StructureError"
        assert "Linear.weight, float32[2, 2]" in text
        assert "float32[3, 2]" in text
        assert "replica 0: mirrored(check_mean_loss=False)" in arguments
        assert "replica 1: mirrored(gradient_reduction='mean')" in arguments
        assert "the same arguments on every replica and on every machine" in arguments


def test_a_scope_on_one_replica_alone_is_an_error() -> None:
    program = """
    try:
        if distnb.is_chief():
            with strategy.scope():
                torch.nn.Linear(2, 2)
        torch.distributed.barrier()
    except distnb.errors.CollectiveMismatchError as error:
        result = str(error)
    """
    for text in ranks(program, 2):
        assert "replica 0 called strategy.scope() at" in text
        assert "replica 1 called barrier() at" in text
        assert "Enter strategy.scope() on all replicas" in text


def test_assert_in_sync_names_the_element_and_the_replica() -> None:
    program = """
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        if distnb.replica_id() == 1:
            model[1].weight[0, 1] = 0.75
    result = []
    for value in (model, {"a": torch.ones(2), "b": distnb.replica_id()}, torch.ones(1 + distnb.replica_id())):
        try:
            strategy.assert_in_sync(value)
        except AssertionError as error:
            result.append(str(error))
    strategy.assert_in_sync([float("nan"), torch.tensor(float("nan")), "text", None])
    """
    for model, tree, shapes in ranks(program, 2):
        assert "1.weight" in model
        assert "replica 1: 1 of 2 elements, the first at [0, 1]: 0.75, where replica 0 has 0.5" in model
        assert "1 of 4 differ" in model
        assert "['b']: replica 1: 1, where replica 0 has 0" in tree
        assert "float32[1]" in shapes
        assert "float32[2]" in shapes


def test_replicas_have_a_shared_and_a_separate_random_stream() -> None:
    program = """
    import random
    import numpy as np
    def draw():
        return [torch.rand(1).item(), random.random(), random.gauss(0, 1), float(np.random.rand()), np.random.randn()]
    def merged():
        return distnb.get_replica_context().merge_call(lambda s: torch.rand(1).item())
    shared, own = [], []
    shared.append(draw())  # replica 0's generators, though each process was started with its own
    for again in range(2):
        torch.manual_seed(0)
        shared.append(draw())
        for _ in range(2):
            strategy.run(lambda: own.append(draw()))
        shared.append(draw())
        strategy.run(lambda: own.append(draw()))
        strategy.run(lambda: own.append([torch.rand(1).item(), merged()]))
        shared.append(draw())
    result = shared, own
    """
    found = ranks(program, 3)
    shared = [one[0] for one in found]
    assert shared[0] == shared[1] == shared[2]
    own = [one[1] for one in found]
    for replica in range(3):
        assert [draws[0] for draws in own[replica][:4]] == [draws[0] for draws in own[replica][4:]]  # seeded alike
        assert len({draws[0] for draws in own[replica]}) == 4
        assert [draws[1:] for draws in own[replica]] == [
            draws[1:] for draws in own[0]
        ]  # only torch's streams are folded
        for other in range(replica):
            assert all(mine[0] != theirs[0] for mine, theirs in zip(own[replica], own[other], strict=True))
    # The shared stream equals that of a program without replicas.
    torch.manual_seed(0)
    expected = [torch.rand(1).item() for _ in range(2)]
    assert [shared[0][1][0], shared[0][2][0]] == expected


def test_modules_made_outside_a_scope_are_refused() -> None:
    program = """
    import torch.nn.functional as F
    model = torch.nn.Linear(1, 1)
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    criterion = torch.nn.MSELoss()
    x = torch.ones(1, 1)
    class Trainer:
        def __init__(self, model):
            self.inner = {"model": model}
        def step(self):
            return self.inner["model"](x)
    def helper():
        return model(x)
    def by_helper():
        return helper()
    def by_closure():
        local = model
        return lambda: local(x)
    def hidden():
        optimizer = torch.optim.SGD(globals()["mo" + "del"].parameters(), lr=1.0)
        optimizer.step()
    with strategy.scope():
        made = torch.nn.Linear(1, 1)
    other = distnb.MirroredStrategy(gradient_reduction="mean")
    result = []
    by_argument = lambda m: m(x)
    for fn, args in ((helper, ()), (by_helper, ()), (by_closure(), ()), (Trainer(model).step, ()),
                     (by_argument, (model,)), (hidden, ())):
        try:
            strategy.run(fn, args)
            result.append(None)
        except RuntimeError as error:
            result.append(str(error))
    try:
        other.run(lambda: made(x))
    except RuntimeError as error:
        result.append(str(error))
    strategy.run(lambda: criterion(frozen(x), made(x)))
    strategy.run(Trainer(made).step)
    helper()  # the top level of a cell is left alone
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    """
    for texts in ranks(program, 2):
        assert all(text is not None and "strategy.scope()" in text for text in texts[:6]), texts
        assert "Mixing different Strategy objects" in texts[6]


@pytest.mark.parametrize("when", ["", pytest.param("import torchmetrics", marks=pytest.mark.soak), "distnb.metrics"])
def test_metrics_of_a_scope_count_all_replicas(when: str) -> None:
    program = """
    with strategy.scope():
        import torchmetrics
        mean = distnb.metrics.Mean(name="loss")
        accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")
        auroc = torchmetrics.classification.BinaryAUROC()
        both = torchmetrics.MetricCollection({"sum": torchmetrics.SumMetric(), "max": torchmetrics.MaxMetric()})
    outside = torchmetrics.SumMetric()
    seen = []
    def step(x):
        mean.update_state(x)
        accuracy.update(torch.ones_like(x, dtype=torch.long), torch.arange(len(x)) % 3)
        if len(x):
            auroc.update(torch.linspace(0.0, 1.0, len(x)), torch.arange(len(x)) % 2)
            both.update(x)
        seen.append(float(mean.result()))  # of all replicas
    batches = strategy.distribute_dataset(torch.arange(8.0), batch_size=5)
    for batch in batches:
        strategy.run(step, args=(batch,))
    values = strategy.distribute_values_from_function(lambda c: torch.tensor(float(c.replica_id_in_sync_group)))
    result = {"mean": float(mean.result()), "accuracy": float(accuracy.compute()), "auroc": float(auroc.compute()),
              "both": {k: float(v) for k, v in both.compute().items()}, "seen": seen[-1], "again": float(mean.result())}
    mean.reset_state()
    mean.update(values)
    result["direct"] = float(mean.result())
    try:
        mean.update_state(3.0)
    except RuntimeError as error:
        result["error"] = str(error)
    strategy.assert_in_sync(torch.tensor(result["mean"]))
    """
    # Slices of 5 over 2: 3 and 2; of 3: 2 and 1.
    for rank, found in enumerate(
        ranks(textwrap.dedent(program), 2, f"import distnb\nstrategy = distnb.MirroredStrategy()\n{when}\n")
    ):
        assert found["mean"] == found["again"] == 3.5
        right = sum(1 for size in ((3, 2) if rank == 0 else (2, 1)) for i in range(size) if i % 3 == 1)
        assert right
        assert found["accuracy"] == (1 + 1 + 1 + 0) / 8
        assert found["both"] == {"sum": 28.0, "max": 7.0}
        assert found["seen"] == 3.5
        assert found["direct"] == 0.5
        assert "strategy.run" in found["error"]


def test_compute_average_loss_uses_the_global_batch() -> None:
    program = """
    nn = distnb.nn
    losses = torch.tensor([1.0, 2.0, 3.0, 6.0])
    batches = strategy.distribute_dataset(losses, batch_size=3)
    result = {}
    def total(*args):
        return float(strategy.reduce("sum", strategy.run(nn.compute_average_loss, args), None))
    result["batches"] = [total(batch) for batch in batches]
    uneven = distnb.PerReplica([losses[:3], losses[3:]])
    result["uneven"] = total(uneven)
    weights = distnb.PerReplica([torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5])])
    result["weighted"] = total(uneven, weights)
    result["explicit"] = total(uneven, None, 6)
    shares = strategy.run(lambda: nn.scale_regularization_loss(torch.ones(3)))
    result["regularization"] = float(strategy.reduce("sum", shares, None))
    empty = distnb.PerReplica([torch.empty(0), torch.empty(0)])
    result["empty"] = [float(x) for x in strategy.local_results(strategy.run(nn.compute_average_loss, (empty,)))]
    def fail(call):
        try:
            call()
        except Exception as error:
            return isinstance(error, (ValueError, RuntimeError)), str(error)
    with strategy.scope():
        result["cross"] = [fail(lambda: f(losses)) for f in (nn.compute_average_loss, nn.scale_regularization_loss)]
        result["allowed"] = float(nn.compute_average_loss(losses, global_batch_size=4))
    for batch in strategy.distribute_dataset(losses, batch_size=4):
        result["tokens"] = fail(lambda: strategy.run(lambda x: nn.compute_average_loss(torch.ones(7)), (batch,)))
    """
    for found in ranks(program, 2):
        assert found["batches"] == [2.0, 6.0]
        assert found["uneven"] == 3.0
        assert found["weighted"] == 1.75
        assert found["explicit"] == 2.0
        assert found["regularization"] == 3.0
        assert found["empty"] == [0.0]
        assert all(fail[0] and "cross-replica" in fail[1] for fail in found["cross"])
        assert found["allowed"] == 3.0
        assert found["tokens"][0]
        assert "global_batch_size=" in found["tokens"][1]


def test_the_strategy_must_fit_the_program() -> None:
    program = """
    result = []
    for make in (lambda: distnb.MirroredStrategy(["cpu:0"]), lambda: distnb.MirroredStrategy(num_gpus=2)):
        try:
            make().num_replicas_in_sync
        except ValueError as error:
            result.append(str(error))
    result.append(distnb.MirroredStrategy(["cpu:0", "cpu:0"], oversubscribe=True).num_replicas_in_sync)
    """
    for one, gpus, count in ranks(program, 2, "import distnb\n"):
        assert "2 replica(s)" in one
        assert "cuda:1" in gpus
        assert count == 2
