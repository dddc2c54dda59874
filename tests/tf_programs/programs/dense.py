"""Seeds 000 and 004: one dense layer that learns to return 1 for 1, with results known beforehand.

With prediction w + b and error e = 1 - w - b, the gradient of e² is -2e for both, so a step of SGD multiplies e by
1 - 4·lr, on however many replicas.
"""

import math

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import distnb

n = strategy.num_replicas_in_sync
GUIDES_LOSS = 0.1281416267156601  # seed 000: what evaluate gave after two epochs


def dense(weight):
    with strategy.scope():
        model = torch.nn.Linear(1, 1, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, weight)
        torch.nn.init.zeros_(model.bias)
    return model


def squares(model, batch):
    features, labels = batch
    return distnb.nn.compute_average_loss((model(features) - labels).square().mean(dim=1))


def fit(model, optimizer, batches):
    def step(batch):
        optimizer.zero_grad()
        loss = squares(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return [strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None).item() for batch in batches]


def evaluate(model, batches):
    losses = [strategy.reduce("sum", strategy.run(squares, args=(model, batch)), axis=None) for batch in batches]
    return torch.stack(losses).mean().item()


# Seed 000: 100 examples in batches of 10, two epochs of SGD with Keras's rate 0.01, from the weight that the guide's
# run must have drawn to end where it did.
ones = torch.ones(100, 1, dtype=torch.float64)
model = dense(1 - math.sqrt(GUIDES_LOSS / 0.96**40))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = strategy.distribute_dataset(DataLoader(TensorDataset(ones, ones), batch_size=10))
for _epoch in range(2):
    fit(model, optimizer, dataset)
evaluated = evaluate(model, dataset)
assert math.isclose(evaluated, GUIDES_LOSS, rel_tol=1e-9)

# The same with arrays: two epochs more.
inputs, targets = np.ones((100, 1)), np.ones((100, 1))
arrays = DataLoader(TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets)), batch_size=10)
if strategy.kind != "default":  # which distributes nothing, and so batches nothing
    arrays = strategy.distribute_dataset((inputs, targets), batch_size=10)
for _epoch in range(2):
    fit(model, optimizer, arrays)
again = evaluate(model, dataset)
assert math.isclose(again, GUIDES_LOSS * 0.96**40, rel_tol=1e-9)
strategy.assert_in_sync(model)


# Seed 004: 100 batches of one example, SGD with rate 0.2; in each step every replica takes a whole batch.
def input_fn(context):
    mine = range(context.input_pipeline_id, 100, context.num_input_pipelines)
    return DataLoader(Subset(TensorDataset(ones, ones), mine), batch_size=1)


model = dense(0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses = fit(model, optimizer, strategy.distribute_datasets_from_function(input_fn))
assert len(losses) == math.ceil(100 / n)
assert all(math.isclose(loss, 0.04**k, rel_tol=1e-6) for k, loss in enumerate(losses[:4]))
assert losses[-1] < 1e-20
result = {"guide": [evaluated, again], "contrib": losses[:4]}
