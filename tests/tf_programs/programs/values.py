"""Seed 001, the methods of a strategy: values made by a function, run, local results, reduce, gather, scope."""

import numpy as np
import torch

import distnb

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "mirrored_4", "central_2", "multi_worker_2", "tpu_2")
n = strategy.num_replicas_in_sync


def made(value_fn):
    return strategy.distribute_values_from_function(value_fn)


# Which replicas have their components here: all in a notebook, one in a script.
ids = made(lambda context: context.replica_id_in_sync_group)
here = strategy.local_results(ids)
assert set(here) <= set(range(n))


def check(value, expected):
    """Check that the components in this process are the expected ones, by replica."""
    components = strategy.local_results(value)
    assert len(components) == len(here)
    for replica, component in zip(here, components, strict=True):
        assert torch.equal(torch.as_tensor(component), torch.as_tensor(expected[replica])), (value, expected)


# distribute_values_from_function: constants, parts of an array by replica, numbers of replicas.
array = np.array([3.0, 2.0, 1.0, 0.0])
check(made(lambda context: torch.tensor(1.0)), [1.0] * n)
check(made(lambda context: array[context.replica_id_in_sync_group]), torch.from_numpy(array))
check(made(lambda context: context.num_replicas_in_sync), [n] * n)
placed = [torch.ones((), device=torch.device(device)) for device in strategy.worker_devices]
check(made(lambda context: placed[context.replica_id_in_sync_group]), [1.0] * n)
assert strategy.local_results(5) == (5,)

# run: a constant, a distributed value, a collective inside.
check(strategy.run(lambda x: x * 2, args=(torch.tensor(3.0),)), [6.0] * n)
doubled = strategy.run(lambda x: x * 2, args=(made(lambda context: context.num_replicas_in_sync),))
assert doubled == 2 * n  # equal on all replicas, hence one value: 4 on two
ranks = made(lambda context: torch.tensor(context.replica_id_in_sync_group))
check(
    strategy.run(lambda x: distnb.get_replica_context().all_reduce("sum", x), args=(ranks,)),
    [n * (n - 1) // 2] * n,  # 1 on two
)


# reduce: what step functions return.
def step():
    return torch.tensor(distnb.get_replica_context().replica_id_in_sync_group)


assert strategy.reduce("SUM", strategy.run(step), axis=None).item() == n * (n - 1) // 2


def part(count):
    """Return examples 0 … count-1, four per replica until there are no more."""
    return made(lambda context: torch.arange(count)[4 * context.replica_id_in_sync_group :][:4].double())


reduced = [strategy.reduce(op, part(4 * n), axis=0).item() for op in ("sum", "mean")]
assert reduced == [sum(range(4 * n)), (4 * n - 1) / 2]
if n == 2:
    assert strategy.reduce("sum", part(8), axis=None).tolist() == [4, 6, 8, 10]
    assert strategy.reduce("sum", part(8), axis=0).item() == 28
    # A last batch of six: [0, 1, 2, 3] and [4, 5]. The mean is over six, and not of the replicas' means.
    assert strategy.reduce(distnb.ReduceOp.SUM, part(6), axis=0).item() == 15
    assert strategy.reduce(distnb.ReduceOp.MEAN, part(6), axis=0).item() == 2.5

# gather: columns, and (1, 2, 3) along each of its axes.
columns = made(lambda context: torch.tensor([[1], [2]]))
assert strategy.gather(columns, axis=0).tolist() == [[1], [2]] * n
single = torch.arange(6).reshape(1, 2, 3)
for axis, shape in enumerate([(n, 2, 3), (1, 2 * n, 3), (1, 2, 3 * n)]):
    gathered = strategy.gather(made(lambda context: single.clone()), axis=axis)
    assert gathered.shape == shape
    assert torch.equal(gathered, torch.cat([single] * n, dim=axis))

# scope: what is made in it is mirrored; the strategy is the current one.
assert distnb.get_strategy() is not strategy or strategy.kind == "default"
with strategy.scope():
    assert distnb.get_strategy() is strategy
    mirrored = torch.nn.Parameter(torch.tensor(1.0))
    assert distnb.in_cross_replica_context() == (strategy.kind != "default")
regular = torch.nn.Parameter(torch.tensor(1.0))
strategy.assert_in_sync(mirrored)
check(strategy.run(lambda: mirrored.detach() + 1), [2.0] * n)
assert regular.item() == 1.0
result = "as the page says"
