"""Model.fit with servers and workers in this process, compared with Keras alone."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import distnb
from distnb.errors import CannotTravelError
from distnb.partitioners import FixedShardsPartitioner
from distnb.runtime.this_process import this_process
from distnb.servers.coordinator.per_worker import DatasetMaker, PerWorkerDataset
from distnb.servers.variables import roles
from distnb.servers.variables.here import servers_here
from tests.servers.test_server_variables import InHouse, Worker, packer_of

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
parameter_servers = importlib.import_module("distnb.servers.keras.parameter_servers")
# Keras causes it for each array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Ended:
    """The result of a finished closure."""

    ended, state = True, "done"

    def __init__(self, value: Any) -> None:
        self.value = value

    def fetch(self) -> Any:
        return self.value


class Coordinator:
    """A ClusterCoordinator whose closures run immediately, on one worker after the other."""

    latest: Coordinator
    reading: Any = None

    def __init__(self, strategy: Any) -> None:
        self.packer = packer_of(strategy)
        servers = strategy.runtime.access.requests.servers
        self.workers = [Worker(servers, index) for index in servers_here.link().workers]
        self.numbers = itertools.count(1)
        self.scheduled = 0
        Coordinator.latest = self

    def schedule(self, function: Any, args: Any = (), kwargs: Any = None) -> Ended:
        worker = self.workers[self.scheduled % len(self.workers)]
        self.scheduled += 1
        return Ended(worker.run(self.packer, next(self.numbers), function, *args, **(kwargs or {})))

    def create_per_worker_dataset(self, function: Any) -> PerWorkerDataset:
        return PerWorkerDataset(DatasetMaker(function, len(self.workers), 1), "dataset")

    def join(self) -> None:
        pass

    def wait(self, values: Any, left: int) -> None:
        pass

    def forget(self, obj: Any) -> None:
        self.packer.forget(obj)


class Late(Coordinator):
    """A coordinator whose workers finish a closure when the next one is scheduled, or when it waits for all."""

    waiting: Callable[[], None] | None = None

    def schedule(self, function: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.join()
        later = SimpleNamespace(ended=False, state="done")

        def run() -> None:
            ended = Coordinator.schedule(self, function, args, kwargs)
            later.ended, later.fetch = True, ended.fetch

        self.waiting = run
        return later

    def join(self) -> None:
        run, self.waiting = self.waiting, None
        if run is not None:
            run()

    def wait(self, values: Any, left: int) -> None:
        if not left:
            self.join()


@pytest.fixture
def workers() -> int:
    return 1


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, workers: int) -> Iterator[InHouse]:
    house = InHouse(2)
    monkeypatch.setattr(parameter_servers, "ClusterCoordinator", Coordinator)
    link = SimpleNamespace(servers=house, replicas_per_worker=1, workers=tuple(range(workers)))
    monkeypatch.setattr(servers_here, "link", lambda: link)
    monkeypatch.setattr(servers_here, "require", lambda resolver: None)
    monkeypatch.setattr(servers_here, "access", None)
    roles._runtimes.clear()
    yield house
    roles._runtimes.clear()


@pytest.fixture
def strategy(servers: InHouse) -> Any:
    return distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2))


def batches(count: int = 1000) -> list[tuple[Any, Any]]:
    """Return the same batches at each call, of a regression with two labels."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(count, 6, 4)).astype("float32")
    return [(each, (each.sum(1, keepdims=True) > 0).astype("float32")) for each in x]


def model_of(kind: str) -> Any:
    keras.utils.set_random_seed(4)
    layers = [
        keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
    if kind == "sequential":
        return keras.Sequential(layers)
    if kind == "functional":
        end = start = keras.Input((4,))
        for layer in layers:
            end = layer(end)
        return keras.Model(start, end)
    return Subclassed(layers)


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.all = layers

    def call(self, x: Any, training: bool = False) -> Any:
        for layer in self.all:
            x = layer(x, training=training) if isinstance(layer, keras.layers.BatchNormalization) else layer(x)
        return x


def pair(strategy: Any, build: Callable[[], Any], compiled: Callable[[], dict[str, Any]]) -> tuple[Any, Any]:
    """Return a model of Keras alone, and an equal one on servers."""
    plain = build()
    plain.compile(**compiled())
    with strategy.scope():
        model = build()
        model.compile(**compiled())
    return plain, model


def same(model: Any, plain: Any, tolerance: float = 1e-6) -> None:
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=1e-5)


COMPILED = {
    "sgd": lambda: {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "binary_crossentropy"},
    "adam": lambda: {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae", "AUC"]},
}


# Each two values occur together.
@pytest.mark.parametrize(
    ("kind", "compiled", "workers"),
    [
        ("sequential", "sgd", 1),
        ("sequential", "adam", 2),
        ("functional", "sgd", 2),
        ("functional", "adam", 1),
        ("subclassed", "sgd", 1),
        ("subclassed", "adam", 2),
    ],
)
def test_fit_trains_like_in_one_process(strategy: Any, kind: str, compiled: str) -> None:
    plain, model = pair(strategy, lambda: model_of(kind), COMPILED[compiled])
    data = batches(12)
    expected = plain.fit((each for each in data), epochs=2, steps_per_epoch=6, verbose=0).history
    # Workers in turn read one sequence: the first one its first batch, and so on.
    count = len(servers_here.link().workers)
    creator = distnb.keras.DatasetCreator(lambda context: batches(12)[context.input_pipeline_id :: count])
    found = model.fit(creator, epochs=2, steps_per_epoch=6, verbose=0).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    same(model, plain)
    assert int(model.optimizer.iterations) == 12
    assert Coordinator.latest.scheduled == 12
    for one, other in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6, rtol=1e-4, err_msg=one.path)
    x = data[0][0]
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)


def small() -> Any:
    keras.utils.set_random_seed(4)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])


def both(strategy: Any, build: Callable[[], Any], compiled: Callable[[], dict[str, Any]], **fit: Any) -> Any:
    """Fit both on the same batches, and return them with their histories."""
    plain, model = pair(strategy, build, compiled)
    callbacks = fit.pop("callbacks", list)
    options = {"epochs": 2, "steps_per_epoch": 5, "verbose": 0, **fit}
    expected = plain.fit((each for each in batches(40)), callbacks=callbacks(), **options).history
    found = model.fit(lambda: batches(40), callbacks=callbacks(), **options).history
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    return plain, model


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.001),
    "scaled": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=128.0, clipnorm=0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "average": lambda: keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulated": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lion": lambda: keras.optimizers.Lion(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_like_in_one_process(strategy: Any, name: str) -> None:
    plain, model = both(strategy, small, lambda: {"optimizer": OPTIMIZERS[name](), "loss": "mse"})
    same(model, plain)
    for one, other in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6, rtol=1e-4, err_msg=one.path)
    assert float(model.optimizer.learning_rate) == pytest.approx(float(plain.optimizer.learning_rate))
    assert type(model.optimizer).__name__ == type(plain.optimizer).__name__


def test_excluded_weights_do_not_decay(strategy: Any) -> None:
    def optimizer() -> Any:
        made = keras.optimizers.SGD(0.1, weight_decay=0.5)
        made.exclude_from_weight_decay(var_names=["bias"])
        return made

    plain, model = both(strategy, small, lambda: {"optimizer": optimizer(), "loss": "mse"})
    same(model, plain)


class Halving(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.2 / (epoch + 1)
        self.model.optimizer.momentum = 0.5 * epoch
        self.model.layers[-1].bias.assign([float(epoch)])


def test_changes_by_callbacks_reach_the_servers(strategy: Any) -> None:
    plain, model = both(
        strategy,
        small,
        lambda: {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse"},
        callbacks=lambda: [Halving(), keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=9)],
        epochs=4,
    )
    same(model, plain)
    assert float(model.optimizer.learning_rate) == pytest.approx(float(plain.optimizer.learning_rate))


class OwnStep(keras.Model):  # type: ignore[misc]
    """A model with its own loss, metric and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(3)
        self.last = keras.layers.Dense(1)
        self.mean = keras.metrics.Mean(name="mine")

    def call(self, x: Any) -> Any:
        hidden = self.inner(x)
        self.add_loss(0.1 * keras.ops.mean(hidden**2))
        return self.last(hidden)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        loss.backward()
        variables = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply_gradients([(each.value.grad, each) for each in variables])
        self.mean.update_state(loss)
        return {"mine": self.mean.result(), "batch": loss.detach()}


@pytest.mark.parametrize("steps", [1, 4])
def test_a_custom_train_step_is_used(strategy: Any, steps: int) -> None:
    def compiled() -> dict[str, Any]:
        return {"optimizer": "adam", "loss": "mse"}

    def build() -> Any:
        keras.utils.set_random_seed(1)
        made = OwnStep()
        made(np.zeros((1, 4), "float32"))
        return made

    plain, model = pair(strategy, build, compiled)
    model.compile(**compiled(), steps_per_execution=steps)
    expected = plain.fit((each for each in batches(20)), epochs=2, steps_per_epoch=6, verbose=0).history
    found = model.fit(lambda: batches(20), epochs=2, steps_per_epoch=6, verbose=0).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    same(model, plain)
    assert Coordinator.latest.scheduled == (12 if steps == 1 else 4), "4 + 2 steps in each epoch"


def test_arrays_and_loaders_are_read_once(strategy: Any) -> None:
    x, y = (np.concatenate(each) for each in zip(*batches(10), strict=True))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=7
    )
    compiled = {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"]}
    plain, model = pair(strategy, small, lambda: compiled)
    options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0, "batch_size": 8}
    expected = plain.fit(x, y, steps_per_epoch=8, validation_data=(x, y), **options).history
    found = model.fit(x, y, steps_per_epoch=8, validation_data=(x, y), **options).history
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)
    same(model, plain)
    np.testing.assert_allclose(model.evaluate(loader, verbose=0), plain.evaluate(loader, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.predict(loader, verbose=0), plain.predict(loader, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.train_on_batch(x, y), plain.train_on_batch(x, y), rtol=1e-5)
    same(model, plain)


def test_workers_validate_and_evaluate(strategy: Any) -> None:
    plain, model = both(
        strategy, small, lambda: {"optimizer": "adam", "loss": "mse", "metrics": ["mae"]}, initial_epoch=1
    )
    expected = plain.evaluate((each for each in batches(9)), verbose=0, return_dict=True)
    creator = distnb.keras.DatasetCreator(lambda: batches(9))
    found = model.evaluate(creator, steps=9, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-5)
    history = model.fit(
        creator, steps_per_epoch=1, validation_data=creator, validation_steps=9, verbose=0, callbacks=[ZeroRate()]
    ).history
    assert {name: values[0] for name, values in history.items() if "val" in name} == pytest.approx(
        {f"val_{name}": value for name, value in found.items()}, rel=1e-5
    )


class ZeroRate(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_begin(self, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.0


class Seen(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append((batch, float(logs["loss"])))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        predicted = self.model.predict(np.ones((1, 4)), verbose=0)
        self.calls.append((epoch, float(self.model.get_weights()[-1][0]), predicted.item()))


def test_callbacks_see_the_same_as_in_one_process(strategy: Any) -> None:
    seen: list[Seen] = []

    def callbacks() -> list[Any]:
        seen.append(Seen())
        return [seen[-1], keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=9)]

    both(strategy, small, lambda: {"optimizer": "sgd", "loss": "mse"}, callbacks=callbacks, epochs=5)
    expected, found = (each.calls for each in seen)
    assert len(found) == len(expected) == 12
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_callbacks_see_no_metric_before_a_step_has_updated_it(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this in each epoch, when metrics start again: a loss of 0 would end a training that stops at a small one."""
    monkeypatch.setattr(parameter_servers, "ClusterCoordinator", Late)
    with strategy.scope():
        model = model_of("sequential")
    model.compile("sgd", "mse", metrics=["mae"])
    seen: list[dict[str, Any]] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
    evaluated: list[dict[str, Any]] = []
    of_tests = keras.callbacks.Callback()
    of_tests.on_test_batch_end = lambda batch, logs: evaluated.append(dict(logs))
    history = model.fit(lambda: iter(batches()), epochs=2, steps_per_epoch=3, callbacks=[note], verbose=0).history
    model.evaluate(lambda: iter(batches()), steps=2, callbacks=[of_tests], verbose=0)
    assert [sorted(logs) for logs in seen] == [[], ["loss", "mae"], ["loss", "mae"]] * 2
    assert [sorted(logs) for logs in evaluated] == [[], ["loss", "mae"]]
    assert all(logs["loss"] > 0 for logs in (*seen, *evaluated) if logs)
    assert all(loss > 0 for loss in history["loss"])


def test_training_can_be_resumed(strategy: Any, tmp_path: Any) -> None:
    plain, model = pair(strategy, small, lambda: {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"})
    plain.fit((each for each in batches(40)), epochs=4, steps_per_epoch=5, verbose=0)
    path = str(tmp_path / "model.keras")
    save = keras.callbacks.ModelCheckpoint(path)
    model.fit(lambda: batches(40), epochs=2, steps_per_epoch=5, verbose=0, callbacks=[save])
    with strategy.scope():
        loaded = keras.models.load_model(path)
    assert type(loaded.optimizer).__name__ == "Adam"
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert int(loaded.optimizer.iterations) == 10
    same(loaded, model)
    loaded.fit(lambda: batches(40)[10:], epochs=2, steps_per_epoch=5, verbose=0)
    same(loaded, plain)
    weights = str(tmp_path / "model.weights.h5")
    loaded.save_weights(weights)
    model.load_weights(weights)
    assert int(model.optimizer.iterations) == 20
    same(model, plain)


@pytest.mark.parametrize("on_servers", [False, True])
def test_a_backup_of_another_model_or_optimizer_is_refused(strategy: Any, tmp_path: Any, on_servers: bool) -> None:
    def trained(optimizer: Any, units: int = 3) -> Any:
        with strategy.scope() if on_servers else distnb.get_strategy().scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(units), keras.layers.Dense(1)])
            model.compile(optimizer, "mse")
        data = [(np.ones((4, 2)), np.ones((4, 1)))] * 2
        model.fit((lambda: data) if on_servers else (each for each in data), steps_per_epoch=2, verbose=0)
        return model

    path = distnb.Checkpoint(model=trained(keras.optimizers.SGD(0.1, momentum=0.9))).write(tmp_path / "one")
    # Both keep as many variables of the same shapes.
    for other, message in (
        (trained(keras.optimizers.Adagrad(0.1)), "has the state of SGD, but the object is Adagrad"),
        (trained(keras.optimizers.SGD(0.1, momentum=0.9), units=4), "has variables of shapes"),
    ):
        kept, before = torch.zeros(1), [each.numpy().copy() for each in other.weights]
        with pytest.raises(distnb.errors.CheckpointMismatchError, match=message):
            distnb.Checkpoint(model=other, kept=kept).restore(path)
        assert all(np.array_equal(each.numpy(), was) for each, was in zip(other.weights, before, strict=True))


class Stop(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise KeyError("stopped")


def test_a_backup_is_written_and_restored(strategy: Any, tmp_path: Any) -> None:
    def model_and_backup() -> tuple[Any, Any]:
        with strategy.scope():
            model = small()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model, keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    plain = small()
    plain.compile(keras.optimizers.Adam(0.01), "mse")
    plain.fit((each for each in batches(40)), epochs=4, steps_per_epoch=5, verbose=0)
    model, backup = model_and_backup()
    with pytest.raises(KeyError, match="stopped"):
        model.fit(lambda: batches(40), epochs=4, steps_per_epoch=5, verbose=0, callbacks=[backup, Stop()])
    model, backup = model_and_backup()
    history = model.fit(lambda: batches(40)[10:], epochs=4, steps_per_epoch=5, verbose=0, callbacks=[backup])
    assert history.epoch == [2, 3]
    same(model, plain)


def test_a_checkpoint_holds_model_and_optimizer(strategy: Any, tmp_path: Any) -> None:
    plain, model = both(strategy, small, lambda: {"optimizer": "adam", "loss": "mse"})
    path = distnb.Checkpoint(model=model).save(tmp_path / "checkpoint")
    model.fit(lambda: batches(40), steps_per_epoch=5, verbose=0)
    distnb.Checkpoint(model=model).restore(path)
    same(model, plain)
    plain.fit((each for each in batches(40)), steps_per_epoch=5, verbose=0)
    model.fit(lambda: batches(40), steps_per_epoch=5, verbose=0)
    same(model, plain)
    assert int(model.optimizer.iterations) == 15


def test_the_view_receives_the_progress_of_training(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_process, "live_sink", lambda values, place, run: None)
    _, model = pair(strategy, small, lambda: {"optimizer": "adam", "loss": "mse"})
    progress = []

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            progress.append(tuple(Coordinator.latest.reading))

    model.fit(
        lambda: batches(40), epochs=2, steps_per_epoch=3, validation_data=batches(2)[0], verbose=0, callbacks=[See()]
    )
    assert progress == [(epoch, batch, 3, 2) for epoch in range(2) for batch in (1, 2, 3)]


def test_training_ends_when_its_data_runs_out(strategy: Any) -> None:
    with strategy.scope():
        model = small()
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="ran out of data, which ends the training"):
        history = model.fit(lambda: batches(7), epochs=3, steps_per_epoch=5, verbose=0)
    assert history.epoch == [0, 1]
    assert int(model.optimizer.iterations) == 7


def test_an_optimizer_of_a_custom_loop_must_have_been_built(strategy: Any) -> None:
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    with pytest.raises(TypeError, match="has not been built"):
        Coordinator(strategy).schedule(lambda: optimizer.iterations)


@pytest.mark.parametrize("workers", [2])
def test_workers_draw_different_noise(strategy: Any) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((50,)), keras.layers.Dropout(0.5, seed=1)])
    coordinator = Coordinator(strategy)
    plain = keras.layers.Dropout(0.5, seed=1)
    ones = torch.ones(1, 50)
    one, other, third = (coordinator.schedule(lambda: model(ones, training=True)).fetch() for _ in range(3))
    assert torch.equal(one, plain(ones, training=True).detach())
    assert not torch.equal(one, other)
    assert not torch.equal(other, plain(ones, training=True)), "at the same place the second worker draws other noise"
    assert torch.equal(third, plain(ones, training=True)), "each drew new numbers"


def test_a_deep_model_fitted_in_the_scope(strategy: Any) -> None:
    def build() -> Any:
        keras.utils.set_random_seed(2)
        end = start = keras.Input((4,))
        for _ in range(150):
            end = keras.layers.Dense(4, kernel_initializer="identity")(end)
        return keras.Model(start, keras.layers.Dense(1)(end))

    plain, model = pair(strategy, build, lambda: {"optimizer": keras.optimizers.SGD(1e-3), "loss": "mse"})
    plain.fit((each for each in batches(40)), steps_per_epoch=2, verbose=0)
    with strategy.scope():
        model.fit(lambda: batches(40), steps_per_epoch=2, verbose=0)
    same(model, plain)
    inner = model.layers[-1]
    found = Coordinator(strategy).schedule(lambda: float(inner.bias.value[0])).fetch()
    assert found == pytest.approx(float(plain.layers[-1].bias.value[0]), rel=1e-5)


def test_unsupported_calls_are_refused(strategy: Any) -> None:
    with strategy.scope():
        model = small()
    model.compile("sgd", "mse", metrics=["mae"])
    creator = distnb.keras.DatasetCreator(lambda: batches(9))
    with pytest.raises(ValueError, match="needs steps_per_epoch"):
        model.fit(creator)
    with pytest.raises(ValueError, match="give validation_steps"):
        model.fit(creator, steps_per_epoch=1, validation_data=creator)
    with pytest.raises(ValueError, match="got batch_size=3"):
        model.fit(creator, steps_per_epoch=1, batch_size=3)
    with pytest.raises(ValueError, match="give steps"):
        model.evaluate(creator)
    with pytest.raises(ValueError, match="give a function"):
        distnb.keras.DatasetCreator(3)
    with pytest.raises(ValueError, match="Prefetch in the dataset"):
        model.fit(distnb.keras.DatasetCreator(lambda: None, distnb.InputOptions(prefetch=2)), steps_per_epoch=1)
    for optimizer, text in (
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mixed_bfloat16"),
        (keras.optimizers.Lamb(), r"Lamb cannot update 'sequential.*/kernel', which the variable_partitioner divides"),
        (keras.optimizers.SGD(clipnorm=1.0, gradient_accumulation_steps=2), "servers accumulate"),
        (keras.optimizers.MultiOptimizer(lambda variable: keras.optimizers.SGD()), "one optimizer for each part"),
    ):
        model.compile(optimizer, "mse")
        with pytest.raises(ValueError, match=text):
            model.fit(creator, steps_per_epoch=1, verbose=0)
    with distnb.ParameterServerStrategy().scope():
        whole = small()
    whole.compile(keras.optimizers.Adafactor(), "mse")
    with pytest.raises(ValueError, match="do not have the shape of a variable"):
        whole.fit(creator, steps_per_epoch=1, verbose=0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_constraint="max_norm")])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="has a constraint"):
        model.fit(creator, steps_per_epoch=1, verbose=0)


def test_a_variable_that_only_the_coordinator_has_is_refused_in_functions(strategy: Any) -> None:
    with strategy.scope():
        trained, counted = keras.Variable([1.0, 2.0]), keras.Variable(0.0, trainable=False)
    coordinator = Coordinator(strategy)
    assert coordinator.schedule(lambda: float(trained.value.detach().sum())).fetch() == 3
    with pytest.raises(CannotTravelError, match="each worker would change its own copy"):
        coordinator.schedule(lambda: counted.assign_add(1.0))


def test_a_layer_that_changes_reaches_the_workers(strategy: Any) -> None:
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.LeakyReLU(0.5), keras.layers.Dense(1, kernel_initializer="ones")]
        )
    coordinator, x = Coordinator(strategy), -torch.ones(2, 3)
    assert coordinator.schedule(lambda: float(model(x).detach().sum())).fetch() == -3
    model.layers[0].negative_slope = 0.25
    assert coordinator.schedule(lambda: float(model(x).detach().sum())).fetch() == -1.5


def test_a_model_can_be_compiled_again(strategy: Any) -> None:
    plain, model = both(strategy, small, lambda: {"optimizer": "adam", "loss": "mse"})
    for each in (plain, model):
        each.layers[0].trainable = False
        each.compile("sgd", "mae", metrics=["mse"])
    expected = plain.fit((each for each in batches(40)), steps_per_epoch=5, verbose=0).history
    found = model.fit(lambda: batches(40), steps_per_epoch=5, verbose=0).history
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)
    same(model, plain)


@pytest.mark.parametrize("clipnorm", [None, 0.01])
def test_only_rows_of_embeddings_are_read_and_sent(strategy: Any, servers: InHouse, clipnorm: Any) -> None:
    def build() -> Any:
        keras.utils.set_random_seed(2)
        layers = [keras.layers.Embedding(300, 4, mask_zero=True), keras.layers.GlobalAveragePooling1D()]
        return keras.Sequential([*layers, keras.layers.Dense(1)])

    plain, model = pair(
        strategy, build, lambda: {"optimizer": keras.optimizers.Adam(0.01, clipnorm=clipnorm), "loss": "mse"}
    )
    generator = np.random.default_rng(1)
    data = [(generator.integers(0, 300, (5, 6)), np.ones((5, 1), "float32")) for _ in range(6)]
    plain.fit((each for each in data), steps_per_epoch=6, verbose=0)
    servers.sent.clear()
    model.fit(lambda: data, steps_per_epoch=6, verbose=0)
    read = sum(len(each.rows) for _, each in servers.sent if type(each).__name__ == "PullRows")
    assert read == sum(len(np.unique(x)) for x, _ in data)
    steps = [each for _, each in servers.sent if type(each).__name__ == "StepOptimizer"]
    sent = [value for each in steps for value in each.gradients.values() if hasattr(value, "rows")]
    assert bool(sent) is (clipnorm is None), "clipped gradients are sent whole"
    same(model, plain)
    rows = data[0][0]
    np.testing.assert_allclose(model.predict(rows, verbose=0), plain.predict(rows, verbose=0), rtol=1e-5)
    model.layers[0].embeddings.assign(np.ones((300, 4)))
    model.fit(lambda: data, steps_per_epoch=1, verbose=0)
    plain.layers[0].embeddings.assign(np.ones((300, 4)))
    plain.fit((each for each in data), steps_per_epoch=1, verbose=0)
    same(model, plain)


class Tied(keras.Model):  # type: ignore[misc]
    """A model whose scores use the table of its lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(30, 4)

    def call(self, rows: Any) -> Any:
        return keras.ops.matmul(self.table(rows), keras.ops.transpose(self.table.embeddings))


def test_an_embedding_can_be_used_as_a_whole(strategy: Any) -> None:
    def build() -> Any:
        keras.utils.set_random_seed(1)
        return Tied()

    plain, model = pair(strategy, build, lambda: {"optimizer": keras.optimizers.SGD(1.0), "loss": "mse"})
    generator = np.random.default_rng(1)
    data = [(generator.integers(0, 30, (5, 6)), np.ones((5, 6, 30), "float32")) for _ in range(6)]
    expected = plain.fit((each for each in data), steps_per_epoch=6, verbose=0).history
    assert model.fit(lambda: data, steps_per_epoch=6, verbose=0).history["loss"] == pytest.approx(expected["loss"])
    same(model, plain)
    np.testing.assert_allclose(keras.ops.sum(model.table.embeddings).item(), plain.get_weights()[0].sum(), rtol=1e-4)
