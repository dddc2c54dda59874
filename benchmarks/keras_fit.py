"""`fit` of a Keras model on 2 replicas, against one process, a loop with DistributedDataParallel, and Keras's own.

    python -m benchmarks.keras_fit [--rounds 7] [--epochs 3]

An MLP of 64-64-10, 1,024 rows, global batches of 64, accuracy as its metric; one thread per process. Keras's own
DataParallel is in its version 3.16; with an older one it is left out. "distnb, one replica" is the one-device strategy.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

from benchmarks.harness import Target, compare, options, report
from benchmarks.ranks import REPLICAS, Ranks, serve

_ROWS, _BATCH = 1024, 64
_CONTENDERS = {"distnb": REPLICAS, "loop with DDP": REPLICAS, "Keras alone": 1, "distnb, one replica": 1}
_PEER = "Keras's DataParallel"
if hasattr(keras.Model, "_initialize_ddp"):
    _CONTENDERS[_PEER] = REPLICAS


def _data() -> tuple[Any, Any]:
    rows = np.random.default_rng(0).normal(size=(_ROWS, 64)).astype("float32")
    return rows, (rows.sum(axis=1) > 0).astype("int64")


def _model() -> Any:
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(64, activation="relu")]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


def _compiled() -> Any:
    model = _model()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def _own_rows(rank: int) -> Any:
    """What a rank reads where each reads data of its own."""
    rows, labels = map(torch.from_numpy, _data())
    pairs = torch.utils.data.TensorDataset(rows[rank::REPLICAS], labels[rank::REPLICAS])
    return torch.utils.data.DataLoader(pairs, batch_size=_BATCH // REPLICAS, shuffle=True)


def _by_hand(rank: int) -> Callable[[int], object]:
    """Keras's model in a loop of one's own."""
    torch.distributed.init_process_group("gloo")
    model = _model()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = _own_rows(rank)

    def fit(epochs: int) -> None:
        for _ in range(epochs):
            right, total = 0, 0.0
            for x, y in batches:
                predicted = ddp(x)
                loss = torch.nn.functional.cross_entropy(predicted, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                right += int((predicted.argmax(1) == y).sum())
                total += float(loss.detach())

    return fit


def be_rank(contender: str) -> int:
    """A process of one contender: the seconds of an epoch."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    keras.utils.set_random_seed(0)
    rows, labels = _data()
    if contender == "loop with DDP":
        fit = _by_hand(rank)
    else:
        given: dict[str, Any] = {"x": rows, "y": labels, "batch_size": _BATCH}
        if contender.startswith("distnb"):
            import distnb

            several = int(os.environ["WORLD_SIZE"]) > 1
            with (distnb.MirroredStrategy() if several else distnb.OneDeviceStrategy("cpu:0")).scope():
                model = _compiled()
        elif contender == _PEER:
            torch.distributed.init_process_group("gloo")
            keras.distribution.initialize()
            keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
            model, given = _compiled(), {"x": _own_rows(rank)}
        else:
            model = _compiled()

        def fit(epochs: int) -> None:
            model.fit(**given, epochs=epochs, verbose=0)

    def measure(_: str, count: int) -> float:
        start = time.perf_counter()
        fit(count)
        return (time.perf_counter() - start) / count

    return serve(measure)


def main() -> int:
    """Run it. Returns 1 when a target is missed."""
    given = options(__doc__, rounds=7, epochs=3, rank="")
    if given.rank:
        return be_rank(given.rank)
    with contextlib.ExitStack() as stack:
        measures = {}
        for name, replicas in _CONTENDERS.items():
            ranks = Ranks("benchmarks.keras_fit", name, replicas)
            stack.callback(ranks.close)
            measures[name] = lambda ranks=ranks: ranks.step("epoch", given.epochs)
        epochs = compare(measures, rounds=given.rounds)
    targets = [
        Target("distnb", "loop with DDP", at_most=1 / 0.95),
        Target("distnb, one replica", "Keras alone", at_most=1.03),
        *([Target("distnb", _PEER, at_most=0.5)] if _PEER in _CONTENDERS else []),
    ]
    return 0 if report("an epoch of 16 batches", epochs, baseline="distnb", targets=targets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
