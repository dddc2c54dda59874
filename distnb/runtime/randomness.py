"""The two streams of torch's random numbers: one that all replicas share, and one for each replica.

Outside replica contexts every process draws from the shared stream, so initial values and shuffles are equal. In `run`
a replica draws from its own stream, which is seeded with a hash of the shared state and the replica's id. The states of
torch's default generators are swapped, because user code and torch's kernels draw only from these generators. `random`
and `numpy.random` have only one stream, which `run` uses as well.

If the shared stream has moved (drawn from, seeded, or set) since the last `run`, the next `run` derives the own stream
from it again. Otherwise the own stream continues:

    torch.manual_seed(1)
    strategy.run(f)      the own stream starts, derived from seed 1
    strategy.run(f)      the own stream continues
    torch.rand(1)        the shared stream moves
    strategy.run(f)      the own stream starts again, derived from the new shared state

So a program that sets a seed at its beginning repeats exactly, and the shared stream is the same as with one replica.
"""

from __future__ import annotations

import hashlib
import operator
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from distnb.accelerators import generator
from distnb.frames import spared
from distnb.objects.rng_state import RngState, content_of
from distnb.runtime.reduction.gathering import broadcast_bytes

if TYPE_CHECKING:
    from distnb.collectives.group.interface import Group
    from distnb.topology import Device

__all__ = ["Streams", "captured", "restore", "share", "streams"]


class Streams:
    """The default generators of torch for the CPU and this replica's device, which are switched together.

    Attributes:
        depth: The depth of nested runs: `run` may be called in `merge_call` in `run`.
        runs: The number of runs that have begun, without nested ones.
        keeps_own: Whether the end of a run leaves the replica's own stream in use, since another run follows. Then it
            is not switched between the two. Anything else that draws numbers calls `reset` first.
    """

    def __init__(self) -> None:
        self.generators: list[Any] = [torch.default_generator]
        self._device: Device | None = None  # the latest one
        self._devices: set[Device] = set()
        self._replica_id = -1
        self._shared_bytes = b""
        self._other: list[torch.Tensor] = []  # the states of the stream that is not in use
        self.is_own = self.keeps_own = self._has_switched = False
        self._before = self._replica_id, self._shared_bytes, self._other  # the latest `run`
        self.depth = self.runs = 0

    def use_device(self, device: Device) -> None:
        """Include this device's generator in the switches, if it has one."""
        if device is self._device:
            return
        self._device = device
        if device not in self._devices and (found := generator(device)) is not None:
            self._devices.add(device)
            self.generators.append(found)

    @spared
    def enter(self, replica_id: int) -> None:
        """Switch from the shared stream to the replica's own."""
        self.depth += 1
        if self.depth > 1:
            self._use(own=True)
            return
        self.runs += 1
        self._has_switched = False
        if self.is_own and replica_id == self._replica_id:
            self._before = self._replica_id, self._shared_bytes, self.read()
            return
        self._use(own=False)
        self._before = self._replica_id, self._shared_bytes, self._other
        shared = self.read()
        found = _bytes(shared)
        own, self._other, self.is_own = self._other, shared, True
        if found == self._shared_bytes and replica_id == self._replica_id:
            self.write(own)
        else:
            self._replica_id = replica_id
            for each in self.generators:
                each.manual_seed(_fold(found, replica_id))
            shared[0][_MARKED] = _MARK
            self._shared_bytes = _bytes(shared)
            self._has_switched = True

    @spared
    def leave(self, depth: int = 0) -> None:
        """Switch back to the stream that was in use before the `enter` that was called at this `depth`, if it was."""
        if self.depth > depth:
            self.depth = depth
            if depth or not self.keeps_own or self._has_switched:
                self._use(own=False)

    def reset(self) -> None:
        """Switch to the shared stream, because the previous program may have ended in a `run`."""
        if self.is_own:
            self._use(own=False)
        self.depth = 0

    def undo_run(self) -> None:
        """Continue the replica's own stream as if the latest `run`, which was ended, had not begun."""
        self._replica_id, self._shared_bytes, self._other = self._before

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Return a context that uses the shared stream, even in a `run`."""
        if not self.is_own:
            yield
            return
        try:
            self._use(own=False)
            yield
        finally:
            self._use(own=True)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Return a context that uses the replica's own stream, in a part of a `run` that uses the shared one."""
        if self.is_own or not self.depth:
            yield
            return
        try:
            self._use(own=True)
            yield
        finally:
            self._use(own=False)

    @spared
    def _use(self, *, own: bool) -> None:
        """Switch to the replica's own stream, or to the shared one, unless it is in use."""
        if own is not self.is_own:
            here = self.read()
            self.write(self._other)
            self._other, self.is_own, self._has_switched = here, own, True

    def read(self) -> list[torch.Tensor]:
        """Return the generators' states."""
        return list(map(_get_state, self.generators))

    def write(self, states: list[torch.Tensor]) -> None:
        """Set the generators' states to a result of `read`."""
        for each, state in zip(self.generators, states, strict=True):
            each.set_state(state)


_get_state = operator.methodcaller("get_state")
streams = Streams()


def _bytes(states: list[torch.Tensor]) -> bytes:
    return b"".join(map(content_of, states))


def _fold(states: bytes, replica_id: int) -> int:
    salt = replica_id.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(states, digest_size=8, salt=salt).digest(), "little")


# -- detection of a new seed -------------------------------------------------------------------------------------------
# `torch.manual_seed(1)` must restart the replica's stream even if the last seed was 1 and nothing was drawn since. But
# the state is then equal to the earlier one. So the shared state carries a mark when it is written back, in a field
# that seeding clears: the cached single-precision normal, which CPU kernels never use (they cache a double).
# tests/core/runtime/test_randomness.py checks that the mark changes no random number and that seeding clears it.

_MARKED = slice(-8, None)
_MARK = torch.tensor([0, 0, 0, 63, 1, 0, 0, 0], dtype=torch.uint8, device="cpu")  # the float 0.5, and a flag: valid


def captured() -> bytes:
    """Return the pickled random states that replicas share, for a comparison: torch's, `random`'s and NumPy's."""
    with streams.shared():
        return pickle.dumps(RngState.capture(streams.generators))


def restore(states: bytes) -> None:
    """Set the random states that replicas share to a result of `captured`, of a replica on the same type of device."""
    state = pickle.loads(states)
    if len(state.torch) == len(streams.generators):
        with streams.shared():
            state.restore(streams.generators)


def share(group: Group) -> None:
    """Set every replica's random states to those that `captured` returns on replica 0. All replicas must call this."""
    with streams.shared():
        received = broadcast_bytes(group, captured() if group.rank == 0 else None, 0)
        if group.rank != 0:
            pickle.loads(received).restore(streams.generators)
