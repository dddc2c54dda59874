"""The cost of one replica over plain PyTorch: microseconds per training step of a small model, in this process.

    python -m benchmarks.one_replica [--rounds 60] [--steps 20]

The same step of a small MLP runs in turns as a plain loop, under the default strategy, under one_device, and under
mirrored with one replica. Targets: at most 20 µs a step more than the plain loop; an empty function through the default
strategy's `run` at most 3 µs.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import distnb
from benchmarks.harness import Comparison, Measure, compare, options, timed

_STEP_US, _RUN_US = 20.0, 3.0
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


def _extra_us(comparison: Comparison, name: str) -> float:
    """Return the median over the rounds of the time that a contender takes more than the plain loop."""
    pairs = zip(comparison.values[name], comparison.values["plain"], strict=True)
    return statistics.median([own - plain for own, plain in pairs]) * 1e6


def _report(what: str, us: float, most: float) -> bool:
    print(f"  {what}: {us:+.1f} µs (at most {most:g}: {'met' if us <= most else 'missed'})")
    return us <= most


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
        print(f"a training step with {kind}, plain: {comparison.median('plain') * 1e6:.0f} µs")
        for name in list(strategies)[1:]:
            met &= _report(name, _extra_us(comparison, name), _STEP_US)

    def nothing() -> None:
        pass

    runs = compare(
        {"plain": timed(nothing, 1000), "default": timed(lambda: default.run(nothing), 1000)}, rounds=given.rounds
    )
    print("an empty function")
    met &= _report("default strategy's run", _extra_us(runs, "default"), _RUN_US)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
