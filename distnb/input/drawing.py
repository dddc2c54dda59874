"""Which random stream a distributed dataset draws from, and the states of it that resuming needs."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from distnb.input.draws import ReplicaDraws, fold
from distnb.input.sources.base import Place, Shared

__all__ = ["Drawing", "set_state", "state_of"]


class Drawing:
    """The stream that all replicas share; or, where there are several pipelines, a stream of the pipeline's own.

    Pipelines draw unequally often (their data is of unequal length), which would part the replicas' shared streams: so
    each begins a stream of its own with a number that is drawn from the shared one.

    Args:
        shared: Makes the shared stream the current one.
        place: Which replica draws, and how it takes from its pipeline.
    """

    def __init__(self, shared: Shared, place: Place) -> None:
        self._shared = shared
        self._pipeline = place.turns.pipeline if place.turns is not None and place.several_pipelines else None
        self._own: ReplicaDraws | None = None
        self._inside = False

    def begin(self) -> None:
        """An iteration begins, or the pipeline is made: each pipeline has a new stream."""
        if self._pipeline is not None:
            with self._shared():
                seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
            self._own = ReplicaDraws(fold(seed, self._pipeline), all_of_them=True)

    def __call__(self) -> AbstractContextManager[Any]:
        """A context in which the global generators hold the stream."""
        return self._shared() if self._own is None else self._in(self._own)

    @contextmanager
    def _in(self, own: ReplicaDraws) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._inside = True
        try:
            with own:
                yield
        finally:
            self._inside = False

    def capture(self) -> dict[str, Any]:
        """The shared stream's present states, of plain values."""
        with self._shared():
            states: dict[str, Any] = {"torch": state_of(torch.default_generator), "python": random.getstate()}
            if "numpy" in sys.modules:
                states["numpy"] = _plain(np.random.get_state(legacy=False))
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set the shared stream to what `capture` gave."""
        version, internal, gauss = states["python"]
        with self._shared():
            set_state(torch.default_generator, states["torch"])
            random.setstate((version, tuple(internal), gauss))
            if "numpy" in states:
                np.random.set_state(states["numpy"])


def state_of(generator: torch.Generator) -> bytes:
    """The state of a generator as bytes: unlike pickled tensors they are equal in all processes where the state is."""
    return generator.get_state().numpy().tobytes()


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Set what `state_of` gave."""
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _plain(state: Any) -> Any:
    """NumPy's state without arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state
