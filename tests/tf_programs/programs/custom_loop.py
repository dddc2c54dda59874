"""Seed 003, the custom loop: a frozen first layer, binary cross-entropy, accuracies, whole batches only.

The document classifies questions by a frozen text embedding; here tumours, from scikit-learn, by a frozen projection.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch.utils.data import DataLoader, TensorDataset

import distnb

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "central_2", "multi_worker_2")  # tpu_2: slow
EPOCHS = 2
GLOBAL_BATCH_SIZE = 64

features, targets = load_breast_cancer(return_X_y=True)
features = torch.from_numpy((features - features.mean(axis=0)) / features.std(axis=0))
targets = torch.from_numpy(targets).double()[:, None]  # the dummy axis that losses are averaged over
train_data = TensorDataset(features[:420], targets[:420])
valid_data = TensorDataset(features[420:], targets[420:])
train_dataset = strategy.distribute_dataset(
    DataLoader(train_data, batch_size=GLOBAL_BATCH_SIZE, shuffle=True, drop_last=True)
)
valid_dataset = strategy.distribute_dataset(DataLoader(valid_data, batch_size=GLOBAL_BATCH_SIZE, drop_last=True))


def create_model():
    embedding = torch.nn.Linear(30, 32).requires_grad_(False)
    layers = [embedding, torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1), torch.nn.Sigmoid()]
    return torch.nn.Sequential(*layers).double()


with strategy.scope():
    train_accuracy = distnb.metrics.BinaryAccuracy()
    valid_accuracy = distnb.metrics.BinaryAccuracy()
    model = create_model()
    optimizer = torch.optim.Adam((each for each in model.parameters() if each.requires_grad), lr=5e-3)
frozen = model[0].weight.clone()


def compute_loss(labels, predictions):
    per_example = F.binary_cross_entropy(predictions, labels, reduction="none").mean(dim=-1)
    return distnb.nn.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH_SIZE)


def train_step(inputs):
    examples, labels = inputs
    predictions = model(examples)
    loss = compute_loss(labels, predictions)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    train_accuracy.update_state(labels, predictions.detach())
    return loss.detach()


@torch.no_grad()
def valid_step(inputs):
    examples, labels = inputs
    predictions = model(examples)
    valid_accuracy.update_state(labels, predictions)
    return compute_loss(labels, predictions)


def distributed(step, inputs):
    return strategy.reduce(distnb.ReduceOp.SUM, strategy.run(step, args=(inputs,)), axis=None)


history = []
for epoch in range(EPOCHS):
    losses = [distributed(train_step, inputs) for inputs in train_dataset]
    assert len(losses) == 6
    # The other way to march through the input: by hand, for as many steps as one wants.
    iterator = iter(valid_dataset)
    v_losses = [distributed(valid_step, next(iterator)) for _ in range(2)]
    row = {
        "train_loss": torch.stack(losses).mean().item(),
        "valid_loss": torch.stack(v_losses).mean().item(),
        "train_acc": train_accuracy.result().item() * 100,
        "valid_acc": valid_accuracy.result().item() * 100,
    }
    print(epoch + 1, {name: round(value, 4) for name, value in row.items()})
    history.append(row)
    train_accuracy.reset_state()
    valid_accuracy.reset_state()

# The exercise: a loop of its own to evaluate with.
for inputs in valid_dataset:
    distributed(valid_step, inputs)
evaluated = valid_accuracy.result().item() * 100
assert evaluated == history[-1]["valid_acc"]
assert history[1]["train_loss"] < history[0]["train_loss"]
assert torch.equal(model[0].weight, frozen)
strategy.assert_in_sync([model, optimizer])
result = {"history": history, "evaluated": evaluated}
