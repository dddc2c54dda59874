"""Metrics that workers update: the coordinator's value equals one process's, for every metric."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics import MetricCollection, classification, regression, wrappers

import distnb
from distnb.checkpoint.states import object_states
from distnb.compat import patches
from distnb.errors import CannotTravelError
from distnb.runtime.scopes import metric_binding
from tests.core.strategies import metric_cases
from tests.servers.test_server_variables import InHouse, Worker, packer_of, servers

__all__ = ["servers"]

BOUNDS = [(0, 3), (3, 6), (6, 7), (7, 12)]


class Counting:
    """A coordinator, and two workers that update a metric in turn."""

    def __init__(self, house: InHouse) -> None:
        self.strategy = distnb.ParameterServerStrategy()
        _ = self.strategy.runtime
        self.packer = packer_of(self.strategy)
        self.workers = [Worker(house, 0), Worker(house, 1)]
        self.number = 0

    def schedule(self, function: Any, *args: Any, **named: Any) -> Any:
        self.number += 1
        return self.workers[self.number % 2].run(self.packer, self.number, function, *args, **named)


@pytest.fixture
def counting(servers: InHouse) -> Iterator[Counting]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Counting(servers)


@pytest.mark.parametrize("name", [name for name in metric_cases.CASES if name != "a window"])
def test_a_metric_computes_the_same_as_in_one_process(counting: Counting, name: str) -> None:
    """Update a metric on workers and on the coordinator, and once more after a reset."""
    make, arguments, named = metric_cases.CASES[name]
    with counting.strategy.scope():
        metric = make()
    for _ in range(2):
        alone = make()
        for number, (first, last) in enumerate(BOUNDS):
            args = tuple(metric_cases.part(each, first, last, number) for each in arguments)
            kwargs = {key: metric_cases.part(each, first, last, number) for key, each in named.items()}
            alone.update(*args, **kwargs)
            if number < 3:
                counting.schedule(lambda *args, **kwargs: metric.update(*args, **kwargs), *args, **kwargs)
            else:
                metric.update(*args, **kwargs)
        metric_cases.compare(metric, alone)
        metric_cases.compare(copy.deepcopy(metric), alone)
        metric.reset()


@pytest.mark.parametrize("metric", [torchmetrics.RunningMean(), regression.NormalizedRootMeanSquaredError()])
def test_a_metric_that_workers_cannot_update_is_refused(counting: Counting, metric: Any) -> None:
    with pytest.raises(CannotTravelError, match=r"have no order|two processes at most"):
        counting.schedule(lambda: metric.update(torch.ones(1)))


def test_metrics_work_in_collections_models_and_lists(counting: Counting) -> None:
    class Evaluated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.mean = distnb.metrics.Mean()

    accuracy = classification.MulticlassAccuracy
    with counting.strategy.scope():
        model = Evaluated()
        several = [distnb.metrics.Sum(), wrappers.MinMaxMetric(distnb.metrics.Mean())]
        collection = MetricCollection(
            {"first": accuracy(3, average="micro"), "second": accuracy(3, average="micro", top_k=2)}
        )
    logits, labels = torch.eye(3)[[0, 1, 2, 0]] + torch.tensor([0.0, 0.2, 0.1]), torch.tensor([0, 1, 1, 2])
    collection.update(logits[:1], labels[:1])  # in which both metrics are equal

    def closure(row: int) -> None:
        model.mean.update(float(row))
        several[0].update(float(row))
        several[1].update(float(row))
        for _ in range(2):
            collection.update(logits[row : row + 1], labels[row : row + 1])

    for row in range(4):
        counting.schedule(closure, row)
    rows = [0, *(row for row in range(4) for _ in range(2))]
    alone = {
        key: accuracy(3, average="micro", top_k=top)(logits[rows], labels[rows])
        for key, top in (("first", 1), ("second", 2))
    }
    found = collection.compute()
    assert {key: found[key].item() for key in found} == {key: pytest.approx(alone[key].item()) for key in alone}
    assert (model.mean.compute(), several[0].compute(), several[1].compute()["raw"]) == (1.5, 6, 1.5)
    collection.reset()
    assert collection["first"].update_count == 0
    collection.update(logits[:2], labels[:2])
    assert collection.compute()["first"] == 1


def test_a_checkpoint_holds_counts_of_workers(counting: Counting) -> None:
    with counting.strategy.scope():
        saved, restored = distnb.metrics.Max(), distnb.metrics.Max()
    for value in (2.0, 7.0, 3.0):
        counting.schedule(lambda value: saved.update(value), value)
    saved.update(1.0)
    state = object_states.state_of(saved, "saved")
    assert metric_binding.whole_state(saved)["updates"] == 4
    restored.update(99.0)
    object_states.restore_all({"metric": restored}, {"metric": state}, "the checkpoint", lambda lines: lines)
    assert float(restored.compute()) == 7
    counting.schedule(lambda: restored.update(8.0))
    assert float(restored.compute()) == 8
    assert float(saved.compute()) == 7


def test_both_spellings_work_if_only_the_metric_was_loaded(counting: Counting) -> None:
    with counting.strategy.scope():
        accuracy = classification.BinaryAccuracy()
    true, predicted = torch.tensor([1.0, 0.0]), torch.tensor([0.9, 0.8])
    patches.remove("torchmetrics")

    def closure() -> float:
        accuracy.update_state(true, predicted)
        mean = torchmetrics.MeanMetric()
        mean.update_state([1.0, 3.0])
        return float(mean.result())

    assert counting.schedule(closure) == 2
    accuracy.update_state(true[:1], predicted[:1])
    assert float(accuracy.result()) == pytest.approx(2 / 3)
