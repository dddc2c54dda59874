"""A parameter server written by hand on torch.distributed.rpc, as in PyTorch's tutorials.

Servers are objects that the coordinator creates with `rpc.remote`. Trainers pull values, and push gradients that the
server's optimizer applies. "One call a step" is the tutorial on batch processing: a push is answered with values.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch.nn import functional

from benchmarks.parameter_servers.work import LEARNING_RATE, Cluster, batches, free_ports, initial, start_process

__all__ = ["connect", "connect_fused"]


class Server:
    """A server with some variables, and the optimizer that updates them.

    Args:
        model: The model of the variables.
        values: The initial values.
    """

    def __init__(self, model: str, values: Sequence[torch.Tensor]) -> None:
        self._parameters = [torch.nn.Parameter(value) for value in values]
        self._optimizer: torch.optim.Optimizer
        if model == "mlp":
            self._optimizer = torch.optim.SGD(self._parameters, lr=LEARNING_RATE)
        else:
            self._optimizer = torch.optim.Adagrad(self._parameters, lr=LEARNING_RATE, initial_accumulator_value=0.1)
        self._lock = threading.Lock()

    def exchange(self, gradients: Any, rows: torch.Tensor | None, pull: bool) -> list[torch.Tensor]:
        """Apply gradients, if there are any, and return values.

        Args:
            gradients: A tensor, or rows and their gradients, for each variable; None for a pull only.
            rows: The requested rows of the first variable; None for all.
            pull: True if values are requested.
        """
        with self._lock:
            if gradients is not None:
                for parameter, gradient in zip(self._parameters, gradients, strict=True):
                    if isinstance(gradient, tuple):
                        where, values = gradient
                        gradient = torch.sparse_coo_tensor(where[None], values, parameter.shape, check_invariants=False)
                    parameter.grad = gradient
                self._optimizer.step()
            if not pull:
                return []
            first, *others = [parameter.detach() for parameter in self._parameters]
            return [first if rows is None else first[rows], *others]


class _Trainer:
    """A trainer that runs steps on the worker, one after another."""

    def __init__(self, model: str, servers: Sequence[Any], fused: bool) -> None:
        self._servers, self._fused = servers, fused
        self._step = self._mlp if model == "mlp" else self._embedding
        inputs, labels = map(torch.from_numpy, batches(model))
        self._batches = itertools.cycle(list(zip(inputs, labels, strict=True)))
        self._rows = len(initial(model)[0])

    def train(self, count: int) -> None:
        coming: Iterator[Any] = itertools.islice(self._batches, count)
        batch = next(coming)
        values = self._exchange(None, batch)
        for following in itertools.chain(coming, [None]):
            gradients = self._step(values, *batch)
            if self._fused or following is None:
                values = self._exchange(gradients, following)
            else:
                self._exchange(gradients, None)
                values = self._exchange(None, following)
            batch = following

    def _exchange(self, gradients: Any, batch: Any) -> list[list[torch.Tensor]]:
        """Exchange with all servers at once."""
        calls = []
        for number, server in enumerate(self._servers):
            rows = None
            if batch is not None and self._step == self._embedding:
                _, rows = self._places(batch[0], number)
            given = None if gradients is None else gradients[number]
            calls.append(server.rpc_async().exchange(given, rows, batch is not None))
        return [call.wait() for call in calls]

    def _places(self, ids: torch.Tensor, server: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of the ids (in one row) a server has, and their rows there."""
        flat, size = ids.flatten(), self._rows // len(self._servers)
        if len(self._servers) == 1:
            return torch.arange(len(flat)), flat
        (places,) = torch.where(flat // size == server)
        return places, flat[places] - server * size

    def _mlp(self, values: list[list[torch.Tensor]], inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        dealt = [[value.requires_grad_() for value in some] for some in values]
        variables = [dealt[number % len(dealt)][number // len(dealt)] for number in range(sum(map(len, dealt)))]
        hidden = inputs
        for weights, biases in zip(variables[:-2:2], variables[1:-2:2], strict=True):
            hidden = torch.relu(torch.addmm(biases, hidden, weights))
        functional.cross_entropy(torch.addmm(variables[-1], hidden, variables[-2]), labels).backward()
        return [[value.grad for value in some] for some in dealt]

    def _embedding(self, values: list[list[torch.Tensor]], ids: torch.Tensor, targets: torch.Tensor) -> Any:
        (first, weights, bias), *others = values
        parts = [first, *(some[0] for some in others)]
        places = [self._places(ids, number) for number in range(len(self._servers))]
        rows = torch.empty(ids.numel(), first.shape[1])
        for (where, _), part in zip(places, parts, strict=True):
            rows[where] = part
        for each in (rows, weights, bias):
            each.requires_grad_()
        summed = rows.view(*ids.shape, -1).sum(1)
        functional.mse_loss(torch.addmm(bias, summed, weights), targets).backward()
        assert rows.grad is not None
        gradients: list[list[Any]] = [[(shard, rows.grad[where])] for where, shard in places]
        gradients[0] += [weights.grad, bias.grad]
        return gradients


_trainers: dict[str, _Trainer] = {}


def _prepare(model: str, servers: Sequence[Any], fused: bool) -> None:
    _trainers[model] = _Trainer(model, servers, fused)


def _train(model: str, count: int) -> None:
    _trainers[model].train(count)


def _join(name: str, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # this group has a store of its own
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


def _dealt(model: str, servers: int) -> list[list[torch.Tensor]]:
    """Return the variables of each server, assigned in turn; a table in equal parts, with the rest at the first."""
    values = [torch.from_numpy(value) for value in initial(model)]
    if model == "mlp":
        return [values[number::servers] for number in range(servers)]
    table, *others = values
    first, *more = table.chunk(servers)
    return [[first, *others], *([part] for part in more)]


def connect(cluster: Cluster, fused: bool = False) -> Callable[[str], Callable[[int], object]]:
    """Start a cluster. Return a function that makes, for a kind of work, a function that runs steps."""
    (port,), size = free_ports(1), 1 + sum(cluster)
    servers = [f"server{number}" for number in range(cluster.servers)]
    workers = [f"worker{number}" for number in range(cluster.workers)]
    for rank, name in enumerate([*servers, *workers], start=1):
        start_process(_join, name, rank, size, port)
    _join("coordinator", 0, size, port)

    def prepared(work: str) -> Callable[[int], object]:
        parts = _dealt(work, cluster.servers)
        objects = [rpc.remote(name, Server, args=(work, part)) for name, part in zip(servers, parts, strict=True)]
        for name in workers:
            rpc.rpc_sync(name, _prepare, args=(work, objects, fused))

        def do(count: int) -> None:
            shares = [count // len(workers) + (number < count % len(workers)) for number in range(len(workers))]
            calls = [
                rpc.rpc_async(name, _train, args=(work, share), timeout=0)
                for name, share in zip(workers, shares, strict=True)
                if share
            ]
            for call in calls:
                call.wait()

        return do

    return prepared


def connect_fused(cluster: Cluster) -> Callable[[str], Callable[[int], object]]:
    """Start a cluster as `connect` does, with one call per step."""
    return connect(cluster, fused=True)
