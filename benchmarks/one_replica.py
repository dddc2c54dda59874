"""The cost of one replica over plain PyTorch: microseconds per training step of a small model, in this process.

    python -m benchmarks.one_replica [--rounds 60] [--steps 20]

The same step of a small MLP runs in turns as a plain loop, under the default strategy, under one_device, and under
mirrored with one replica.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import distnb
from benchmarks.guard import TARGETS
from benchmarks.harness import Comparison, Measure, compare, options, report, timed

_UNIT = "a microsecond"
_OPTIMIZERS: dict[str, Any] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}


def _stepping(strategy: Any, optimizer_class: Any) -> Callable[[], object]:
    torch.manual_seed(0)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))
        optimizer = optimizer_class(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, 16), torch.randn(8, 4)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x) - y).square().sum() / 8
        loss.backward()
        optimizer.step()
        return loss.detach()

    return (lambda: step(x, y)) if strategy is None else (lambda: strategy.run(step, args=(x, y)))


def _quickest_of(call: Callable[[], object], calls: int) -> Measure:
    """Return a measure of the quickest of some calls: the others include delays of a busy machine."""
    one = timed(call)
    return lambda: min(one() for _ in range(calls))


def _report(title: str, comparison: Comparison, what: str) -> bool:
    """Report the microseconds that the contenders take more than the plain one, round by round."""
    plain = comparison.values["plain"]
    extra = {
        name: tuple(own - least for own, least in zip(values, plain, strict=True))
        for name, values in comparison.values.items()
        if name != "plain"
    }
    extra[_UNIT] = (1e-6,) * len(plain)
    targets = TARGETS["one_replica"][what]
    return report(title, Comparison(extra), baseline=_UNIT, unit="µs", scale=1e6, targets=targets)


def main() -> int:
    """Run the benchmark. Return 1 if a target is missed."""
    given = options(__doc__, rounds=60, steps=20)

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    default = distnb.get_strategy()
    strategies = {
        "plain": None,
        "default": default,
        "one_device": distnb.OneDeviceStrategy("cpu:0"),
        "mirrored": distnb.MirroredStrategy(),
    }
    met = True
    for kind, optimizer_class in _OPTIMIZERS.items():
        steps = {name: _quickest_of(_stepping(each, optimizer_class), given.steps) for name, each in strategies.items()}
        comparison = compare(steps, rounds=given.rounds, warmup=5)
        title = f"a training step with {kind}, more than the {comparison.median('plain') * 1e6:.0f} µs of a plain one"
        met &= _report(title, comparison, "step")

    def nothing() -> None:
        pass

    runs = compare(
        {"plain": timed(nothing, 1000), "default": timed(lambda: default.run(nothing), 1000)}, rounds=given.rounds
    )
    met &= _report("an empty function, more than a plain call", runs, "run")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
