"""torch's two streams of random numbers: one that all replicas share, and one of each replica's own.

Outside replicas every process draws from the same state, so initial values and shuffles are equal. In `run` torch's
default generators hold a state that was folded with the replica's id. Their states are swapped, because user code and
torch's kernels draw from them and from nothing else. `random` and `numpy.random` have one stream, in `run`, too.

A replica's own stream starts again, derived from the shared one, whenever the shared one moved (drawn from, seeded, or
set) since the last `run`; otherwise it goes on. So a program that seeds at its beginning repeats itself exactly, and
the shared stream is the same as in a run with one replica.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import generator
from distnb.objects.rng_state import RngState
from distnb.runtime.reduction.gathering import broadcast_bytes

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group
    from distnb.topology import Device

__all__ = ["Streams", "captured", "share", "streams"]


class Streams:
    """torch's default generators, of the CPU and of this replica's device, switched together."""

    def __init__(self) -> None:
        self.generators: list[Any] = [torch.default_generator]
        self._devices: set[Device] = set()
        self._replica_id = -1
        self._shared_bytes = b""
        self._other: list[torch.Tensor] = []  # the states of the stream that is not in use
        self._is_own = False
        self._runs = 0  # under way: run within merge_call within run

    def use_device(self, device: Device) -> None:
        """Switch this device's generator too, if it has one."""
        if device not in self._devices and (found := generator(device)) is not None:
            self._devices.add(device)
            self.generators.append(found)

    def enter(self, replica_id: int) -> None:
        """Switch from the shared stream to the replica's own."""
        self._runs += 1
        if self._runs > 1:
            self._swap()
            return
        shared = self.read()
        found = _bytes(shared)
        if found == self._shared_bytes and replica_id == self._replica_id:
            self.write(self._other)
        else:
            self._replica_id = replica_id
            for each in self.generators:
                each.manual_seed(_fold(found, replica_id))
            shared[0][_MARKED] = _MARK
            self._shared_bytes = _bytes(shared)
        self._other, self._is_own = shared, True

    def leave(self) -> None:
        """Back to the shared stream."""
        self._runs -= 1
        self._swap()

    def reset(self) -> None:
        """Be outside replicas: what runs now may follow on a program that was ended in their midst."""
        if self._is_own:
            self._swap()
        self._runs = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Draw from the shared stream, also in the midst of a `run`."""
        if not self._is_own:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        here = self.read()
        self.write(self._other)
        self._other, self._is_own = here, not self._is_own

    def read(self) -> list[torch.Tensor]:
        """Return the generators' states."""
        return [each.get_state() for each in self.generators]

    def write(self, states: list[torch.Tensor]) -> None:
        """Set what `read` gave."""
        for each, state in zip(self.generators, states, strict=True):
            each.set_state(state)


streams = Streams()


def _bytes(states: list[torch.Tensor]) -> bytes:
    return b"".join(state.numpy().tobytes() for state in states)


def _fold(states: bytes, replica_id: int) -> int:
    salt = replica_id.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(states, digest_size=8, salt=salt).digest(), "little")


# -- seeing that torch was seeded --------------------------------------------------------------------------------------
# Seeding with the number of the last time must restart the replica's stream, but yields a state that is equal to an
# earlier one. So the shared state, when it is written back, carries a mark in a field that seeding clears: the cached
# single-precision normal, which CPU kernels never use (they cache a double). tests/unit/test_randomness.py looks at it.

_MARKED = slice(-8, None)
_MARK = torch.tensor([0, 0, 0, 63, 1, 0, 0, 0], dtype=torch.uint8, device="cpu")  # 0.5, valid


def captured() -> bytes:
    """Return the random states that all replicas share, to be compared."""
    with streams.shared():
        return pickle.dumps(RngState.capture(streams.generators))


def share(group: Group) -> None:
    """Give every replica the random states of replica 0. All replicas call it together."""
    with streams.shared():
        received = broadcast_bytes(group, captured() if group.rank == 0 else None, 0)
        if group.rank != 0:
            pickle.loads(received).restore(streams.generators)
