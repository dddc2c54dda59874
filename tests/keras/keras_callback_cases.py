"""Trainings with callbacks whose numbers and files must be the same on any number of replicas."""

from __future__ import annotations

import contextlib
import csv
import io
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import distnb
from tests.keras.keras_cases import LOGITS, X, Y, mlp, summary

VALIDATION = {"validation_data": (X[:20], Y[:20])}
ONE_HOT = {"validation_data": (X[:20], np.eye(2)[Y[:20]])}
LOGGED = ("accuracy", "loss", "squares")


def made(strategy: Any, rate: float = 0.05) -> Any:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = mlp()
        model.compile(keras.optimizers.Adam(rate), LOGITS, metrics=["accuracy"])
    return model


def fit(model: Any, callbacks: list[Any], epochs: int = 4, **more: Any) -> Any:
    return model.fit(X, Y, batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks, **(VALIDATION | more))


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def model_checkpoint(strategy: Any, folder: Path) -> Any:
    """Name a different file on each replica, as workers do in Keras's guide: the chief writes and reads one."""
    model = made(strategy)
    own = folder / f"worker{distnb.replica_id()}"
    callbacks = [
        keras.callbacks.ModelCheckpoint(own / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True, monitor="val_loss"),
        keras.callbacks.ModelCheckpoint(folder / "steps{batch}.weights.h5", save_weights_only=True, save_freq=3),
    ]
    history = fit(model, callbacks)
    again = made(strategy)
    again.build((None, 6))
    with pytest.raises(OSError, match=r"unable to open file.*worker0/5"):
        again.load_weights(own / "5.weights.h5")
    again.load_weights(own / "4.weights.h5")
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), again.get_weights(), strict=True))
    with strategy.scope():
        loaded = keras.models.load_model(folder / "best.keras")
    evaluated = loaded.evaluate(X, Y, batch_size=16, verbose=0)
    return summary(model, history), evaluated, summary(loaded, fit(loaded, [], epochs=1)), names(folder)


class Breaks(keras.callbacks.Callback):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            raise InterruptedError("here")


def backup_and_restore(strategy: Any, folder: Path) -> Any:
    unbroken = fit(made(strategy), [], shuffle=False).history
    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    fit(made(strategy), [backup], epochs=2, shuffle=False)
    assert not names(folder), "it is deleted after a successful training"
    with pytest.raises(InterruptedError):
        fit(made(strategy), [backup, Breaks(2)], shuffle=False)
    assert names(folder)
    if distnb.is_chief() and strategy.num_replicas_in_sync > 1:  # as if killed while Keras wrote it
        (folder / "backup" / "training_metadata.json").write_text('{"epo')
    model = made(strategy)
    went_on = fit(model, [keras.callbacks.BackupAndRestore(folder / "backup")], shuffle=False).history
    return unbroken["loss"][2:], went_on["loss"], summary(model), names(folder)


class OwnError(Exception):
    def __init__(self, hook: str, *, details: list[int]) -> None:
        super().__init__(hook)
        self.details = details


def failing(hook: str) -> Any:
    def fails(*_args: Any, **_kwargs: Any) -> None:
        raise OwnError(hook, details=[1])

    return type("Fails", (keras.callbacks.Callback,), {f"on_{hook}": fails})()


def errors(strategy: Any, folder: Path) -> Any:
    """Raise an error in each hook of the chief's callback: all replicas raise it, and the next `fit` works."""
    model, caught = made(strategy), []
    for hook in ("train_begin", "epoch_begin", "batch_begin", "train_batch_end", "test_batch_begin", "epoch_end"):
        with pytest.raises(OwnError) as raised:
            fit(model, [failing(hook)], epochs=1, shuffle=False)
        caught.append((str(raised.value), raised.value.details))
    for hook in ("predict_batch_end", "predict_end"):
        with pytest.raises(OwnError, match=hook):
            model.predict(X, verbose=0, callbacks=[failing(hook)])
    with pytest.raises(OwnError, match="test_end"):
        model.evaluate(X, Y, verbose=0, callbacks=[failing("test_end")])
    with pytest.raises(ZeroDivisionError):
        fit(model, [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch / 0)])
    saves = keras.callbacks.ModelCheckpoint("/proc/nowhere/a.weights.h5", save_weights_only=True, save_freq=2)
    with pytest.raises(OSError, match="nowhere"):
        fit(model, [saves])
    return caught, summary(model, fit(model, [], epochs=1, shuffle=False))


class Lowers(keras.callbacks.Callback):
    """A callback that changes the learning rate after each batch, and ends training in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.9
        if float(self.model.optimizer.learning_rate) < 0.03:
            self.model.stop_training = True


def after_batches(strategy: Any, folder: Path) -> Any:
    model = made(strategy)
    return summary(model, fit(model, [Lowers()])), float(model.optimizer.learning_rate)


def not_a_number(strategy: Any, folder: Path) -> Any:
    model = made(strategy)
    bad = X.copy()
    bad[40] = np.nan
    history = model.fit(
        bad, Y, batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=[keras.callbacks.TerminateOnNaN()]
    )
    return len(history.history["loss"]), model.stop_training


class Keeps(keras.callbacks.Callback):
    """A callback that holds the program's objects, and records each epoch."""

    def __init__(self, model: Any, data: Any) -> None:
        super().__init__()
        self.net, self.data, self.losses = model, data, []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])


def logs(strategy: Any, folder: Path) -> Any:
    """Check that a callback's file is closed, and that all replicas know its records and keep their objects."""
    model = made(strategy)
    keeps, logger = Keeps(model, X), keras.callbacks.CSVLogger(folder / "log.csv")
    history = fit(model, [keeps, logger], epochs=3)
    assert keeps.net is model
    assert keeps.data is X
    assert keeps.losses == history.history["loss"]
    assert strategy.num_replicas_in_sync == 1 or logger.csv_file is None
    with (folder / "log.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


class Counted(keras.metrics.MeanSquaredError):
    """A metric that counts the computations of its result."""

    computed = 0

    def result(self) -> Any:
        self.computed += 1
        return super().result()


class ReadsBatches(keras.callbacks.Callback):
    """A callback that keeps the logs of each batch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with self.path.open("a") as file:
            file.write(f"{logs['loss']} {logs['squares']}\n")

    on_test_batch_end = on_train_batch_end


def batch_logs(strategy: Any, folder: Path) -> Any:
    """Check that callbacks get the logs of each batch, and that these are not computed if nobody reads them."""
    model = made(strategy)
    with strategy.scope():
        counted = Counted(name="squares")
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["accuracy", counted])
    computed = []
    for callbacks in ([], [], [ReadsBatches(folder / "batches")]):  # the first one builds the model
        counted.computed = 0
        history = model.fit(X, np.eye(2)[Y], batch_size=16, epochs=2, verbose=0, callbacks=callbacks, **ONE_HOT)
        computed.append(counted.computed)
        assert sorted(history.history) == ["accuracy", "loss", "squares", *(f"val_{name}" for name in LOGGED)]
    if strategy.num_replicas_in_sync > 1:
        assert computed[1] == 4, computed  # two epochs and their validations
        assert (computed[2] > 4) is distnb.is_chief(), computed
    return summary(model, history), [float(each) for each in (folder / "batches").read_text().split()]


def tensorboard(strategy: Any, folder: Path) -> Any:
    """Check that there is one file in each of the two folders, with the values of the history."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = distnb.keras.TensorBoard(folder, histogram_freq=2, update_freq=2)
    history = fit(made(strategy), [board]).history
    if strategy.num_replicas_in_sync > 1:
        strategy.gather(strategy.run(lambda: np.zeros(1)), axis=0)  # all wait for the chief
    written = {each: EventAccumulator(str(folder / each)).Reload() for each in ("train", "validation")}
    for where, name in (("train", "loss"), ("validation", "val_loss")):
        losses = [point.value for point in written[where].Scalars("epoch_loss")]
        assert np.allclose(losses, history[name], atol=1e-6), where
    counts = {each: (read.Tags()["scalars"], len(read.Tags()["histograms"])) for each, read in written.items()}
    return counts, len(written["train"].Scalars("batch_loss")), [Path(name).parent.name for name in names(folder)]


class CallsModel(keras.callbacks.Callback):
    """A callback that calls the model, as for a confusion matrix, on the chief alone."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        found = self.model.predict(X[:9], verbose=0).argmax(axis=1)
        seen = self.model.evaluate(X[:9], Y[:9], verbose=0, return_dict=True)
        with self.path.open("a") as file:
            file.write(f"{epoch} {found.tolist()} {seen['accuracy']:.4f}\n")


def own_callbacks(strategy: Any, folder: Path) -> Any:
    model = made(strategy)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        history = fit(model, [distnb.keras.EpochDots(report_every=2), CallsModel(folder / "calls")])
    lines = printed.getvalue().splitlines()
    assert [line[:7] for line in lines] == (["epoch 1", "..", "epoch 3", ".."] if distnb.is_chief() else [])
    return summary(model, history), (folder / "calls").read_text()


def saved_and_loaded(strategy: Any, folder: Path) -> Any:
    model = made(strategy)
    fit(model, [], epochs=1)
    model.save(folder / "model.keras")  # all replicas call it and wait for the chief
    keras.models.load_model(folder / "model.keras")
    model.save_weights(folder / f"own{distnb.replica_id()}.weights.h5")
    if distnb.is_chief():
        model.save_weights(folder / "chief.weights.h5")
    distnb.on_chief(model.save)(folder / "model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(folder / "model.keras")
    return summary(loaded, fit(loaded, [], epochs=2)), loaded.predict(X[:5], verbose=0).tolist(), names(folder)


def checkpoint(strategy: Any, folder: Path) -> Any:
    """Check that distnb's checkpoints resume model and optimizer, whatever Keras calls their variables."""
    model = made(strategy)
    fit(model, [], epochs=1, shuffle=False)
    path = distnb.Checkpoint(model=model).write(folder / "one")
    rest = fit(model, [], epochs=2, shuffle=False)
    other = made(strategy)
    other.build((None, 6))
    distnb.Checkpoint(model=other).restore(path)
    again = fit(other, [], epochs=2, shuffle=False)
    assert np.allclose(rest.history["loss"], again.history["loss"], atol=1e-6)
    with pytest.raises(distnb.errors.OptionError, match="first batch"):
        distnb.Checkpoint(model=made(strategy)).write(folder / "two")
    return summary(other, again), Path(path).name


class Sees(keras.layers.Layer):
    """A layer that keeps its latest input."""

    def call(self, x: Any) -> Any:
        self.seen = x.detach().clone()
        return x


def dropout(strategy: Any, folder: Path) -> Any:
    """Check that dropout differs between the rows of different replicas."""
    with strategy.scope():
        sees = Sees()
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), sees, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((6, 64), "float32"), np.ones((6, 1)), verbose=0)
    rows = strategy.gather(strategy.run(lambda: sees.seen), axis=0)
    assert len({tuple(row) for row in rows.tolist()}) == 6
    return "as expected"
