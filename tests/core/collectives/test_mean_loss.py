"""Recognising a mean loss by the end of its graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distnb.collectives.gradients.mean_loss import MeanLossCheck

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
X = torch.randn(2, 4)
ZEROS, ONES, CLASSES = torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
REPLICAS, SLICE, BATCH = 3, 2, 6


def out() -> Tensor:
    result: Tensor = MODEL(X)
    return result


def found(loss: Tensor, slice_size: int | None = SLICE, batch_size: int | None = BATCH) -> str | None:
    error = MeanLossCheck().check((loss,), REPLICAS, slice_size, batch_size)
    return str(error) if error is not None else None


MEANS: dict[str, Callable[[], Tensor]] = {
    "cross_entropy": lambda: F.cross_entropy(out(), CLASSES),
    "class weights": lambda: F.cross_entropy(out(), CLASSES, weight=torch.ones(3)),
    "label smoothing": lambda: F.cross_entropy(out(), CLASSES, label_smoothing=0.1),
    "soft targets": lambda: F.cross_entropy(out(), out().softmax(1).detach()),
    "nll": lambda: F.nll_loss(out(), CLASSES),
    "mse": lambda: F.mse_loss(out(), ZEROS),
    "l1": lambda: F.l1_loss(out(), ZEROS),
    "huber": lambda: F.huber_loss(out(), ZEROS),
    "smooth l1": lambda: F.smooth_l1_loss(out(), ZEROS),
    "bce": lambda: F.binary_cross_entropy(out().sigmoid(), ZEROS),
    "bce with logits": lambda: F.binary_cross_entropy_with_logits(out(), ZEROS),
    "kl": lambda: F.kl_div(out(), ZEROS),
    "kl batchmean": lambda: F.kl_div(out(), ZEROS, reduction="batchmean"),
    "poisson": lambda: F.poisson_nll_loss(out(), ZEROS),
    "gaussian": lambda: F.gaussian_nll_loss(out(), ZEROS, ONES),
    "triplet": lambda: F.triplet_margin_loss(out(), out(), out() + 1),
    "multi margin": lambda: F.multi_margin_loss(out(), CLASSES),
    "soft margin": lambda: F.soft_margin_loss(out(), ONES),
    "mean": lambda: out().mean(),
    "mean of means": lambda: out().mean(1).mean(),
    "mean over the batch": lambda: out().sum(1).mean(0),
    "mean, kept dims": lambda: out().mean(dim=(0, 1), keepdim=True),
    "root": lambda: out().square().mean().sqrt(),
    "cast": lambda: F.mse_loss(out(), ZEROS).half(),
    "one of two terms": lambda: 0.3 * F.mse_loss(out(), ZEROS) + out().sum() / BATCH,
    "mean of two losses": lambda: torch.stack([F.mse_loss(out(), ZEROS), out().sum() / BATCH]).mean(),
    "half of two losses": lambda: (F.mse_loss(out(), ZEROS) + F.l1_loss(out(), ZEROS)) / 2,
    "scaled for float16": lambda: F.mse_loss(out(), ZEROS) * torch.tensor(65536.0),
    "sum by slice": lambda: F.cross_entropy(out(), CLASSES, reduction="sum") / SLICE,
}

SUMS: dict[str, Callable[[], Tensor]] = {
    "sum by batch": lambda: F.cross_entropy(out(), CLASSES, reduction="none").sum() / BATCH,
    "sum times share": lambda: out().square().sum() * (1 / BATCH),
    "mean by replicas": lambda: F.mse_loss(out(), ZEROS) / REPLICAS,
    "share of the mean": lambda: (out().mean() + out().abs().mean()) * (1 / REPLICAS),
    "bare sum": lambda: out().square().sum(),
    "pooling": lambda: (X * out().mean(1, keepdim=True)).sum() / BATCH,
    "normalisation": lambda: F.layer_norm(out() / out().mean(), (3,)).sum() / BATCH,
    "per-example mean": lambda: out().mean(dim=1).sum() / BATCH,
    "two sums": lambda: torch.stack([out().sum() / BATCH, out().abs().sum() / BATCH]).sum(),
    "norm": lambda: out().norm() / REPLICAS,
    "one example": lambda: MODEL(X[:1]).mean(dim=1).sum() / BATCH,
}


@pytest.mark.parametrize("name", MEANS)
def test_means_are_recognised(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found(MEANS[name]()) is not None


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_not_means(name: str) -> None:
    assert found(SUMS[name]()) is None
    assert found(SUMS[name](), None, None) is None


def test_a_divisor_is_ignored_if_the_batch_size_is_unknown() -> None:
    assert found(out().sum() / 6, None, None) is None


def test_the_warning_names_the_operation_and_the_line() -> None:
    text = found(F.mse_loss(out(), ZEROS), None, None)
    assert text is not None
    assert "made by mse_loss with reduction='mean'" in text
    assert "test_mean_loss.py, line " in text
    assert "about 3 times too large" in text
    assert "compute_average_loss" in text
    assert "gradient_reduction='mean'" in text


def test_a_line_is_checked_once_per_kind_of_loss() -> None:
    check = MeanLossCheck()
    results = []
    for loss in (out().sum(), F.mse_loss(out(), ZEROS), out().sum(), F.mse_loss(out(), ZEROS)):
        results.append(check.check((loss,), REPLICAS, None, None) is not None)
    assert results == [False, True, False, True]


def test_a_freed_graph_is_allowed() -> None:
    loss = out().sum() / 2
    loss.backward()
    assert found(loss) is None
