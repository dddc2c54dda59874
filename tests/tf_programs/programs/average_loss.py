"""Seed 003, "Calculation of loss": 64 examples on 4 devices, 16 on each, and each loss divided by 64, not by 16."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import distnb
from distnb.errors import MeanLossError

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "mirrored_4", "central_2", "multi_worker_2", "tpu_2")
GLOBAL_BATCH_SIZE = 64

n = strategy.num_replicas_in_sync
images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images[:GLOBAL_BATCH_SIZE]) / 16, torch.from_numpy(labels[:GLOBAL_BATCH_SIZE])
pair = TensorDataset(x, y)
[batch] = strategy.distribute_dataset(torch.utils.data.DataLoader(pair, batch_size=GLOBAL_BATCH_SIZE))
with strategy.scope():
    model = torch.nn.Linear(64, 10, dtype=torch.float64)
    # The same on every type of device: each draws other random numbers.
    torch.nn.init.zeros_(model.bias)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-0.1, 0.1, 640, dtype=torch.float64).reshape(10, 64))


def per_example(batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def gradient_of(loss_of):
    """Return the weight's gradient if each replica goes backward from its own loss, and the sum of the losses."""

    def step(batch):
        model.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        return loss.detach(), model.weight.grad.clone()

    loss, gradient = strategy.run(step, args=(batch,))
    total = strategy.reduce("sum", loss, axis=None).item()
    return total, strategy.local_results(gradient)[0]


# One replica's program, in plain PyTorch: what every way below must give.
whole = torch.nn.Linear(64, 10, dtype=torch.float64)
whole.load_state_dict(model.state_dict())
expected = F.cross_entropy(whole(x), y)
expected.backward()

sizes = strategy.run(lambda batch: torch.tensor([len(batch[1])]), args=(batch,))
if n == 4:
    assert strategy.gather(sizes, axis=0).tolist() == [16] * 4
for scaled in (
    lambda batch: per_example(batch).sum() * (1.0 / GLOBAL_BATCH_SIZE),
    lambda batch: distnb.nn.compute_average_loss(per_example(batch), global_batch_size=GLOBAL_BATCH_SIZE),
    lambda batch: distnb.nn.compute_average_loss(per_example(batch)),
):
    total, gradient = gradient_of(scaled)
    assert torch.isclose(torch.tensor(total), expected.detach().float())
    assert torch.allclose(gradient, whole.weight.grad, rtol=1e-9, atol=1e-12)

# Weights multiply, the divisor stays.
weighted, _ = gradient_of(lambda batch: distnb.nn.compute_average_loss(per_example(batch), sample_weight=batch[1]))
everything = F.cross_entropy(whole(x), y, reduction="none").detach()
assert abs(weighted - (everything * y).sum().item() / GLOBAL_BATCH_SIZE) < 1e-9

# Every replica computes the same regularization loss, and counts it with 1/n.
penalty, gradient = gradient_of(lambda batch: distnb.nn.scale_regularization_loss(model.weight.square().sum()))
assert abs(penalty - model.weight.square().sum().item()) < 1e-9
assert torch.allclose(gradient, 2 * model.weight.detach())

# A mean over what the replica has is not of the global batch's size: it is refused, where it would make a difference.
try:
    gradient_of(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
except MeanLossError:
    assert n > 1
else:
    assert n == 1


# Labels of several elements an example, such as a picture: the loss of an example is the mean over its elements.
def picture_loss(batch):
    pictures = batch[0].reshape(-1, 8, 8)
    losses = (pictures - 0.5).square() + 0 * model.weight.sum()
    return distnb.nn.compute_average_loss(losses / pictures[0].numel(), global_batch_size=GLOBAL_BATCH_SIZE)


pictures, _ = gradient_of(picture_loss)
assert abs(pictures - (x - 0.5).square().mean().item()) < 1e-9

# Gradients are summed, and the sum is applied once: 99 on one replica, 97 on two, 90 on four.
with strategy.scope():
    weight = torch.nn.Parameter(torch.tensor(100.0))
    unused = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight, unused], lr=1.0)


def update(at_most=None):
    optimizer.zero_grad()
    (weight * (distnb.replica_id() + 1)).backward()
    if at_most is not None:
        torch.nn.utils.clip_grad_norm_([weight], at_most)
    optimizer.step()


strategy.run(update)
assert weight.item() == 100 - n * (n + 1) / 2
assert unused.item() == 1  # without a gradient on any replica it stays
clipped = weight.item()
strategy.run(update, args=(2.0,))  # clipping acts on the sum
assert abs(clipped - weight.item() - min(2, n * (n + 1) / 2)) < 1e-4


def differ():
    """Return a parameter that only some replicas use."""
    optimizer.zero_grad()
    (unused if distnb.replica_id() == 0 else weight).backward()
    optimizer.step()


before = weight.item()
strategy.run(differ)
assert unused.item() == 0
assert abs(before - weight.item() - (n - 1)) < 1e-4
strategy.assert_in_sync([weight, unused])
result = {"loss": total, "weighted": weighted, "penalty": penalty, "pictures": pictures}
