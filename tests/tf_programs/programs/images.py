"""Seed 003, the advanced exercise: a loop for pictures (house numbers in the exercise; here handwritten digits)."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "central_2", "multi_worker_2")  # tpu_2: slow
data = load_digits()
images, labels = torch.from_numpy(data.images)[:, None] / 16, torch.from_numpy(data.target)


def dataset_fn(context):
    """Return batches for one replica; those of one step together are the global batch, in its order."""
    size = context.get_per_replica_batch_size(48)
    for start in range(0, 384, 48):
        mine = slice(start, start + 48)
        parts = list(zip(images[mine].split(size), labels[mine].split(size), strict=True))
        share = len(parts) // context.num_input_pipelines
        yield from parts[share * context.input_pipeline_id :][:share]


with strategy.scope():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(72, 10)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def train_step(batch):
    x, y = batch
    loss = F.cross_entropy(model(x), y, reduction="sum") / 48
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def eval_step(batch):
    x, y = batch
    return (model(x).argmax(dim=1) == y).double()


losses = []
for _epoch in range(2):
    for batch in strategy.distribute_datasets_from_function(dataset_fn):
        losses.append(strategy.reduce("sum", strategy.run(train_step, args=(batch,)), axis=None).item())
unseen = torch.utils.data.TensorDataset(images[400:500], labels[400:500])
batches = strategy.distribute_dataset(torch.utils.data.DataLoader(unseen, batch_size=30))  # the last one has 10
hits = [strategy.reduce("sum", strategy.run(eval_step, args=(batch,)), axis=0).item() for batch in batches]
accuracy = sum(hits) / 100
assert losses[-1] < losses[0]
strategy.assert_in_sync(model)
result = {"losses": losses, "accuracy": accuracy}
