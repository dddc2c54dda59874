"""A training loop in ordinary notebook cells against the same loop in a `%%distribute` cell, on two replicas.

    python -m benchmarks.ordinary_loop [--rounds 5] [--batches 48]

The loop is the README's. In an ordinary cell each `strategy.run` is a message to every replica and back, and so are
every 16 of its small batches; a distributed cell sends none. Times are per step.
"""

from __future__ import annotations

from benchmarks.cell_shell import Cells
from benchmarks.guard import TARGETS
from benchmarks.harness import compare, options, report, timed

ORDINARY, DISTRIBUTED = "ordinary cell", "%%distribute cell"

_SETUP = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import distnb

BATCHES = {batches}
torch.manual_seed(0)
pixels, labels = torch.rand(64 * BATCHES, 64), torch.randint(0, 10, (64 * BATCHES,))
loader = DataLoader(TensorDataset(pixels, labels), batch_size=64, shuffle=True)


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def train_step(batch):
    x, y = batch
    per_example = F.cross_entropy(model(x), y, reduction="none")
    loss = distnb.nn.compute_average_loss(per_example)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


strategy = distnb.MirroredStrategy()
with strategy.scope():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
dist_dataset = strategy.distribute_dataset(loader)
"""

_LOOP = """
total = 0.0
for batch in dist_dataset:
    losses = strategy.run(train_step, args=(batch,))
    loss = strategy.reduce("sum", losses, axis=None)
    total += loss.item()
"""


def main() -> int:
    """Run the benchmark. Return 1 if the target is missed."""
    given = options(__doc__, rounds=5, batches=48)
    cells = Cells("distnb")
    cells.run("%distnb start -n 2")
    try:
        cells.run(_SETUP.format(batches=given.batches))
        texts = {ORDINARY: _LOOP, DISTRIBUTED: "%%distribute strategy\n" + _LOOP}
        loops = {name: timed(lambda text=text: cells.run(text)) for name, text in texts.items()}  # type: ignore[misc]
        measures = {name: lambda loop=loop: loop() / given.batches for name, loop in loops.items()}
        comparison = compare(measures, rounds=given.rounds)
    finally:
        cells.run("%distnb stop")
    targets = TARGETS["ordinary_loop"]["step"]
    met = report("a step of a training loop on 2 replicas", comparison, baseline=DISTRIBUTED, targets=targets)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
