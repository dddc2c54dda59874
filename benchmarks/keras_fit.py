"""The time of a Keras model's `fit` on 2 replicas, against one process, a DistributedDataParallel loop, and its peers.

    python -m benchmarks.keras_fit [--rounds 7] [--epochs 5]

Two MLPs: one of 64-64-64-10, which is so small that overhead dominates, and one of 784-512-512-10. 1,024 rows, global
batches of 64, accuracy as the metric. One thread per process; TensorFlow, whose two replicas are logical devices of one
process, chooses its number. A measurement is some epochs; those of the first round (building, tracing) do not count.
"distnb, one replica" is the one-device strategy.

The peers are Keras's own DataParallel (of its coming version, in `.venv/keras-nightly`) and TensorFlow's
MirroredStrategy under Keras (in `.venv/tensorflow`). `make bench` installs both. A missing peer is left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

from benchmarks.guard import TARGETS
from benchmarks.harness import compare, options, report
from benchmarks.ranks import REPLICAS, Ranks, serve

_ROWS, _BATCH = 1024, 64
_MODELS = {"an MLP of 64-64-64-10": (64, 64), "an MLP of 784-512-512-10": (784, 512)}
_CONTENDERS = {"distnb": REPLICAS, "loop with DDP": REPLICAS, "Keras alone": 1, "distnb, one replica": 1}
_KERAS, _TENSORFLOW = "Keras's DataParallel", "TensorFlow's MirroredStrategy"
_NIGHTLY, _TENSORFLOW_PYTHON = Path(".venv/keras-nightly"), Path(".venv/tensorflow/bin/python")


def _data(features: int) -> tuple[Any, Any]:
    rows = np.random.default_rng(0).normal(size=(_ROWS, features)).astype("float32")
    return rows, (rows.sum(axis=1) > 0).astype("int64")


def _model(features: int, units: int) -> Any:
    layers = [keras.layers.Dense(units, activation="relu"), keras.layers.Dense(units, activation="relu")]
    return keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(10)])


def _compiled(features: int, units: int) -> Any:
    model = _model(features, units)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def _own_rows(features: int) -> Any:
    """Return a rank's data if each rank reads its own."""
    import torch

    rank = int(os.environ["RANK"])
    rows, labels = map(torch.from_numpy, _data(features))
    pairs = torch.utils.data.TensorDataset(rows[rank::REPLICAS], labels[rank::REPLICAS])
    return torch.utils.data.DataLoader(pairs, batch_size=_BATCH // REPLICAS, shuffle=True)


# -- the contenders: each returns a function that trains for some epochs -----------------------------------------------


def _by_hand(features: int, units: int) -> Callable[[int], object]:
    """Return a function that trains Keras's model in a custom loop."""
    import torch

    model = _model(features, units)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = _own_rows(features)

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


def _with_distnb(features: int, units: int) -> Callable[[int], object]:
    import distnb

    several = int(os.environ["WORLD_SIZE"]) > 1
    with (distnb.MirroredStrategy() if several else distnb.OneDeviceStrategy("cpu:0")).scope():
        return _fit(_compiled(features, units), **_arrays(features))


def _with_keras(features: int, units: int) -> Callable[[int], object]:
    return _fit(_compiled(features, units), x=_own_rows(features))


def _with_tensorflow(features: int, units: int) -> Callable[[int], object]:
    import tensorflow as tf

    with _mirrored_of_tensorflow().scope():
        data = tf.data.Dataset.from_tensor_slices(_data(features)).shuffle(_ROWS).batch(_BATCH)
        data = data.prefetch(tf.data.AUTOTUNE)
        return _fit(_compiled(features, units), x=data)


@functools.cache  # two models would use the same keys for their collectives
def _mirrored_of_tensorflow() -> Any:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    return tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(REPLICAS)])


def _alone(features: int, units: int) -> Callable[[int], object]:
    return _fit(_compiled(features, units), **_arrays(features))


def _arrays(features: int) -> dict[str, Any]:
    rows, labels = _data(features)
    return {"x": rows, "y": labels, "batch_size": _BATCH}


def _fit(model: Any, **given: Any) -> Callable[[int], object]:
    return lambda epochs: model.fit(**given, epochs=epochs, verbose=0)


_MAKERS = {
    "distnb": _with_distnb,
    "distnb, one replica": _with_distnb,
    "loop with DDP": _by_hand,
    "Keras alone": _alone,
    _KERAS: _with_keras,
    _TENSORFLOW: _with_tensorflow,
}


def act_as_rank(contender: str) -> int:
    """Answer requests as a process of one contender: the seconds of an epoch with a model."""
    if contender != _TENSORFLOW:
        import torch

        torch.set_num_threads(1)
        if contender in ("loop with DDP", _KERAS):
            torch.distributed.init_process_group("gloo")
    if contender == _KERAS:
        keras.distribution.initialize()
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    keras.utils.set_random_seed(0)
    fits: dict[str, Callable[[int], object]] = {}

    def measure(model: str, count: int) -> float:
        if model not in fits:
            fits[model] = _MAKERS[contender](*_MODELS[model])
        start = time.perf_counter()
        fits[model](count)
        return (time.perf_counter() - start) / count

    return serve(measure)


def _started(stack: contextlib.ExitStack) -> dict[str, Ranks]:
    """Start the processes of each available contender."""
    module = "benchmarks.keras_fit"
    found = {name: Ranks(module, name, replicas) for name, replicas in _CONTENDERS.items()}
    if _NIGHTLY.is_dir():
        found[_KERAS] = Ranks(module, _KERAS, variables={"PYTHONPATH": str(_NIGHTLY.resolve())})
    else:
        print(f"{_KERAS} is left out: there is no {_NIGHTLY} (make {_NIGHTLY.parent}/.made-keras-nightly).")
    if _TENSORFLOW_PYTHON.exists():
        variables = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
        found[_TENSORFLOW] = Ranks(module, _TENSORFLOW, 1, python=str(_TENSORFLOW_PYTHON), variables=variables)
    else:
        print(f"{_TENSORFLOW} is left out: there is no {_TENSORFLOW_PYTHON} (make .venv/.made-tensorflow).")
    for ranks in found.values():
        stack.callback(ranks.close)
    return found


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, rounds=7, epochs=5, rank="")
    if given.rank:
        return act_as_rank(given.rank)
    kept = True
    with contextlib.ExitStack() as stack:
        contenders = _started(stack)
        for model in _MODELS:
            measures = {name: functools.partial(ranks.step, model, given.epochs) for name, ranks in contenders.items()}
            epochs = compare(measures, rounds=given.rounds)
            title, targets = f"an epoch of 16 batches, {model}", TARGETS["keras_fit"]["epoch"]
            kept &= report(title, epochs, baseline="distnb", targets=targets)
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
