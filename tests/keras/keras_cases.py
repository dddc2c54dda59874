"""Trainings with Keras whose numbers must be the same on any number of replicas. Each returns JSON values."""

from __future__ import annotations

import importlib
import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers

import distnb

rng = np.random.default_rng(0)
X = rng.normal(size=(50, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")
WEIGHTS = rng.uniform(0.1, 2.0, size=50).astype("float32")
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def summary(model: Any, history: Any = None) -> dict[str, Any]:
    shown = {"weights": [each.tolist() for each in model.get_weights()]}
    return shown | ({"history": history.history} if history is not None else {})


def mlp(*more: Any, **first: Any) -> Any:
    return keras.Sequential([layers.Dense(8, activation="tanh", **first), *more, layers.Dense(2)])


def reductions(strategy: Any) -> Any:
    results = []
    for reduction in ("sum", "mean_with_sample_weight"):
        with strategy.scope():
            model = mlp()
            model.compile(
                keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction)
            )
        results.append(summary(model, model.fit(X, Y, sample_weight=WEIGHTS, batch_size=16, epochs=2, verbose=0)))
    return results


def averaged_gradients(strategy: Any) -> Any:
    """Train with a strategy that averages gradients. Keras's losses are those of the whole batch in any case."""
    several = strategy.num_replicas_in_sync > 1
    return reductions(distnb.MirroredStrategy(gradient_reduction="mean") if several else strategy)


def masks(strategy: Any) -> Any:
    words = rng_words()
    with strategy.scope():
        model = keras.Sequential(
            [layers.Embedding(9, 4, mask_zero=True), layers.LSTM(5, return_sequences=True), layers.Dense(9)]
        )
        model.compile("adam", LOGITS, metrics=["accuracy"])
    history = model.fit(words, words, batch_size=8, epochs=2, verbose=0)
    return summary(model, history), model.evaluate(words, words, batch_size=5, verbose=0)


def rng_words() -> Any:
    words = np.random.default_rng(3).integers(1, 9, size=(21, 6))
    for row, length in enumerate(np.random.default_rng(4).integers(1, 7, size=21)):
        words[row, length:] = 0
    return words


def several_steps_at_once(strategy: Any) -> Any:
    """Run several steps per execution, which Keras supports on torch since 3.16 and refuses before."""
    with strategy.scope():
        model = mlp()
        model.compile("adam", LOGITS, metrics=["accuracy"], steps_per_execution=3)
    if keras.__version__ < "3.16":
        with pytest.raises(ValueError, match="steps_per_execution"):
            model.fit(X, Y, batch_size=10, verbose=0)
        return "refused"
    return {"steps": int(model.fit(X, Y, batch_size=10, verbose=0).params["steps"])} | summary(model)


class Pieces(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return X[index * 10 : index * 10 + 9], Y[index * 10 : index * 10 + 9]


def generated() -> Iterator[Any]:
    while True:
        yield from ((X[first : first + 11], Y[first : first + 11]) for first in (0, 11, 22))


def kinds_of_data(strategy: Any) -> Any:
    torch.manual_seed(1)
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    kinds: dict[str, Any] = {
        "loader with workers": ((torch.utils.data.DataLoader(pairs, batch_size=16, shuffle=True, num_workers=1),), {}),
        "pieces": ((Pieces(),), {"shuffle": True}),
        "generator": ((generated(),), {"steps_per_epoch": 4}),
    }
    results = {}
    for name, (data, more) in kinds.items():
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = mlp()
            model.compile("adam", LOGITS, metrics=["accuracy"])
        results[name] = summary(model, model.fit(*data, epochs=2, verbose=0, **more))
    return results


def mixed_precision(strategy: Any) -> Any:
    with strategy.scope():
        model = mlp(dtype="mixed_bfloat16")
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=128.0)
        model.compile(optimizer, LOGITS)
    return model.fit(X, Y, batch_size=16, epochs=2, verbose=0).history


def predicted_before_it_is_built(strategy: Any) -> Any:
    with strategy.scope():
        model = mlp()
    first = model.predict(X[:7], batch_size=3, verbose=0).tolist()
    model.compile("sgd", LOGITS)
    model.fit(X, Y, batch_size=16, verbose=0)
    return first, summary(model)


def fitted_in_the_scope(strategy: Any) -> Any:
    """Do everything in the scope, as the course's function does. Each replica still has its rows."""
    rows = []

    class Counts(layers.Layer):
        def call(self, x: Any) -> Any:
            rows.append(x.shape[0])
            return x

    distnb.on_chief(mlp)()  # from here on its layers have other names on the chief
    with strategy.scope():
        model = mlp(Counts())
        model.compile("adam", LOGITS, metrics=["accuracy"])
        history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0)
        evaluated = model.evaluate(X, Y, batch_size=16, verbose=0)
    n = strategy.num_replicas_in_sync
    strategy.assert_in_sync(model)
    assert 16 // n <= max(rows[-4:]) <= math.ceil(16 / n)
    return summary(model, history), evaluated, summary(model, model.fit(X, Y, batch_size=16, verbose=0))


def built_by_its_first_call(strategy: Any) -> Any:
    """Build a layer after the chief has made other layers, which Keras counts in the names of weights."""
    distnb.on_chief(mlp)()
    with strategy.scope():
        layer = layers.Dense(2)
    strategy.run(lambda: layer(torch.ones(2, 6)))
    strategy.assert_in_sync([each.value for each in layer.weights])
    return [each.numpy().tolist() for each in layer.weights]


def refused(strategy: Any) -> Any:
    """Check that unsupported data raises an error without side effects."""
    with strategy.scope():
        model = mlp()
        model.compile("sgd", LOGITS)
        no_rows = keras.Sequential([layers.Lambda(lambda x: keras.ops.sum(x))])
        no_rows.compile("sgd", "mse")
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(distnb.errors.OptionError, match="distributed already"):
            model.fit(distnb.PerReplica([X] * strategy.num_replicas_in_sync), verbose=0)
        with pytest.raises(distnb.errors.OptionError, match="got batch_size with a distributed dataset"):
            model.fit(strategy.distribute_dataset([(X, Y)]), batch_size=3, verbose=0)
        with pytest.raises(distnb.errors.OptionError, match=r"DatasetCreator\(generated\)"):
            model.fit(generated, verbose=0)
        with pytest.raises(distnb.errors.StructureError, match="one row for each"):
            no_rows.predict(X, verbose=0)
        for method in (model.fit, model.evaluate, model.train_on_batch, model.test_on_batch):
            with pytest.raises(distnb.errors.ContextError, match="in a function that strategy"):
                strategy.run(method, args=(X, Y))
        with pytest.raises(distnb.errors.ContextError, match="predict_on_batch outside"):
            strategy.run(model.predict_on_batch, args=(X,))
    return summary(model, model.fit(X, Y, batch_size=16, shuffle=False, verbose=0))


def loaded(shuffle: bool = False) -> Any:
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(pairs, batch_size=16, shuffle=shuffle)


def of_pipelines(context: distnb.InputContext) -> Any:
    """Return each pipeline's rows in batches of 3. Together they are all rows."""
    rows = slice(context.input_pipeline_id, None, context.num_input_pipelines)
    return [(X[rows][first : first + 3], Y[rows][first : first + 3]) for first in range(0, len(X[rows]), 3)]


def distributed_data(strategy: Any) -> Any:
    """Train on data of which each replica reads a part. Global batches consist of all parts."""
    results = []
    for shuffle in (False, True):
        data = strategy.distribute_dataset(loaded(shuffle))
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = mlp()
            model.compile("sgd", LOGITS, metrics=["accuracy"])
        history = model.fit(data, epochs=2, verbose=0, validation_data=data)
        results += [summary(model, history), model.evaluate(data, verbose=0), model.predict(data, verbose=0).tolist()]
    once = ((X[first : first + 16], Y[first : first + 16]) for first in range(0, 50, 16))
    results.append(model.fit(strategy.distribute_dataset(once), verbose=0).history)
    creators = [
        distnb.keras.DatasetCreator(lambda context: loaded() if context.num_input_pipelines == 1 else None),
        distnb.keras.DatasetCreator(lambda: loaded()),
    ]
    results += [model.predict(creators[1], verbose=0).tolist(), model.evaluate(creators[1], verbose=0)]
    # Every replica is a pipeline. Each global batch has 3 rows of each, and the last one the remaining rows.
    options = distnb.InputOptions(replication_mode="per_replica")
    creators.append(distnb.keras.DatasetCreator(of_pipelines, options))
    n = strategy.num_replicas_in_sync
    whole = keras.ops.convert_to_numpy(model.predict(creators[2], verbose=0))
    parts = [of_pipelines(distnb.InputContext(n, rank, 1)) for rank in range(n)]
    rows = np.concatenate([part[step][0] for step in range(len(parts[0])) for part in parts if step < len(part)])
    assert np.allclose(whole, model.predict(rows, verbose=0), atol=1e-6)
    per_replica = model.evaluate(creators[0], verbose=0, return_dict=True)
    assert abs(per_replica["loss"] - model.evaluate(X, Y, verbose=0)[0]) < 1e-5
    return results


def different_data(strategy: Any) -> Any:
    """Check that replicas that read different data raise an error in every loop, and that the next loop works."""
    with strategy.scope():
        model = mlp()
        model.compile("sgd", LOGITS)
    rank, n = distnb.replica_id(), strategy.num_replicas_in_sync
    if n > 1:
        later = X.copy()
        later[30:] += rank
        calls = [
            lambda: model.fit(X[rank::n], Y[rank::n], verbose=0),
            lambda: model.fit(later, Y, batch_size=16, shuffle=False, verbose=0),
            lambda: model.fit(X, Y, verbose=0, validation_data=(X[rank:], Y[rank:])),
            lambda: model.evaluate(X[rank:], Y[rank:], verbose=0),
            lambda: model.predict(X[: 20 + rank], verbose=0),
            lambda: model.train_on_batch(X[:4] + rank, Y[:4]),
        ]
        for call in calls:
            with pytest.raises(distnb.errors.StructureError, match=r"read different data at batch .*auto_shard_policy"):
                call()
        with pytest.raises(distnb.errors.StructureError, match=r"batch 3: .*replica 1 has no more batches"):
            model.fit(X[: 48 - 16 * min(rank, 1)], Y[: 48 - 16 * min(rank, 1)], batch_size=16, shuffle=False, verbose=0)
    return model.fit(X, Y, epochs=2, shuffle=False, verbose=0).history["loss"][0] > 0


def run_all(cases: dict[str, list[str]], strategy: Any, folder: str) -> dict[str, Any]:
    """Run cases, named by module, and return their results by name, or the text of their error.

    A case takes a strategy, and a folder of its own if it writes files.
    """
    results: dict[str, Any] = {"replicas": strategy.num_replicas_in_sync, "keras": keras.__version__}
    for module, names in cases.items():
        for name in names:
            case = getattr(importlib.import_module(f"tests.keras.{module}"), name)
            here = Path(folder, name)
            here.mkdir(parents=True, exist_ok=True)
            keras.utils.set_random_seed(0)
            try:
                results[name] = {"value": case(*(strategy, here)[: case.__code__.co_argcount])}
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    return results
