"""Model.fit with parameter servers, with servers and workers in this process, beside Keras alone."""

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
from distnb.coordinator.per_worker import MakeDataset, PerWorkerDataset
from distnb.partitioners import FixedShardsPartitioner
from distnb.runtime.servers import roles
from distnb.runtime.this_process import this_process
from tests.unit.test_server_variables import InHouse, Worker, packer_of

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
parameter_servers = importlib.import_module("distnb.keras.parameter_servers")


class Ended:
    """The result of a closure that has ended."""

    ended, state = True, "done"

    def __init__(self, value: Any) -> None:
        self.value = value

    def fetch(self) -> Any:
        return self.value


class Coordinator:
    """A ClusterCoordinator whose closures run at once, on one worker after the other."""

    latest: Coordinator

    def __init__(self, strategy: Any) -> None:
        self.packer = packer_of(strategy)
        servers = strategy.runtime.access.servers
        self.workers = [Worker(servers, index) for index in this_process.cluster_link().workers]
        self.numbers = itertools.count(1)
        self.scheduled = 0
        Coordinator.latest = self

    def schedule(self, function: Any, args: Any = (), kwargs: Any = None) -> Ended:
        worker = self.workers[self.scheduled % len(self.workers)]
        self.scheduled += 1
        return Ended(worker.run(self.packer, next(self.numbers), function, *args, **(kwargs or {})))

    def create_per_worker_dataset(self, function: Any) -> PerWorkerDataset:
        return PerWorkerDataset(MakeDataset(function, len(self.workers), 1), "dataset")

    def join(self) -> None:
        pass

    def wait(self, values: Any, left: int) -> None:
        pass

    def forget(self, obj: Any) -> None:
        self.packer.forget(obj)


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, workers: int) -> Iterator[InHouse]:
    house = InHouse(2)
    monkeypatch.setattr(parameter_servers, "ClusterCoordinator", Coordinator)
    link = SimpleNamespace(servers=house, num_servers=2, workers=tuple(range(workers)))
    monkeypatch.setattr(this_process, "cluster_link", lambda: link)
    monkeypatch.setattr(this_process, "require_tasks", lambda resolver: None)
    monkeypatch.setattr(this_process, "servers", None)
    roles._runtimes.clear()
    yield house
    roles._runtimes.clear()


@pytest.fixture
def strategy(servers: InHouse) -> Any:
    return distnb.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2))


def batches(count: int = 1000) -> list[tuple[Any, Any]]:
    """The same at each call: of a regression with two labels."""
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
    """A model of Keras alone, and the same one on servers."""
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


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("kind", ["sequential", "functional", "subclassed"])
def test_fit_is_as_in_one_process(strategy: Any, kind: str, compiled: str) -> None:
    plain, model = pair(strategy, lambda: model_of(kind), COMPILED[compiled])
    data = batches(30)
    expected = plain.fit((each for each in data), epochs=3, steps_per_epoch=10, verbose=0).history
    # Workers in turn read one sequence: the first one its first batch, and so on.
    count = len(this_process.cluster_link().workers)
    creator = distnb.keras.DatasetCreator(lambda context: batches(30)[context.input_pipeline_id :: count])
    found = model.fit(creator, epochs=3, steps_per_epoch=10, verbose=0).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    same(model, plain)
    assert int(model.optimizer.iterations) == 30
    assert Coordinator.latest.scheduled == 30
    for one, other in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6, rtol=1e-4, err_msg=one.path)
    x = data[0][0]
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)
