"""A training that a cluster's size must not change, and its numbers in one process."""

from __future__ import annotations

from typing import Any

import torch

import distnb

# Most tests do without optimizers and metrics, because of these imports.
MAKE = """
torch.manual_seed(7)
data = torch.utils.data.TensorDataset(torch.rand(96, 5), torch.rand(96, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    count = distnb.Variable(0.0, aggregation="sum", synchronization="on_read", trainable=False)
    mean = distnb.Variable(0.0, aggregation="mean", synchronization="on_read", trainable=False)
def note(error):
    pass
def descend():
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
def step(batch):
    x, y = batch
    error = (model(x) - y).square().sum(1)
    loss = distnb.nn.compute_average_loss(error)
    loss.backward()
    descend()
    note(error.detach())
    count.assign_add(float(len(x)))
    mean.assign_add(1.0)
    return loss.detach()
batches = iter(strategy.distribute_dataset(loader))
losses = []
"""
TRAIN = """
for _ in range(3):
    losses.append(float(strategy.reduce("sum", strategy.run(step, args=(next(batches),)), axis=None)))
found = losses, [p.tolist() for p in model.parameters()], float(count), float(mean)
"""
ADAM = """
with strategy.scope():
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    metric = distnb.metrics.Mean()
def note(error):
    metric.update(error)
def descend():
    optimizer.step()
    optimizer.zero_grad()
"""
STATE = """
state = optimizer.state_dict()["state"][0]
found += float(metric.compute()), state["step"].item(), state["exp_avg"].tolist(), state["exp_avg_sq"].tolist()
"""


def one_replicas() -> Any:
    """Return what the training with Adam finds in one process, under the default strategy."""
    names: Any = {"strategy": distnb.get_strategy(), "distnb": distnb, "torch": torch}
    exec(MAKE + ADAM, names)
    for _ in range(4):
        exec(TRAIN + STATE, names)
    return names["found"]


def flat(found: Any) -> list[float]:
    return [number for part in found for number in flat(part)] if isinstance(found, list | tuple) else [found]
