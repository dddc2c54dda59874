"""Keras's metrics and other stateful objects in custom loops, whose numbers must not depend on the replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import distnb
from distnb.errors import ContextError, OptionError
from tests.keras.keras_cases import LOGITS, X, Y, mlp

rng = np.random.default_rng(7)
TRUE = torch.from_numpy(rng.integers(0, 3, size=11))
PREDICTED = torch.from_numpy(rng.dirichlet(np.ones(3), size=11).astype("float32"))
ONE_HOT = torch.nn.functional.one_hot(TRUE, 3).float()


def batches(strategy: Any, *tensors: torch.Tensor) -> Any:
    """Return batches of 5, 5 and 1: with several replicas some slice is larger, or empty."""
    dataset = torch.utils.data.TensorDataset(*tensors)
    return strategy.distribute_dataset(torch.utils.data.DataLoader(dataset, batch_size=5))


def made() -> dict[str, Any]:
    return {
        "mean": keras.metrics.Mean(),
        "sum": keras.metrics.Sum(),
        "accuracy": keras.metrics.CategoricalAccuracy(),
        "top": keras.metrics.TopKCategoricalAccuracy(2),
        "f1": keras.metrics.F1Score(),  # its variables are created by the first rows
        "auc": keras.metrics.AUC(multi_label=True, num_labels=3),
        "iou": keras.metrics.OneHotMeanIoU(num_classes=3),
        "r2": keras.metrics.R2Score(),
        "own": Largest(),
    }


class Largest(keras.metrics.Metric):
    """A custom metric that returns a variable and a dict, and contains another metric."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.rows = self.add_variable((), "zeros", name="rows")
        self.of_replicas = self.add_variable((), "zeros", aggregation="mean", name="of_replicas")
        self.inner = keras.metrics.Mean()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.rows.assign_add(y_true.shape[0])
        self.of_replicas.assign(2.0)
        self.inner.update_state(y_pred[:, 0])

    def result(self) -> Any:
        return {"rows": self.rows, "of_replicas": self.of_replicas, "inner": self.inner.result()}


def update(metrics: dict[str, Any], true: Any, predicted: Any) -> None:
    for name, metric in metrics.items():
        if name in ("mean", "sum"):
            metric.update_state(predicted[:, 0], sample_weight=predicted[:, 1])
        else:
            metric.update_state(true, predicted)


def read(metrics: dict[str, Any]) -> Any:
    return {
        name: keras.tree.map_structure(lambda leaf: np.asarray(leaf).tolist(), each.result())
        for name, each in metrics.items()
    }


def counted(strategy: Any, folder: Path) -> Any:
    with strategy.scope():
        metrics = made()
    seen, state = [], None
    for _ in range(2):
        for true, predicted in batches(strategy, ONE_HOT, PREDICTED):
            strategy.run(update, args=(metrics, true, predicted))
            seen.append(strategy.run(read, args=(metrics,)))
        seen.append(read(metrics))
        state = [each.numpy().tolist() for each in metrics["auc"].variables]
        assert float(metrics["mean"].total) == pytest.approx(float((PREDICTED[:, 0] * PREDICTED[:, 1]).sum()))
        for metric in metrics.values():
            metric.reset_state()
        assert float(metrics["sum"].result()) == 0.0
    return seen, state


def central(strategy: Any, folder: Path) -> Any:
    """Check that each replica counts its part if variables live once."""
    several = strategy.num_replicas_in_sync > 1
    return counted(distnb.experimental.CentralStorageStrategy() if several else strategy, folder)


def called_in_run(strategy: Any, folder: Path) -> Any:
    """Check that calling a metric, old or new, on a replica updates it and returns the value of all replicas."""
    with strategy.scope():
        mean = keras.metrics.Mean()

    def step(values: Any) -> Any:
        temporary = keras.metrics.Sum()
        return float(mean(values)), float(temporary(values))

    return [strategy.run(step, args=values) for values in batches(strategy, torch.arange(11.0))]


def of_distributed_values(strategy: Any, folder: Path) -> Any:
    with strategy.scope():
        mean = keras.metrics.Mean()
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(ContextError, match="called outside replicas with plain values"):
            mean.update_state([1.0])
    for (values,) in batches(strategy, torch.arange(11.0)):
        mean.update_state(strategy.run(lambda part: part * 2, args=(values,)))
    return float(mean.result())


def made_elsewhere(strategy: Any, folder: Path) -> Any:
    mean, number = keras.metrics.Mean(), keras.Variable(1.0, trainable=False)
    if strategy.num_replicas_in_sync == 1:
        return "refused"
    with pytest.raises(ContextError, match=r"'mean.*/total' was made outside strategy.scope"):
        strategy.run(lambda: mean.update_state([1.0]))
    with pytest.raises(ContextError, match=r"'variable.*' was made outside strategy.scope"):
        strategy.run(lambda: number.assign_add(1.0))
    mean.update_state([3.0])
    number.assign_add(1.0)
    assert (float(mean.result()), float(number)) == (3.0, 2.0), "outside replicas they are unchanged"
    return "refused"


def variables(strategy: Any, folder: Path) -> Any:
    """Check Keras's variables against tf.distribute's rules."""
    size = strategy.num_replicas_in_sync
    own = strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group + 1.0)
    results: dict[str, Any] = {}
    for how in ("sum", "mean", "only_first_replica"):
        with strategy.scope():
            variable = keras.Variable(10.0, trainable=False, aggregation=how)
        strategy.run(variable.assign_add, args=(own,))
        added = float(variable)
        strategy.run(variable.assign, args=(own,))
        results[how] = added, float(variable)
    if size > 1:
        total = size * (size + 1) / 2
        expected = {"sum": total, "mean": total / size, "only_first_replica": 1.0}
        assert results == {how: (10 + each, each) for how, each in expected.items()}
    with strategy.scope():
        plain = keras.Variable(10.0, trainable=False)
        parts = keras.Variable(0.0, trainable=False, aggregation="sum", synchronization="on_read")
    strategy.run(lambda: plain.assign_add(1.0))
    if size > 1:
        with pytest.raises(OptionError, match="assign different values to the Keras variable"):
            strategy.run(plain.assign_add, args=(own,))
    plain.assign_add(1.0)
    strategy.run(parts.assign_add, args=(own,))
    assert float(parts) == size * (size + 1) / 2
    assert size == 1 or "this replica's part=" in repr(parts)
    return float(plain)


class WithMetrics(keras.Model):
    """A model with a layer that counts its own rows, and a step that updates a metric of the program."""

    def __init__(self, far: Any) -> None:
        super().__init__()
        self.dense, self.rows = keras.layers.Dense(2), keras.metrics.Sum("rows")
        self.keep_far = lambda: far

    def call(self, x: Any) -> Any:
        self.rows.update_state(keras.ops.ones(x.shape[0]))
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.keep_far().update_state(data[0])
        return logs | {"rows": self.rows.result(), "far": self.keep_far().result()}


def in_models(strategy: Any, folder: Path) -> Any:
    """Update metrics in `fit` and in a custom loop in turn."""
    with strategy.scope():
        far = keras.metrics.Mean("far")
        model = WithMetrics(far)
        model.dense.build((None, 6))
        model.compile("sgd", LOGITS, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(1, name="top")])

    def step(x: Any, y: Any) -> None:
        far.update_state(x)
        model.compute_metrics(x, y, model(x))

    def loop() -> Any:
        for x, y in batches(strategy, torch.from_numpy(X[:11]), torch.from_numpy(Y[:11])):
            strategy.run(step, args=(x, y))
        return {name: float(value) for name, value in model.get_metrics_result().items()}

    seen: list[Any] = []

    class Reads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append([float(far.result()), float(self.model.rows.result()), float(self.model.rows.total)])

    results = [model.fit(X[:22], Y[:22], batch_size=7, shuffle=False, verbose=0, callbacks=[Reads()]).history]
    results += [loop(), float(far.result()), float(model.rows.result()), float(far.count)]
    results += [model.train_on_batch(X[:5], Y[:5], return_dict=True), float(far.result())]
    results += [model.evaluate(X[:9], Y[:9], verbose=0, return_dict=True)]
    results += [keras.tree.map_structure(float, model.get_metrics_result()), loop()]
    # On a batch of one row, replicas without a row compute one that is not counted.
    model.rows.reset_state()
    results += [model.train_on_batch(X[:1], Y[:1], return_dict=True), float(model.rows.result())]
    assert np.allclose(seen, [[X[:22].mean(), 22.0, 22.0]] if distnb.is_chief() else [])
    return keras.tree.map_structure(float, results)


def checkpoints(strategy: Any, folder: Path) -> Any:
    """Check that a checkpoint holds the combined value of all parts."""
    with strategy.scope():
        mean, generator = keras.metrics.Mean(), keras.random.SeedGenerator(3)
        number = keras.Variable(2.0, trainable=False)
        normal = keras.layers.Normalization()
    strategy.run(mean.update_state, args=next(iter(batches(strategy, torch.arange(11.0)))))
    drawn = generator.next().tolist()
    normal.adapt(X)
    path = distnb.Checkpoint(mean=mean, generator=generator, number=number, normal=normal).write(folder / "one")
    value, state = float(mean.result()), [float(each) for each in mean.variables]
    mean.reset_state()
    following = generator.next().tolist()
    number.assign(0.0)
    distnb.Checkpoint(mean=mean, generator=generator, number=number).restore(path)
    assert (float(mean.result()), [float(each) for each in mean.variables]) == (value, state)
    assert generator.next().tolist() == following != drawn
    for values in batches(strategy, torch.arange(11.0)):
        strategy.run(mean.update_state, args=values)
    return value, state, float(mean.result()), float(number), [each.numpy().tolist() for each in normal.variables]


def refused_in_scopes(strategy: Any, folder: Path) -> Any:
    """Check that objects not made in the scope are not compiled, fitted or adapted on several replicas."""
    metric, model = keras.metrics.MeanSquaredError(), mlp()
    with strategy.scope():
        own, normal = mlp(), keras.layers.Normalization()
    if strategy.num_replicas_in_sync > 1:
        with strategy.scope(), pytest.raises(OptionError, match=r"metric .*was made outside strategy.scope\(\)"):
            own.compile("sgd", "mse", metrics=[metric])
        with strategy.scope(), pytest.raises(OptionError, match=r"model .* was made outside strategy.scope\(\)"):
            model.compile("sgd", "mse")
        data = strategy.distribute_dataset(torch.from_numpy(X), batch_size=5)
        with pytest.raises(OptionError, match="adapt"):
            normal.adapt(data)
        with pytest.raises(ContextError, match="adapt"):
            strategy.run(normal.adapt, args=(next(iter(data)),))
    model.compile("sgd", "mse", metrics=[metric])
    own.compile("sgd", "mse", metrics=["mae"])
    normal.adapt(X)
    return own.fit(X, X[:, :2], shuffle=False, verbose=0).history, normal(X[:2]).tolist()
