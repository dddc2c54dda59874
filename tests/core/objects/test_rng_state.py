"""The state of NumPy's global generator is read as NumPy reads it, however it came about."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from distnb.objects.rng_state import numpy_state, set_numpy_state


@pytest.fixture(autouse=True)
def _state_is_kept() -> Iterator[None]:
    before = np.random.get_state()
    yield
    np.random.set_state(before)


@pytest.mark.parametrize("seed", range(5))
def test_the_state_is_that_of_numpy(seed: int) -> None:
    draw, saved = random.Random(seed), [np.random.get_state()]
    acts: list[Callable[[], Any]] = [
        lambda: np.random.rand(),
        lambda: np.random.randn(),  # keeps a second number for the next call
        lambda: np.random.seed(draw.randrange(3)),
        lambda: saved.append(np.random.get_state()),
        lambda: np.random.set_state(draw.choice(saved[-2:])),
        lambda: set_numpy_state(numpy_state()),
    ]
    for _ in range(300):
        draw.choice(acts)()
        state: Any = np.random.get_state(legacy=True)
        name, key, *rest = state
        for _ in range(2):
            assert numpy_state() == (name, key.tobytes(), *rest)
