"""Model.fit with parameter servers on real workers, some of which are killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distnb
from distnb.coordinator import ClusterCoordinator
from distnb.errors import OptionError

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def strategy() -> Iterator[Any]:
    distnb.start(workers=2, ps=2)
    try:
        yield distnb.ParameterServerStrategy()
    finally:
        distnb.stop()


def dataset_fn(context: distnb.InputContext) -> Iterator[Any]:
    """Yield batches forever. The label says whether a row's sum is above 0."""
    generator = np.random.default_rng(context.input_pipeline_id)
    while True:
        x = generator.normal(size=(32, 8)).astype("float32")
        yield x, (x.sum(1, keepdims=True) > 0).astype("float32")


# The next test is the first of this module: the workers have not loaded Keras yet.


def test_metrics_count_on_workers_that_have_not_loaded_keras(strategy: Any) -> None:
    coordinator = ClusterCoordinator(strategy)
    assert not any(coordinator.fetch([coordinator.schedule(lambda: "keras" in sys.modules) for _ in range(8)]))
    with strategy.scope():
        mean = keras.metrics.Mean()
        plain = keras.metrics.Mean()
    for number in range(10):
        coordinator.schedule(lambda number: mean.update_state(number), args=(float(number),))
        plain.update_state(float(number))
    coordinator.join()
    assert (float(mean.result()), float(mean.count)) == (4.5, 10.0)
    assert float(plain.result()) == 4.5


class Largest(keras.metrics.Metric):  # type: ignore[misc]
    """A metric of the user's whose updates do not add up."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, values: Any, _predicted: Any = None, sample_weight: Any = None) -> None:
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(values)))

    def result(self) -> Any:
        return self.largest


class Total(Largest):
    """A metric of the user's whose updates add up."""

    def update_state(self, values: Any, _predicted: Any = None, sample_weight: Any = None) -> None:
        self.largest.assign(self.largest + keras.ops.sum(keras.ops.cast(values, "float32")))


@pytest.mark.parametrize("place", ["scheduled", "fit"])
def test_a_metric_whose_updates_do_not_add_up_is_refused(strategy: Any, tmp_path: Path, place: str) -> None:
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        largest, total = Largest(), Total()
    for number in range(5):
        coordinator.schedule(lambda number: total.update_state(torch.tensor([number, 1.0])), args=(number,))
    coordinator.join()
    assert float(total.result()) == 15
    model = compiled(strategy, tmp_path)
    model.compile("sgd", "mse", metrics=[largest])
    coordinator.schedule(largest.update_state, args=(torch.tensor([0.0]),))  # changes nothing
    coordinator.join()
    if place == "scheduled":
        coordinator.schedule(largest.update_state, args=(torch.tensor([3.0]),))
    with pytest.raises(OptionError, match="updates of the metric largest do not add up"):
        coordinator.join() if place == "scheduled" else model.fit(dataset_fn, steps_per_epoch=3, verbose=0)


class Slow(keras.layers.Layer):  # type: ignore[misc]
    """A layer that records which process computes, and ends it once in a training step if a file says so."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def call(self, x: Any, training: bool = False) -> Any:
        if x.device.type != "meta" and training:
            Path(self.folder, str(os.getpid())).touch()
            doomed = Path(self.folder, "doomed")
            if doomed.exists():
                try:
                    doomed.unlink()
                except FileNotFoundError:  # another process was faster
                    return x
                os.kill(os.getpid(), signal.SIGKILL)
        return x


def compiled(strategy: Any, folder: Path, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [Slow(str(folder)), keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy", "AUC"], **options)
    return model


def test_workers_train_validate_and_evaluate(strategy: Any, tmp_path: Path) -> None:
    model = compiled(strategy, tmp_path, steps_per_execution=5)
    creator = distnb.keras.DatasetCreator(dataset_fn)
    save = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.weights.h5"), save_weights_only=True)
    history = model.fit(
        creator,
        epochs=3,
        steps_per_epoch=50,
        validation_data=creator,
        validation_steps=10,
        callbacks=[save],
        verbose=0,
    ).history
    assert history["loss"][-1] < history["loss"][0]
    assert history["val_accuracy"][-1] > 0.8, "asynchronous steps vary, and a guess has 0.5"
    assert int(model.optimizer.iterations) == 150
    assert len([each for each in tmp_path.iterdir() if each.name.isdigit()]) == 2, "both have computed"
    assert str(os.getpid()) not in {each.name for each in tmp_path.iterdir()}
    x, y = next(dataset_fn(distnb.InputContext(1, 7, 1)))
    found = model.evaluate(x, y, verbose=0, return_dict=True)
    assert found["accuracy"] == pytest.approx(((model.predict(x, verbose=0) > 0.5) == y).mean())
    again = compiled(strategy, tmp_path)
    again.build((None, 8))
    again.load_weights(tmp_path / "model.weights.h5")
    assert again.evaluate(x, y, verbose=0, return_dict=True) == pytest.approx(found)


class Doom(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            (self.folder / "doomed").touch()


def test_another_worker_takes_over_the_steps_of_a_killed_one(strategy: Any, tmp_path: Path) -> None:
    model = compiled(strategy, tmp_path)
    seen: list[tuple[int, float]] = []
    losses: list[float | None] = []

    def note(batch: int, logs: Any) -> None:
        seen.append((batch, float(model.metrics[0].count)))
        losses.append(logs.get("loss"))

    count = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    history = model.fit(dataset_fn, epochs=3, steps_per_epoch=40, callbacks=[Doom(tmp_path), count], verbose=0).history
    assert not (tmp_path / "doomed").exists(), "a worker was killed"
    assert int(model.optimizer.iterations) == 120, "each step was taken once"
    assert len(seen) == 120
    assert 0.0 not in losses, "not updated yet"
    assert [counted for batch, counted in seen if batch == 39] == [40 * 32] * 3, "counted once"
    assert history["loss"][-1] < history["loss"][0]


def test_an_error_in_a_step_ends_the_training(strategy: Any, tmp_path: Path) -> None:
    def broken(context: distnb.InputContext) -> Iterator[Any]:
        yield from (next(dataset_fn(context)) for _ in range(3))
        raise LookupError("the disk is full")

    model = compiled(strategy, tmp_path)
    with pytest.raises(LookupError, match="the disk is full"):
        model.fit(broken, steps_per_epoch=30, verbose=0)
    history = model.fit(dataset_fn, steps_per_epoch=5, verbose=0).history
    assert np.isfinite(history["loss"]).all()
