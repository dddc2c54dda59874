"""The cases of `test_empty_slices`, which ranks import. `result` holds this replica's findings."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import torch
import torchmetrics

import distnb
from tests.core.strategies.metric_cases import walk

rank = int(os.environ["RANK"])
strategy = distnb.MirroredStrategy()
result: dict[str, Any] = {"rank": rank}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    result["metrics"] = walk(strategy, rank)


# -- other ways to update a metric -------------------------------------------------------------------------------------

ACCURACY = torchmetrics.classification.MulticlassAccuracy
LOGITS = 2 * torch.eye(3)[[0, 1, 2, 0]] + torch.tensor([0.0, 0.2, 0.1])
LABELS = torch.tensor([1, 1, 2, 0])  # three of four are correct
BATCHES = list(
    strategy.distribute_dataset([(LOGITS[:2], LABELS[:2]), (LOGITS[2:3], LABELS[2:3]), (LOGITS[3:], LABELS[3:])])
)


class Boxes(torchmetrics.Metric):
    """A metric that counts images as detection metrics get them: one dict per image, whose tensors may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx=None)

    def update(self, preds: list[dict[str, torch.Tensor]]) -> None:
        """Count images."""
        preds[0]  # like many metrics, it refuses an empty list
        self.seen += [(each["boxes"].shape[0], "text") for each in preds]

    def compute(self) -> int:
        """Return the number of images."""
        return len(self.seen)


def numbers(values: list[torch.Tensor]) -> list[float | str]:
    return [float(value) if value == value else "nan" for value in values]


with strategy.scope():
    called = ACCURACY(3, average="micro")
    stepped = ACCURACY(3, average="micro", dist_sync_on_step=True)
    collection = torchmetrics.MetricCollection(
        {"first": ACCURACY(3, average="micro"), "second": ACCURACY(3, average="micro", top_k=2)}
    )
    keras = ACCURACY(3, average="micro")
    named = ACCURACY(3, average="micro")
    outside = ACCURACY(3, average="micro")
    boxes = Boxes()
    never = ACCURACY(3, average="micro")
    original = ACCURACY(3, average="micro")
    copied = copy.deepcopy(original)
plain = ACCURACY(3, average="micro")


def accuracy(metric: Any, update: Any) -> Any:
    """Run an update for each batch, and return its results batch by batch."""
    return [strategy.local_results(strategy.run(update, (metric, *batch)))[0] for batch in BATCHES]


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    result["called"] = numbers(accuracy(called, lambda metric, x, y: metric(x, y))[:2])
    result["accumulated"] = float(called.compute())
    result["synchronised on each step"] = numbers(accuracy(stepped, lambda metric, x, y: metric(x, y))[:2])
    accuracy(collection, lambda metric, x, y: metric.update(x, y))
    result["collection"] = {name: float(value) for name, value in collection.compute().items()}
    last = accuracy(collection, lambda metric, x, y: metric(x, y))[-1]
    result["called in a collection"] = numbers(list(last.values()))
    accuracy(keras, lambda metric, x, y: metric.update_state(y, x))
    result["keras"] = float(keras.result())
    accuracy(named, lambda metric, x, y: metric.update(target=y, preds=x))
    result["by keyword"] = float(named.compute())
    for x, y in BATCHES:
        outside.update(x, y)
    result["outside run"] = float(outside.compute())
    accuracy(plain, lambda metric, x, y: metric.update(x, y))
    result["not made in a scope"] = float(plain.compute())
    accuracy(copied, lambda metric, x, y: metric.update(x, y))
    result["copied"] = float(copied.compute())
    found = [{"boxes": torch.empty(0, 4)}] * 2 if rank else []
    strategy.run(lambda: boxes.update(found))
    result["images without boxes"] = int(boxes.compute())
    result["warnings"] = [str(each.message) for each in caught]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    never.compute()
    result["never updated"] = str(caught[0].message)


# -- operations of torch -----------------------------------------------------------------------------------------------

ROWS = torch.arange(4)
batches = list(strategy.distribute_dataset([(LOGITS[:3], ROWS[:3]), (LOGITS[3:], ROWS[3:])]))


def refused(x: torch.Tensor, at: torch.Tensor) -> None:
    """Raise torch's error where the slice is empty. The other replica raises too, so both may catch it and go on."""
    raise RuntimeError(f"The largest is {x.max()}")


try:
    strategy.run(refused, batches[1])
except RuntimeError as error:
    result["what torch refuses"] = "".join(getattr(error, "__notes__", ()))


# -- gather and reduce -------------------------------------------------------------------------------------------------

twice = strategy.run(lambda x, at: 2 * torch.stack([at, at + 1.0], dim=1), batches[1])
result["gathered"] = strategy.gather(twice, axis=0).tolist()
result["reduced"] = [float(value) for op in ("sum", "mean") for value in strategy.reduce(op, twice, axis=0)]
