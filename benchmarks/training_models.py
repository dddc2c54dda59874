"""The models, batches and training steps that every contender of `benchmarks.training` runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BATCH", "MODELS", "make_batch", "make_model", "steps_with_ddp", "steps_with_distnb"]

BATCH = {"mlp": 128, "deep": 64, "convnet": 32, "normed": 32, "wide": 8}
"""The global batch size per model."""
MODELS = ("mlp", "deep", "convnet", "normed")
"""The models of `benchmarks.training`."""


def make_model(name: str) -> nn.Module:
    """Return a model, with the same values in every process.

    - `mlp`: 784-256-256-10.
    - `deep`: narrow, 242 parameter tensors, where every µs per tensor shows.
    - `convnet`: three convolutions on 32 × 32 images and a classifier.
    - `normed`: eight narrow convolutions, each with a batch normalisation (DDP broadcasts its statistics).
    - `wide`: 34 MB of parameters, to measure memory.
    """
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    if name == "deep":
        layers = [layer for _ in range(120) for layer in (nn.Linear(32, 32), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(32, 10))
    if name == "convnet":
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128 * 4 * 4, 256), nn.ReLU(), nn.Linear(256, 10),
        )  # fmt: skip
    if name == "normed":
        blocks = [
            nn.Sequential(nn.Conv2d(inputs, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            for inputs in (3, *[16] * 7)
        ]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    if name == "wide":
        return nn.Sequential(nn.Linear(4096, 2048), nn.ReLU(), nn.Linear(2048, 10))
    raise ValueError(f"{name!r} is none of {tuple(BATCH)}")


def make_batch(name: str, rank: int, replicas: int) -> tuple[Tensor, Tensor]:
    """Return this replica's slice of one global batch: `[batch / replicas, …]` and `[batch / replicas]`."""
    shape = {"mlp": (784,), "deep": (32,), "convnet": (3, 32, 32), "normed": (3, 32, 32), "wide": (4096,)}[name]
    count = BATCH[name] // replicas
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, *shape, generator=generator), torch.randint(10, (count,), generator=generator)


def steps_with_ddp(name: str, rank: int, replicas: int) -> Callable[[int], float]:
    """Return the peer's function of a number of steps to seconds: DistributedDataParallel as in its tutorial."""
    train = _plain_steps(nn.parallel.DistributedDataParallel(make_model(name)), name, rank, replicas)

    def steps(count: int) -> float:
        torch.distributed.barrier()
        return train(count)

    return steps


def steps_alone(name: str, rank: int, replicas: int) -> Callable[[int], float]:
    """Return the floor's function: the same steps without communication, next to the other replicas' processes."""
    return _plain_steps(make_model(name), name, rank, replicas)


def _plain_steps(model: nn.Module, name: str, rank: int, replicas: int) -> Callable[[int], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = make_batch(name, rank, replicas)

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - began

    return steps


def steps_with_distnb(
    name: str, rank: int, replicas: int, *, strategy: Any = None, optimizer_class: Any = torch.optim.SGD
) -> Callable[[int], float]:
    """Return our function: the quickstart's training cell with a given batch. It runs in scripts and in cells."""
    import distnb

    if strategy is None:
        strategy = distnb.get_strategy() if distnb.has_strategy() else distnb.MirroredStrategy()
    with strategy.scope():
        model = make_model(name)
        optimizer = optimizer_class(model.parameters(), lr=0.01)
    x, y = make_batch(name, rank, replicas)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        per_example = F.cross_entropy(model(x), y, reduction="none")
        loss: Tensor = distnb.nn.compute_average_loss(per_example, global_batch_size=BATCH[name])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def steps(count: int) -> float:
        torch.distributed.barrier()
        began = time.perf_counter()
        for _ in range(count):
            strategy.run(train_step, args=(x, y))
        return time.perf_counter() - began

    return steps
