"""Ambient modes around calls: what the notebook is in when it calls, the replicas are in while they compute."""

from __future__ import annotations

import contextlib
import decimal
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from distnb.wire.environment import capture_environment
from distnb.wire.twisters import TorchTwister
from tests.worlds import DoubleWorld, distributed, modes_kept, ordinary


@pytest.fixture
def world() -> Iterator[DoubleWorld]:
    torch.set_num_threads(1)
    with modes_kept():
        yield DoubleWorld(2)


@contextlib.contextmanager
def _set(on: Callable[[], Any], off: Callable[[], Any]) -> Iterator[None]:
    on()
    try:
        yield
    finally:
        off()


AROUND: dict[str, tuple[Callable[[], Any], str]] = {
    "no_grad": (torch.no_grad, "torch.is_grad_enabled()"),
    "inference_mode": (torch.inference_mode, "torch.is_inference_mode_enabled(), torch.is_grad_enabled()"),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.float16),
        "str((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)",
    ),
    "device": (lambda: torch.device("meta"), "str(torch.ones(1).device)"),
    "detect_anomaly": (torch.autograd.detect_anomaly, "torch.is_anomaly_enabled()"),
    "errstate": (lambda: np.errstate(over="raise"), "np.geterr()['over']"),
    "printoptions": (lambda: np.printoptions(precision=2), "str(np.array([1 / 3]))"),
    "localcontext": (lambda: decimal.localcontext(prec=4), "str(decimal.Decimal(1) / 3)"),
    "disable": (
        lambda: _set(lambda: logging.disable(logging.ERROR), lambda: logging.disable(logging.NOTSET)),
        "logging.getLogger('x').isEnabledFor(logging.ERROR)",
    ),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", AROUND)
def test_around_a_call(name: str, world: DoubleWorld) -> None:
    around, shown = AROUND[name]
    world.run(ordinary(f"import torch, numpy as np, decimal, logging\ndef f():\n    return {shown}"))
    function = world.notebook.user_ns["f"]
    outside = function()
    for _ in range(3):
        with around():
            inside = function()
            assert inside != outside
            assert [_as_one(world.call(function)) for _ in range(2)] == [inside] * 2
        assert [_as_one(world.call(function)) for _ in range(2)] == [outside] * 2


def _as_one(value: Any) -> Any:
    return tuple(map(_as_one, value)) if isinstance(value, tuple) else value


def test_a_filter_for_a_class_of_the_notebook_keeps_nothing_from_travelling(world: DoubleWorld) -> None:
    world.run(ordinary("import warnings\nclass Mine(UserWarning): ...\nwarnings.simplefilter('error', Mine)"))
    warnings.simplefilter("ignore", FutureWarning)
    world.run(distributed("import warnings\nfirst = str(warnings.filters[0][:3:2])"))
    assert world.notebook.user_ns["first"] == "('ignore', <class 'FutureWarning'>)"


def test_autocast_does_not_remember_the_weights_of_an_earlier_call(world: DoubleWorld) -> None:
    world.run(
        ordinary(
            "import torch\nw = torch.ones(1, 1, requires_grad=True)\n"
            "def f():\n    y = (torch.ones(1, 1) @ w).item()\n    with torch.no_grad():\n        w.add_(1)\n    return y"
        )
    )
    found = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(world.call(world.notebook.user_ns["f"]))
    assert found == [1.0, 2.0, 3.0]


def test_tensors_made_in_inference_mode_are_changed_later(world: DoubleWorld) -> None:
    world.run(ordinary("import torch\nxs = []"))
    with torch.inference_mode():
        world.run(distributed("import torch\nxs.append(torch.ones(2))"))
        world.notebook.user_ns["xs"][0][0] = 5
    world.run(distributed("n = xs[0].sum().item()"))
    assert world.notebook.user_ns["n"] == 6


def test_unchanged_is_the_same_object() -> None:
    before = capture_environment()
    assert capture_environment(before) is before
    with torch.no_grad():
        inside = capture_environment(before)
        assert dict(inside.since(before).modes) == {"gradients": False}
    assert capture_environment(before).since(before).empty


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: torch.randn(1, dtype=torch.float64), random.random])
def test_what_is_drawn_is_seen(draw: Callable[[], Any]) -> None:
    draw()
    before = capture_environment()
    draw()
    assert capture_environment(before).generators != before.generators


def test_the_memory_of_the_torch_generator_is_found() -> None:
    twister = TorchTwister()
    assert twister.works
    torch.manual_seed(3)
    before = twister.read()
    torch.rand(1)
    assert twister.read() != before
