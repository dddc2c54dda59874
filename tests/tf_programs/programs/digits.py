"""Seed 002, the end-to-end example: two hidden layers, Adam, batches of 32, two epochs with validation, then a test.

The guide has `fit` and `evaluate` do it; here the loops are written out. Images: scikit-learn's digits, flat.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import distnb

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "central_2", "multi_worker_2")  # tpu_2: slow


def get_datasets():
    images, labels = load_digits(return_X_y=True)
    data = torch.from_numpy(images) / 16, torch.from_numpy(labels)
    parts = {"train": slice(0, 500), "validation": slice(500, 650), "test": slice(650, 800)}
    # 500 = 15 · 32 + 20: the last batch is smaller, and not every number of replicas divides it.
    loaders = {
        name: DataLoader(TensorDataset(*(each[part] for each in data)), batch_size=32) for name, part in parts.items()
    }
    return {name: strategy.distribute_dataset(loader) for name, loader in loaders.items()}


with strategy.scope():
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    loss_metric = distnb.metrics.Mean()
    accuracy = distnb.metrics.MulticlassAccuracy(num_classes=10, average="micro")


def forward(images, labels):
    predictions = model(images)
    per_example = F.cross_entropy(predictions, labels, reduction="none")
    loss_metric.update_state(per_example.detach())
    accuracy.update_state(labels, predictions.detach())
    return per_example


def train_step(images, labels):
    optimizer.zero_grad()
    distnb.nn.compute_average_loss(forward(images, labels)).backward()
    optimizer.step()


@torch.no_grad()
def test_step(images, labels):
    forward(images, labels)


def epoch(step, batches):
    loss_metric.reset_state()
    accuracy.reset_state()
    for batch in batches:
        strategy.run(step, args=tuple(batch))
    return [float(loss_metric.result()), float(accuracy.result())]


print(f"Number of devices: {strategy.num_replicas_in_sync}")
datasets = get_datasets()
history = []
for _ in range(2):
    trained = epoch(train_step, datasets["train"])
    history.append(trained + epoch(test_step, datasets["validation"]))
tested = epoch(test_step, datasets["test"])
strategy.assert_in_sync([model, optimizer])
assert history[1][0] < history[0][0]
assert tested[1] > 0.7
result = {"history": history, "test": tested}
