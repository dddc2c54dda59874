"""Metrics of torchmetrics with every kind of state, updated with slices of unequal size and empty ones.

Ranks import this. A case makes a metric, and has its arguments as lists or tensors with one entry per example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchmetrics
from torchmetrics import aggregation, classification, clustering, image, nominal, regression, retrieval, text
from torchmetrics.image.fid import FrechetInceptionDistance

ROWS = 12


def _random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape) + high))


_TEXTS = ["the cat sat here", "a dog ran off", "it rains today", "we go home now"] * 3
_OTHERS = ["the cat sat there", "the dog ran", "it rained all day", "we went home now"] * 3


class _Pixels(torch.nn.Module):
    """A feature network that needs no download."""

    num_features = 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.to(torch.float32).flatten(1)[:, :2] / 255.0


Case = tuple[Callable[[], torchmetrics.Metric], tuple[Any, ...], dict[str, Any]]

_BINARY = _random(ROWS), _whole(2, ROWS)
_CLASSES = _random(ROWS, 3).softmax(-1), _whole(3, ROWS)
_NUMBERS = _random(ROWS) + 0.5, _random(ROWS, 1)[:, 0] + 0.4
_IMAGES = _random(ROWS, 3, 16, 16), _random(3, ROWS, 16, 16).transpose(0, 1)
_QUERIES = {"indexes": torch.arange(ROWS) // 4}
_accuracy = lambda: classification.MulticlassAccuracy(3, average="micro")  # noqa: E731

CASES: dict[str, Case] = {
    "a sum": (aggregation.SumMetric, (_random(ROWS),), {}),
    "a mean": (aggregation.MeanMetric, (_random(ROWS),), {}),
    "a maximum": (aggregation.MaxMetric, (_random(ROWS),), {}),
    "concatenated values": (aggregation.CatMetric, (_random(ROWS),), {}),
    "counts": (_accuracy, _CLASSES, {}),
    "a matrix of counts": (lambda: classification.MulticlassConfusionMatrix(3), _CLASSES, {}),
    "lists of tensors": (classification.BinaryAUROC, _BINARY, {}),
    "groups": (lambda: classification.BinaryGroupStatRates(2), (*_BINARY, torch.arange(ROWS) % 2), {}),
    "states that it reduces itself": (regression.PearsonCorrCoef, _NUMBERS, {}),
    "an attribute that update sets": (regression.R2Score, _NUMBERS, {}),
    "queries": (retrieval.RetrievalMRR, _BINARY, _QUERIES),
    "texts": (lambda: text.BLEUScore(n_gram=2), (_TEXTS, [[each] for each in _OTHERS]), {}),
    "words": (text.WordErrorRate, (_TEXTS, _OTHERS), {}),
    "images": (lambda: image.PeakSignalNoiseRatio(data_range=1.0), _IMAGES, {}),
    "a flag of each batch": (
        lambda: FrechetInceptionDistance(feature=_Pixels(), normalize=True),
        _IMAGES[:1],
        {"real": [True, False]},
    ),
    "clusters": (clustering.RandScore, (_whole(3, ROWS), _whole(3, 1, ROWS)[0]), {}),
    "tables": (lambda: nominal.CramersV(num_classes=3), (_whole(3, ROWS), _whole(3, 1, ROWS)[0]), {}),
    "a metric within": (lambda: torchmetrics.MinMaxMetric(_accuracy()), _CLASSES, {}),
    "a metric for each class": (
        lambda: torchmetrics.ClasswiseWrapper(classification.MulticlassAccuracy(3, average=None)),
        _CLASSES,
        {},
    ),
    "a metric for each task": (
        lambda: torchmetrics.MultitaskWrapper({"a": _accuracy(), "b": regression.MeanSquaredError()}),
        ({"a": _CLASSES[0], "b": _NUMBERS[0]}, {"a": _CLASSES[1], "b": _NUMBERS[1]}),
        {},
    ),
    "a metric for each output": (
        lambda: torchmetrics.MultioutputWrapper(regression.R2Score(), 2),
        (_random(ROWS, 2), _random(2, ROWS).T.contiguous()),
        {},
    ),
    "a window": (lambda: torchmetrics.wrappers.Running(regression.MeanSquaredError(), window=5), _NUMBERS, {}),
}


def part(value: Any, start: int, stop: int, number: int) -> Any:
    if isinstance(value, dict):
        return {key: part(each, start, stop, number) for key, each in value.items()}
    if isinstance(value, list) and isinstance(value[0], bool):
        return value[number % len(value)]  # a flag that differs between batches
    return value[start:stop]


def _batches(sizes: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Return the bounds of each replica's slice, batch by batch."""
    first = 0
    for counts in sizes:
        bounds = []
        for count in counts:
            bounds.append((first, first + count))
            first += count
        yield bounds


SIZES = {
    "uneven slices, one empty at first, one at the end": [(0, 3), (3, 2), (1, 2), (1, 0)],
    "a replica without any row": [(0, 6), (0, 6)],
}


def walk(strategy: Any, rank: int) -> dict[str, str]:
    """Return the reasons, by name, of metrics whose value differs from one replica's."""
    wrong: dict[str, str] = {}
    for label, sizes in SIZES.items():
        with strategy.scope():  # in one call of run, because communication takes time
            metrics = {name: make() for name, (make, _, _) in CASES.items()}
        alone = {name: make() for name, (make, _, _) in CASES.items()}
        for each in (part for metric in alone.values() for part in metric.modules()):
            each.distributed_available_fn = bool  # type: ignore[union-attr]
        strategy.run(_update_all, (metrics, alone, sizes, rank, wrong))
        for name in sorted(CASES.keys() - wrong.keys()):
            try:
                compare(metrics[name], alone[name])
            except Exception as error:
                wrong[name] = f"{label}: {type(error).__name__}: {error}"
    return wrong


def _update_all(
    metrics: dict[str, Any],
    alone: dict[str, Any],
    sizes: Any,
    rank: int,
    wrong: dict[str, str],
) -> None:
    """Update each metric with this replica's slices, and its copy with whole batches."""
    for name, (_, arguments, named) in CASES.items():
        try:
            for number, bounds in enumerate(_batches(sizes)):
                for target, (start, stop) in (
                    (metrics[name], bounds[rank]),
                    (alone[name], (bounds[0][0], bounds[-1][1])),
                ):
                    target.update(
                        *(part(each, start, stop, number) for each in arguments),
                        **{key: part(each, start, stop, number) for key, each in named.items()},
                    )
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"


def compare(metric: Any, alone: Any) -> None:
    wanted, got = _leaves(alone.compute()), _leaves(metric.compute())
    if isinstance(alone, torchmetrics.CatMetric):  # replica by replica
        wanted, got = [wanted[0].sort().values], [got[0].sort().values]
    assert len(wanted) == len(got), (wanted, got)
    for one, other in zip(wanted, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, equal_nan=True)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in _leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in _leaves(each)]
    return [torch.as_tensor(value)]
