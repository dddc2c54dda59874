"""Seed 001, "scope": the result of an assignment by every replica, for every kind of variable.

All begin with 10; replica r supplies r + 1. On two, SUM adds 3, MEAN 1.5, ONLY_FIRST_REPLICA 1.
"""

import torch

import distnb

AGGREGATIONS = ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE")
n, me = strategy.num_replicas_in_sync, distnb.replica_id()
alone = strategy.kind in ("default", "one_device")  # both settings are without effect
once = strategy.kind == "central_storage"  # ON_READ behaves as ON_WRITE


def combined(aggregation, supplied):
    """Return the combination of these values, one of each replica."""
    return {"SUM": sum(supplied), "MEAN": sum(supplied) / n, "ONLY_FIRST_REPLICA": supplied[0]}[aggregation]


def refused(call, kind, *words):
    try:
        call()
    except kind as error:
        return all(word in str(error) for word in words)
    return False


def variable(*args, **options):
    with strategy.scope():
        return distnb.Variable(*args, **options)


def supply(method, v):
    getattr(v, method)(distnb.replica_id() + 1.0)
    return float(v)


METHODS = {"assign": lambda x: x, "assign_add": lambda x: 10 + x, "assign_sub": lambda x: 10 - x}
for synchronization in ("AUTO", "ON_WRITE", "ON_READ"):
    for aggregation in AGGREGATIONS:
        for method, applied in METHODS.items():
            v = variable(10.0, synchronization=synchronization, aggregation=aggregation)
            case = (synchronization, aggregation, method)
            if alone:
                assert strategy.run(supply, args=(method, v)) == float(v) == applied(1), case
                continue
            supplied = [r + 1.0 for r in range(n)]
            if synchronization == "ON_READ" and not once:
                seen = strategy.run(supply, args=(method, v))
                [component, *_] = strategy.local_results(seen)
                components = [applied(each) for each in supplied]
                assert component == components[me], case
                if aggregation == "NONE":
                    assert refused(lambda v=v: float(v), RuntimeError, "local_results"), case
                else:
                    assert float(v) == combined(aggregation, components), case
            elif aggregation == "NONE":
                step = (supply, (method, v))
                assert refused(lambda step=step: strategy.run(*step), ValueError, "aggregation='sum'"), case
                assert float(v) == 10, case
            else:
                expected = applied(combined(aggregation, supplied))
                assert strategy.run(supply, args=(method, v)) == float(v) == expected, case

# In cross-replica context a value is the whole variable's.
mirrored = variable([1.0, 2.0], aggregation="sum")
assert mirrored.assign(2.0).tolist() == [2.0, 2.0]
total = variable(0.0, synchronization="on_read", aggregation="sum")
assert float(total.assign(2.0 * n)) == 2 * n
count = variable(0, synchronization="on_read", aggregation="sum")
assert int(count.assign(6 * n)) == 6 * n
mean = variable(1.0, synchronization="on_read", aggregation="mean")
assert float(mean.assign(6.0)) == 6
if not alone and not once:
    [component, *_] = strategy.local_results(strategy.run(lambda: float(total)))
    assert component == 2
    assert int(count.assign(6 * n + 1)) == 6 * n + 1
    [component, *_] = strategy.local_results(strategy.run(lambda: int(count)))
    assert component == 6 + (me == 0)  # replica 0 has the remainder
    assert refused(lambda: total.assign_add(2.0), RuntimeError, "cross-replica context")
if n > 1:
    supplied = strategy.distribute_values_from_function(lambda context: torch.zeros(2))
    assert refused(lambda: mirrored.assign(supplied), TypeError, "strategy.reduce"), strategy

# What makes no sense, whatever the strategy.
for options, word in (
    ({"synchronization": "NONE"}, "NONE"),
    ({"synchronization": "SOMETIMES"}, "SOMETIMES"),
    ({"aggregation": "MAX"}, "MAX"),
    ({"aggregation": "MEAN", "dtype": torch.int64}, "int64"),
):
    assert refused(lambda options=options: variable(1, **options), ValueError, word), options

# Made late: in run, in a lazy module's first forward, where a checkpoint is restored. Replica 0's values are all's.
late = strategy.run(lambda: distnb.Variable(distnb.replica_id() + 5.0, aggregation="mean"))
assert float(late) == 5
with strategy.scope():
    lazy, restored = torch.nn.LazyLinear(2), torch.nn.LazyLinear(2)
strategy.run(lambda: lazy(torch.full((1, 3), distnb.replica_id() + 1.0)))
restored.load_state_dict({name: each.detach().clone() for name, each in lazy.state_dict().items()})
optimizer = torch.optim.SGD([*lazy.parameters(), *restored.parameters()], lr=1.0)
before = lazy.bias.detach().clone()


def step():
    optimizer.zero_grad()
    for each in (lazy, restored):
        ((distnb.replica_id() + 1) * each(torch.ones(1, 3))).sum().backward()
    optimizer.step()


strategy.run(step)
strategy.assert_in_sync([lazy, restored, optimizer, late])
for each in (lazy, restored):
    assert torch.allclose(each.bias.detach(), before - n * (n + 1) / 2)


# In torch's operations and autograd; as an attribute of a module; saved, and restored into fresh ones.
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = distnb.Variable([1.0, 2.0])
        self.steps = distnb.Variable(0, aggregation="only_first_replica")
        self.seen = distnb.Variable(0.0, synchronization="on_read", aggregation="sum")

    def forward(self, x):
        self.steps.assign_add(1)
        self.seen.assign_add(x)
        return (self.weight * x).sum()


def train(model, steps):
    optimizer = torch.optim.SGD([model.weight], lr=1.0)

    def step():
        optimizer.zero_grad()
        model(torch.tensor(1.0)).backward()
        optimizer.step()

    for _ in range(steps):
        strategy.run(step)


with strategy.scope():
    model, another = Model(), Model()
train(model, 2)
per_step = 1 if alone else n
saved = {name: each.tolist() for name, each in model.state_dict().items()}
assert saved == {"weight": [1.0 - 2 * n, 2.0 - 2 * n], "steps": 2, "seen": 2.0 * per_step}
another.load_state_dict({name: torch.tensor(each) for name, each in saved.items()})
train(another, 1)
assert another.weight.tolist() == [1.0 - 3 * n, 2.0 - 3 * n]
assert (int(another.steps), float(another.seen)) == (3, 3.0 * per_step)
result = "as the table says"
