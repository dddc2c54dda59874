"""Requirements of the gradient aggregation, case by case, run on every replica and compared with a single replica."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distnb.collectives.algorithms.aggregation import Aggregation
from distnb.collectives.gradients.gradient_sync import GradientSync

CASES: dict[str, Callable[[Replica], None]] = {}


class Replica:
    """A replica of a test: its group, and helpers that compare it with one replica on the whole batch."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.sync = self.use()

    def use(self, **options: Any) -> GradientSync:
        if hasattr(self, "sync"):
            self.sync.detach()
        self.sync = GradientSync(lambda: Aggregation(self.group), **options)
        return self.sync

    def register(self, model: nn.Module) -> nn.Module:
        model.label = type(model).__name__
        for parameter in model.parameters():
            self.sync.register(parameter, model)
        return model

    def make(self, factory: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, nn.Module]:
        """Return a mirrored model, and an equal one without a strategy."""
        torch.manual_seed(seed)
        model = factory()
        plain = copy.deepcopy(model)
        return self.register(model), plain

    def batch(self, count: int, width: int = 4, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole batch and this replica's slice: contiguous, with sizes that differ by at most one."""
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(count, width, generator=generator)
        sizes = [count // self.size + (r < count % self.size) for r in range(self.size)]
        start = sum(sizes[: self.rank])
        return whole, whole[start : start + sizes[self.rank]]


def case(function: Callable[[Replica], None]) -> Callable[[Replica], None]:
    CASES[function.__name__] = function
    return function


def same(model: nn.Module, plain: nn.Module, what: str = "gradients") -> None:
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        x, y = (a.grad, b.grad) if what == "gradients" else (a, b)
        assert (x is None) == (y is None), f"{name}: {x} instead of {y}"
        if x is not None and y is not None:
            x, y = x.detach().to_dense(), y.detach().to_dense()
            error = (x - y).abs().max() / y.abs().max().clamp(min=1e-30) if x.numel() else torch.tensor(0.0)
            assert error <= 1e-12, f"{name}: relative error {error:.3g}"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, x: torch.Tensor, count: int) -> torch.Tensor:
    return model(x).square().sum() / count


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.never = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        h = self.stem(x)
        if "l" in which:
            h = h + self.left(h)
        if "r" in which:
            h = h + self.right(h)
        return h
