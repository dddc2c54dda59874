"""distnb's ParameterServerStrategy and ClusterCoordinator, in the loop of its documentation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import distnb
from benchmarks.parameter_servers.work import LEARNING_RATE, Cluster, batches, initial

__all__ = ["connect"]


class Batches(torch.utils.data.IterableDataset[Any]):
    """A dataset that repeats the same batches."""

    def __init__(self, work: str) -> None:
        inputs, labels = map(torch.from_numpy, batches(work))
        self._made = list(zip(inputs, labels, strict=True))

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._made)


class SummedRows(torch.nn.Module):
    """A linear layer on the sum of a table's rows."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(rows, width, sparse=True)
        self.linear = torch.nn.Linear(width, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return outputs [batch, 1] for ids [batch, ids]."""
        outputs: torch.Tensor = self.linear(self.table(ids).sum(1))
        return outputs


def connect(cluster: Cluster) -> Callable[[str], Callable[[int], object]]:
    """Start a cluster. Return a function that makes, for a kind of work, a function that runs closures or steps."""
    distnb.start(workers=cluster.workers, ps=cluster.servers)
    partitioner = distnb.partitioners.MinSizePartitioner(1 << 20, cluster.servers)
    strategy = distnb.ParameterServerStrategy(variable_partitioner=partitioner)
    coordinator = distnb.coordinator.ClusterCoordinator(strategy)

    def prepared(work: str) -> Callable[[int], object]:
        function, args = _closure(work, strategy, coordinator)

        def do(count: int) -> None:
            for _ in range(count):
                coordinator.schedule(function, args=args)
            coordinator.join()

        return do

    return prepared


def _closure(work: str, strategy: Any, coordinator: Any) -> tuple[Callable[..., object], tuple[Any, ...]]:
    if work == "closures":
        return lambda: None, ()
    dataset = coordinator.create_per_worker_dataset(lambda: Batches(work))
    with strategy.scope():
        model, optimizer, loss_of = _mlp() if work == "mlp" else _embedding()

    def train(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()

    def step(iterator: Iterator[Any]) -> None:
        strategy.run(train, args=next(iterator))

    return step, (iter(dataset),)


def _mlp() -> tuple[Any, Any, Any]:
    shapes = [value.shape for value in initial("mlp")[::2]]
    layers = [layer for shape in shapes for layer in (torch.nn.Linear(*shape), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return model, optimizer, torch.nn.functional.cross_entropy


def _embedding() -> tuple[Any, Any, Any]:
    model = SummedRows(*initial("embedding")[0].shape)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE, initial_accumulator_value=0.1)
    return model, optimizer, torch.nn.functional.mse_loss
