"""Modes: the replicas compute in the notebook's modes, and each mode is handed over at the right time."""

from __future__ import annotations

import decimal
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from distnb.objects.modes import python_modes, torch_modes
from distnb.objects.modes.environment import (
    Environment,
    apply_environment,
    capture_environment,
    cell_began,
    is_current,
)
from distnb.wire import codec
from tests.support.worlds import DoubleWorld, distributed, modes_kept, ordinary


@pytest.fixture
def world() -> Iterator[DoubleWorld]:
    torch.set_num_threads(1)
    with modes_kept():
        yield DoubleWorld(2)


AROUND: dict[str, tuple[Callable[[], Any], str]] = {
    "no_grad": (torch.no_grad, "torch.is_grad_enabled()"),
    "inference_mode": (torch.inference_mode, "torch.is_inference_mode_enabled(), torch.is_grad_enabled()"),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.float16),
        "str((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)",
    ),
    "device": (lambda: torch.device("meta"), "str(torch.ones(1).device)"),
}


@pytest.mark.parametrize("name", AROUND)
def test_modes_around_a_call_apply_to_the_call(name: str, world: DoubleWorld) -> None:
    around, shown = AROUND[name]
    world.run(ordinary(f"import torch\ndef f():\n    return {shown}"))
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


def test_a_warning_filter_for_a_notebook_class_does_not_block_pickling(world: DoubleWorld) -> None:
    world.run(ordinary("import warnings\nclass Mine(UserWarning): ...\nwarnings.simplefilter('error', Mine)"))
    warnings.simplefilter("ignore", FutureWarning)
    world.run(distributed("import warnings\nfirst = str(warnings.filters[0][:3:2])"))
    assert world.notebook.user_ns["first"] == "('ignore', <class 'FutureWarning'>)"


def test_autocast_does_not_cache_weights_of_an_earlier_call(world: DoubleWorld) -> None:
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


def test_tensors_made_in_inference_mode_can_be_changed_later(world: DoubleWorld) -> None:
    world.run(ordinary("import torch\nxs = []"))
    with torch.inference_mode():
        world.run(distributed("import torch\nxs.append(torch.ones(2))"))
        world.notebook.user_ns["xs"][0][0] = 5
    world.run(distributed("n = xs[0].sum().item()"))
    assert world.notebook.user_ns["n"] == 6


def test_state_per_cell_is_sent_once_per_cell(world: DoubleWorld) -> None:
    world.run(
        ordinary(
            "import torch, random, warnings, numpy as np\ndef f():\n"
            "    return random.random(), np.random.rand(), str(np.array([1 / 3])), warnings.filters[0][0]"
        )
    )
    function = world.notebook.user_ns["f"]
    found = []
    for precision in (2, 4):
        cell_began()
        random.seed(precision)
        np.random.seed(precision)
        np.set_printoptions(precision=precision)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if precision == 2 else "always")
            outside = function()
            random.seed(precision)
            np.random.seed(precision)
            found = [_as_one(world.call(function)) for _ in range(2)]
            assert found[0] == outside
            assert found[1][:2] != outside[:2]  # the replicas' streams continue
            np.set_printoptions(precision=1)
            assert _as_one(world.call(function))[2] == outside[2]  # and not around each call
            random.seed(precision)
            assert _as_one(world.call(function))[0] == outside[0]  # but a seed is


def test_draws_of_a_call_advance_the_state_for_the_next_cell(world: DoubleWorld) -> None:
    world.run(ordinary("import random\ndef f():\n    return random.random()"))
    random.seed(1)
    expected = [random.random() for _ in range(3)]
    random.seed(1)
    cell_began()
    assert world.call(world.notebook.user_ns["f"]) == expected[0]
    world.run(distributed("b = random.random()"))
    world.run(ordinary("c = random.random()"))
    assert [world.notebook.user_ns[name] for name in "bc"] == expected[1:]


def test_an_unchanged_environment_is_the_same_object() -> None:
    before = capture_environment()
    assert capture_environment(before) is before
    assert capture_environment(before, "call") is before
    with torch.no_grad():
        inside = capture_environment(before)
        assert dict(inside.since(before).modes) == {"gradients": False}
    assert not capture_environment(before).since(before).modes
    cell_began()
    assert not capture_environment(before, "call").since(before).modes


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        lambda: torch.randn(1, dtype=torch.float64),
        random.random,
        lambda: random.gauss(0, 1),
        np.random.rand,
        np.random.randn,
    ],
)
def test_a_random_stream_continues_on_the_other_side(draw: Callable[[], Any]) -> None:
    draw()
    before = capture_environment()
    following = [float(draw()) for _ in range(3)]
    assert capture_environment(before).since(before).modes
    apply_environment(codec.decode(codec.encode(before)))
    assert [float(draw()) for _ in range(3)] == following


def test_seeding_torch_seeds_the_devices_of_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = capture_environment()
    seed_all, seeds = torch.manual_seed, []
    try:
        torch.manual_seed(1)
        monkeypatch.setattr(torch, "manual_seed", lambda seed: (seeds.append(seed), seed_all(seed)))
        seeded, later = capture_environment(), []
        for _ in range(2):
            torch.rand(1)
            later.append(capture_environment())
        torch.default_generator.manual_seed(2)
        apply_environment(later[0])  # with another seed
        apply_environment(later[1])  # after a draw
        apply_environment(seeded)  # again with the same
        assert seeds == [1, 1]
        assert capture_environment(seeded) is seeded
    finally:
        apply_environment(outside)


def test_a_warning_filter_for_a_class_that_cannot_be_imported_is_left_out(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("class Mine(UserWarning): ...")
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings():
        import only_here  # type: ignore[import-not-found]

        outside = capture_environment()
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", only_here.Mine)
        changed = codec.decode(codec.encode(capture_environment().since(outside)))
        monkeypatch.delitem(sys.modules, "only_here")
        os.remove(tmp_path / "only_here.py")
        warnings.resetwarnings()
        apply_environment(changed)
        assert warnings.filters[0][:3:2] == ("error", FutureWarning)


def test_modes_that_are_not_sent_stay_local() -> None:
    def modes() -> tuple[Any, ...]:
        return decimal.getcontext().prec, np.geterr()["over"], torch.is_anomaly_enabled()

    outside = modes()
    with decimal.localcontext(prec=4), np.errstate(over="ignore"), torch.autograd.set_detect_anomaly(True):
        captured = capture_environment()
    apply_environment(captured)
    assert modes() == outside


def test_warning_filters_and_print_options_of_replicas_are_not_returned(world: DoubleWorld) -> None:
    show = "str(warnings.filters[0][:3:2]), str(np.array([1 / 3]))"
    world.run(ordinary("import warnings, numpy as np\nwarnings.simplefilter('error', UserWarning)"))
    world.run(distributed("warnings.simplefilter('ignore', FutureWarning)\nnp.set_printoptions(precision=2)"))
    world.run(distributed(f"there = {show}"))
    world.run(ordinary(f"here = {show}"))
    assert world.notebook.user_ns["here"] == (str(("error", UserWarning)), "[0.33333333]")
    assert world.notebook.user_ns["there"] == (str(("ignore", FutureWarning)), "[0.33]")


@pytest.mark.parametrize(
    ("sent", "device", "set_here"),
    [
        ("cuda:0", "cuda:3", "cuda:3"),
        ("cuda:0", "cpu", "cpu"),
        ("cpu", "cuda:3", "cpu"),
        ("meta", "cuda:3", "meta"),
        (None, "cuda:3", None),
    ],
)
def test_the_default_device_of_another_process_maps_to_the_local_one(
    sent: str | None, device: str, set_here: str | None
) -> None:
    modes = Environment({"default device": sent, "default dtype": torch.float32}, cell=4).on(device)
    assert modes == Environment({"default device": set_here, "default dtype": torch.float32})
    assert modes.cell == 4


_OTHERS: dict[str, Any] = {
    "working directory": os.sep,
    "import path": ("/elsewhere",),
    "environment variables": {"DNB_MODE": "1"},
    "log levels": {"dnb_mode": 10},
    "default dtype": torch.float64,
    "inference mode": True,
    "gradients": False,
    "default device": "meta",
    "autocast": [("cpu", True, torch.bfloat16)],
    "deterministic algorithms": (True, True),
    "matmul precision": "medium",
    "cudnn benchmark": not torch.backends.cudnn.benchmark,
    "cudnn deterministic": not torch.backends.cudnn.deterministic,
    "torch random state": torch.Generator().manual_seed(77).get_state().numpy().tobytes(),
}


def test_a_changed_mode_is_not_current() -> None:
    logging.getLogger("dnb_mode")  # loggers of modules are not modes
    modes = (*python_modes.MODES, *torch_modes.MODES)
    assert {mode.name for mode in modes if mode.when == "call"} == _OTHERS.keys()
    for mode in modes:
        with modes_kept():
            environment = capture_environment()
            assert is_current(environment)
            if mode.name in _OTHERS:
                mode.apply(_OTHERS[mode.name])
                assert not is_current(environment), mode.name
                assert is_current(environment, random=False) == (mode.name == "torch random state")
