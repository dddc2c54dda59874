"""Rulings on differences from TensorFlow, on real replicas, with one program for many of them."""

from __future__ import annotations

import pytest

from tests.core.strategies.test_semantics import joined, ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

_PROGRAM = """
import warnings
def error_of(call):
    try:
        return call()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"

def mine(value):
    return strategy.local_results(value)[0]

# Components of unlike kinds
ids = strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
unlike = [run(lambda c: [torch.ones(2), None, "text", 3][c], ids) for _ in range(3)]
result["unlike"] = unlike[0]
result["every time"] = [type(mine(one)).__name__ for one in unlike]
result["passed on"] = mine(run(lambda x: type(x).__name__, unlike[0]))
result["refused"] = [error_of(lambda: strategy.reduce("sum", unlike[0], None)), error_of(lambda: strategy.gather(unlike[0], 0))]
made = strategy.distribute_values_from_function(lambda c: None if c.replica_id_in_sync_group else torch.ones(1))
result["made"] = error_of(lambda: strategy.reduce("sum", made, axis=0))
result["structures"] = error_of(
    lambda: strategy.distribute_values_from_function(lambda c: [1] if c.replica_id_in_sync_group else (1, 2)))
result["afterwards"] = float(strategy.reduce("sum", run(lambda: torch.ones(())), axis=None))

# Sums, weights, scalars
whole = run(lambda: torch.tensor([1, 2], dtype=torch.int32))
result["dtypes"] = [str(strategy.reduce("sum", whole, axis).dtype) for axis in (None, 0, -1)]
weigh = distnb.nn.compute_average_loss
result["weighted"] = float(strategy.reduce("sum", run(
    lambda: weigh(torch.tensor([1.0, 2.0]), torch.tensor([[1.0], [2.0]]), global_batch_size=2 * n)), None))
result["scalars"] = [mine(one) for one in strategy.distribute_datasets_from_function(lambda context: range(3))]

# Metrics read in run
with strategy.scope():
    mean = distnb.metrics.Mean(name="loss")
    accuracy = distnb.metrics.BinaryAccuracy()
def measure():
    mean.update_state([10.0] if distnb.replica_id() else [1.0, 2.0, 3.0])
    accuracy.update_state([1, 0], [0.9, 0.2] if distnb.replica_id() else [0.9, 0.8])
    return mean.result()
result["mean"] = [float(mine(run(measure))), float(mean.result())]
result["accuracy"] = float(accuracy.result())
accuracy.reset_state()
accuracy.update_state(run(lambda: torch.tensor([1, 0])), run(lambda: torch.tensor([0.9, 0.1])))
result["outside"] = float(accuracy.result())

# Rows of variables
with strategy.scope():
    rows = {how: distnb.Variable([1.0, 1.0, 1.0], aggregation=how) for how in ("sum", "mean", "only_first_replica", "none")}
    own = distnb.Variable([0.0, 0.0], synchronization="on_read", aggregation="sum")
def change(method, how):
    def both():
        run(lambda c: getattr(rows[how], method)([0, 1 + c], float(c + 1)), ids)
        return rows[how].tolist()
    return error_of(both)
result["rows"] = {how: change("scatter_add", how) for how in ("sum", "mean", "only_first_replica", "none")}
result["update"] = [change("scatter_update", how) for how in ("only_first_replica", "sum")]
result["times"] = [change("scatter_mul", how) for how in ("sum", "mean")]
run(lambda c: own.scatter_add([c], [2.0]), ids)
result["own"] = [own.tolist(), error_of(lambda: own.scatter_add([0], [1.0]))]
result["from outside"] = rows["none"].scatter_max([2], 5.0).tolist()
strategy.assert_in_sync(list(rows.values()))

# Batches of a loader that was not distributed
from torch.utils.data import DataLoader, TensorDataset
x = torch.arange(8.0)
def notices(fn, loader, given=lambda batch: batch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            run(fn, given(batch))
    return [str(each.message)[:60] for each in caught]
plain = DataLoader(TensorDataset(x), batch_size=4)
result["by rank"] = notices(lambda batch: None, DataLoader(TensorDataset(x + me), batch_size=4))
result["distributed"] = notices(lambda batch: None, strategy.distribute_dataset(plain))
result["constants"] = notices(lambda batch: None, [torch.ones(4)] * 2)
result["as a component"] = notices(lambda batch: None, plain, lambda batch: per_replica(*[batch[0]] * n))
result["whole batches"] = notices(lambda batch: None, plain)

# Algorithms used by themselves
value = run(lambda c: torch.tensor([1, 2]) + c, ids)
for ops in (distnb.ReductionToOneDevice(), distnb.HierarchicalCopyAllReduce(num_packs=2)):
    result[type(ops).__name__] = [
        ops.reduce("sum", value, destinations=value).tolist(),
        [one.tolist() for one in ops.batch_reduce(distnb.ReduceOp.MEAN, [(value, "cpu:0"), (ids, value)])],
        ops.broadcast(value).tolist(),
        error_of(lambda: ops.reduce("sum", value, destinations="cuda:3")),
        error_of(lambda: ops.reduce("max", value)),
        error_of(lambda: ops.reduce("sum", unlike[0])),
    ]

# A strategy that is set
distnb.set_strategy(strategy)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 100.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
def step(c):
    (model.weight * (c + 1)).sum().backward()
    optimizer.step()
run(step, ids)
result["set"] = [distnb.has_strategy(), float(model.weight.detach()), run(lambda: distnb.get_replica_context().devices)]
distnb.set_strategy(None)
result["unset"] = distnb.has_strategy()
"""


def test_rulings_hold_on_two_replicas() -> None:
    ended = ranks(_PROGRAM, 2)
    for rank, found in enumerate(one.result for one in ended):
        assert found["every time"] == [["Tensor", "NoneType"][rank]] * 3
        assert found["passed on"] == ["Tensor", "NoneType"][rank]
        for text, method in zip(found["refused"], ("reduce", "gather"), strict=True):
            assert text.startswith(f"DistributedValueError: {method} got a PerReplica"), text
            assert "replica 0 holds a tensor; replica 1 holds None" in text
        assert "replica 0 holds a tensor; replica 1 holds None" in found["made"]
        assert found["structures"].startswith("StructureError")
        assert found["afterwards"] == 2.0
        assert found["dtypes"] == ["torch.int32"] * 3
        assert found["weighted"] == 2.5
        assert found["scalars"] == [[0, 2], [1, None]][rank]
        assert found["mean"] == [4.0, 4.0]
        assert (found["accuracy"], found["outside"]) == (0.75, 1.0)
        assert found["rows"]["sum"] == [4.0, 2.0, 3.0]
        assert found["rows"]["mean"] == [2.5, 1.5, 2.0]
        assert found["rows"]["only_first_replica"] == [2.0, 2.0, 1.0]
        assert "does not say" in found["rows"]["none"] or "not defined" in found["rows"]["none"]
        assert found["update"][0] == [1.0, 1.0, 1.0]
        assert "aggregation='SUM'" in found["update"][1]
        assert found["times"][0] == [8.0, 2.0, 6.0]
        assert "aggregation='MEAN'" in found["times"][1]
        assert found["own"][0] == [2.0, 2.0]
        assert "cross-replica context" in found["own"][1]
        assert found["from outside"] == [1.0, 1.0, 5.0]
        for name in ("ReductionToOneDevice", "HierarchicalCopyAllReduce"):
            assert found[name][:3] == [[3, 5], [[1.5, 2.5], 0.5], [1, 2]]
            assert "no replica computes there" in found[name][3]
            assert "'MAX'" in found[name][4].upper()
            assert "replica 1 holds None" in found[name][5]
        assert len(found["whole batches"]) == 1
        assert "strategy.run was given a batch of a DataLoader" in found["whole batches"][0]
        assert [found[name] for name in ("by rank", "distributed", "constants", "as a component")] == [[]] * 4
        assert found["set"] == [True, 97.0, ("cpu:0",)]
        assert found["unset"] is False
    assert "<None on replica 1>" in repr(ended[0].result["unlike"])
    assert joined([one.result["unlike"] for one in ended])[1] is None
