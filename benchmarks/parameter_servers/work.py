"""The work of every contender: the same models, batches and learning rates, without torch and TensorFlow."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = ["BATCH", "IDS", "LEARNING_RATE", "Cluster", "batches", "free_ports", "initial", "start_process"]

BATCH, IDS, LEARNING_RATE = 64, 20, 0.01
_UNITS, _ROWS, _WIDTH = (784, 128, 64, 10), 100_000, 64
_BATCHES = 16


class Cluster(NamedTuple):
    """The numbers of processes of either kind, in addition to the coordinator."""

    workers: int
    servers: int


def initial(model: str) -> list[Any]:
    """Return the initial values of a model's variables, in order.

    Args:
        model: "mlp": weights [inputs, outputs] and biases of 784-128-64-10, for SGD; "embedding": a table
            [100000, 64], and weights [64, 1] and bias of a linear layer on the sum of 20 rows, for Adagrad.
    """
    draws = np.random.default_rng(0)
    if model == "mlp":
        pairs = [
            (draws.normal(size=(inputs, outputs)) / inputs**0.5, np.zeros(outputs))
            for inputs, outputs in itertools.pairwise(_UNITS)
        ]
        values = [value for pair in pairs for value in pair]
    else:
        values = [draws.normal(size=(_ROWS, _WIDTH)), draws.normal(size=(_WIDTH, 1)) / _WIDTH, np.zeros(1)]
    return [value.astype("float32") for value in values]


def batches(model: str, seed: int = 0) -> tuple[Any, Any]:
    """Return inputs [batches, 64, 784] or ids [batches, 64, 20], and labels [batches, 64] or targets [batches, 64, 1].

    All are made beforehand, because reading data is not measured.
    """
    draws = np.random.default_rng(seed)
    if model == "mlp":
        inputs = draws.normal(size=(_BATCHES, BATCH, _UNITS[0])).astype("float32")
        return inputs, draws.integers(_UNITS[-1], size=(_BATCHES, BATCH))
    ids = draws.integers(_ROWS, size=(_BATCHES, BATCH, IDS))
    return ids, draws.normal(size=(_BATCHES, BATCH, 1)).astype("float32")


def free_ports(count: int) -> list[int]:
    """Return free ports of this machine."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_process(target: Callable[..., object], *args: Any) -> None:
    """Start a process that ends with this one."""
    multiprocessing.get_context("spawn").Process(target=_until_parent_ends, args=(target, *args), daemon=True).start()


def _until_parent_ends(target: Callable[..., object], *args: Any) -> None:
    kept = target(*args)
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    del kept
