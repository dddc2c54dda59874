"""Random streams for reading: one that all replicas share, and each replica's own for its slices.

Each replica loads different examples, and slices are uneven. If random augmentations were drawn from the shared stream,
the replicas' streams would diverge, and with them the next epoch's shuffle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from distnb.frames import spared
from distnb.input.dealing import ReplicaInput
from distnb.objects.rng_state import RngState
from distnb.topology import Device

__all__ = [
    "Drawing",
    "ReplicaDraws",
    "Shared",
    "WorkerSeeds",
    "capture",
    "draws_at_start_only",
    "fold",
    "on_host",
    "restore",
]

Shared = Callable[[], AbstractContextManager[Any]]
"""A function whose context makes the random stream that all replicas share the current one."""

_ODD = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: neighbouring replicas get seeds far apart


def fold(seed: int, replica_id: int) -> int:
    """Derive a replica's own seed from one that is the same on all. Replica 0 keeps it."""
    return (seed + replica_id * _ODD) % 2**63


def on_host(device: Device) -> AbstractContextManager[Any]:
    """Return the context for samplers and datasets: a scope's default device must not move their tensors or draws."""
    if device.type == "cpu" or torch.get_default_device().type == "cpu":
        return nullcontext()
    return torch.device("cpu")


def draws_at_start_only(batch_sampler: Any) -> bool:
    """Return whether a batch sampler draws nothing from the global generators after its first batch."""
    if type(batch_sampler) is not BatchSampler:
        return False
    sampler = batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        return True
    # With a user's generator they continue to draw from it, and so may other code.
    known = type(sampler) in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return known and getattr(sampler, "generator", None) is None


class ReplicaDraws:
    """A random stream that can temporarily replace the states of the global generators of torch, NumPy and `random`."""

    def __init__(self, seed: int) -> None:
        self._other = RngState.seeded(seed)
        self._inside = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Use this stream in the global generators within the context."""
        if self._inside:
            yield
            return
        try:
            self._switch(inside=True)
            yield
        finally:
            self._switch(inside=False)

    @spared
    def _switch(self, *, inside: bool) -> None:
        if inside is self._inside:
            return  # an interrupt came before the switch
        here = RngState.capture()
        self._other.restore()
        self._other, self._inside = here, inside


class WorkerSeeds:
    """A `worker_init_fn` that gives the workers of one replica their own seeds, then calls the user's function."""

    def __init__(self, replica_id: int, user_init: Callable[[int], None] | None) -> None:
        self._replica_id = replica_id
        self._user_init = user_init

    def __call__(self, worker_id: int) -> None:
        seed = fold(torch.initial_seed(), self._replica_id)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        info = get_worker_info()
        if info is not None:
            object.__setattr__(info, "seed", seed)  # its own setter refuses; users seed their generators from it
        if self._user_init is not None:
            self._user_init(worker_id)


class Drawing:
    """The stream that all replicas share or, with several pipelines, the pipeline's own stream.

    Pipelines draw different numbers of times, because their data has different lengths, which would make the replicas'
    shared streams diverge. So each pipeline has its own stream, seeded with a number from the shared one.
    """

    def __init__(self, shared: Shared, place: ReplicaInput) -> None:
        self.shared = shared
        self._pipeline = place.turns.pipeline if place.turns is not None and place.several_pipelines else None
        self._own: ReplicaDraws | None = None

    def begin(self) -> None:
        """Start a new stream for each pipeline, at the start of an iteration or before the pipeline is made."""
        if self._pipeline is not None:
            with self.shared():
                seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
            self._own = ReplicaDraws(fold(seed, self._pipeline))

    def __call__(self) -> AbstractContextManager[Any]:
        """Return a context in which the global generators use the stream."""
        return self.shared() if self._own is None else self._own.entered()


def capture(shared: Shared) -> dict[str, Any]:
    """Return the current states of the shared stream, as plain values."""
    with shared():
        state = RngState.capture()
    name, key, *rest = state.numpy
    return {
        "torch": state.torch[0],
        "python": state.python,
        "numpy": (name, np.frombuffer(key, np.uint32).tolist(), *rest),
    }


def restore(shared: Shared, states: Mapping[str, Any]) -> None:
    """Set the shared stream to the states that `capture` returned."""
    version, internal, gauss = states["python"]
    name, key, *rest = states["numpy"]
    state = RngState(
        torch=(states["torch"],),
        python=(version, tuple(internal), gauss),
        numpy=(name, np.asarray(key, np.uint32).tobytes(), *rest),
    )
    with shared():
        state.restore()
