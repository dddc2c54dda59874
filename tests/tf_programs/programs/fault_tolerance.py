"""Seeds 002 and 004: training that resumes from its last checkpoint, under the same strategy or another.

The chief saves; the other workers of a cluster would lose what they saved with their machines.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import distnb

UNDER = ("default", "one_device", "mirrored_2", "mirrored_3", "central_2", "multi_worker_2")  # tpu_2: slow
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.from_numpy(images[:128]) / 16, torch.from_numpy(labels[:128]))


def make(of):
    torch.manual_seed(1)
    with of.scope():
        model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)).double()
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def make_or_restore(of, folder):
    """Return the newest checkpoint's model or a new one, and the number of its finished epochs."""
    model, optimizer = make(of)
    saved = sorted(folder.glob("epoch-*.pt"))
    if not saved:
        return model, optimizer, 0
    state = torch.load(saved[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer, state["epoch"]


@distnb.on_chief
def save(folder, epoch, model, optimizer):
    folder.mkdir(exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, folder / "saving.tmp")
    os.replace(folder / "saving.tmp", folder / f"epoch-{epoch}.pt")


def run_training(of, folder, epochs=1):
    """Train for this many more epochs, and return the loss of each on the training data."""
    model, optimizer, done = make_or_restore(of, folder)
    meet()  # where nothing is distributed, one replica would find what another has saved since

    def loss_of(batch):
        x, y = batch
        return distnb.nn.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))

    def step(batch):
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()

    dataset = of.distribute_dataset(DataLoader(data, batch_size=48))
    losses = []
    for epoch in range(done, done + epochs):
        for batch in dataset:
            of.run(step, args=(batch,))
        save(folder, epoch + 1, model, optimizer)
        with torch.no_grad():
            parts = [of.reduce("sum", of.run(loss_of, args=(batch,)), axis=None) for batch in dataset]
        losses.append(torch.stack(parts).mean().item())
    return losses


def meet():
    """Wait until every replica is here, and the chief's files with it."""
    strategy.run(lambda: distnb.get_replica_context().all_reduce("sum", torch.ones(())))


uninterrupted = run_training(strategy, Path("through"), epochs=2)
none = distnb.get_strategy()
result = {"uninterrupted": uninterrupted}
for name, first, second in (("same", strategy, strategy), ("to none", strategy, none), ("from none", none, strategy)):
    meet()
    before = run_training(first, Path(name))
    meet()
    after = run_training(second, Path(name))
    result[name] = before + after
    assert torch.allclose(torch.tensor(result[name]), torch.tensor(uninterrupted), rtol=1e-9)
assert uninterrupted[1] < uninterrupted[0]
meet()
assert sorted(path.name for path in Path("same").iterdir()) == ["epoch-1.pt", "epoch-2.pt"]
