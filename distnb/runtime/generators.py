"""The global generators of random numbers, and how each of them is switched between two states quickly."""

from __future__ import annotations

import hashlib
import pickle
import random
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import c_char
from typing import Any

import torch

__all__ = ["CudaStream", "NumpyStream", "PythonStream", "Stream", "TorchStream"]


class Stream(ABC):
    """One global generator whose state alternates between the shared and the replica's own."""

    def __init__(self) -> None:
        self._shared: Any = None
        self._own: Any = None
        self._replica_id = -1

    @abstractmethod
    def read(self) -> Any:
        """The generator's state, in a form that can be compared with `==`."""

    @abstractmethod
    def write(self, state: Any) -> None:
        """Give the generator a state that `read` returned."""

    @abstractmethod
    def derive(self, seed: int) -> Any:
        """A state made from a seed."""

    def enter(self, replica_id: int, key: int, renew: bool) -> None:
        """Switch to the replica's own state, which begins anew when asked, or when the shared one moved."""
        state = self.read()
        if renew or state != self._shared or replica_id != self._replica_id:
            self._replica_id = replica_id
            self._shared = state
            self._own = self.derive(_fold(pickle.dumps((key, state)), replica_id))
        self.write(self._own)

    def leave(self) -> None:
        """Switch back to the shared state."""
        self._own = self.read()
        self.write(self._shared)

    def swap_to_shared(self) -> None:
        """Within `enter`: use the shared state for a while."""
        self._own = self.read()
        self.write(self._shared)

    def swap_to_own(self) -> None:
        """Back from `swap_to_shared`; what was drawn meanwhile is drawn from the shared state."""
        self._shared = self.read()
        self.write(self._own)


def _fold(state: bytes, replica_id: int) -> int:
    return int.from_bytes(
        hashlib.blake2b(state, digest_size=8, salt=replica_id.to_bytes(8, "little")).digest(), "little"
    )


class TorchStream(Stream):
    """torch's CPU generator.

    Seeding it with the number that it was seeded with before must begin the replica's stream anew, but yields a state
    that is equal to an earlier one. So the shared state, when it is written back, carries a mark in a field that
    seeding clears: the cached single-precision normal, which CPU kernels never use (they cache a double).
    `_mark_is_safe` tries that out; where it is not so, there is no mark.

    Attributes:
        key: The seed from which the replica's stream began; it goes into those of the other generators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key = 0
        self._generator = torch.default_generator
        self._marks = _mark_is_safe()

    def read(self) -> torch.Tensor:
        return self._generator.get_state()

    def write(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)

    def derive(self, seed: int) -> torch.Tensor:
        self._generator.manual_seed(seed)
        return self._generator.get_state()

    def switch(self, replica_id: int) -> bool:
        """What `enter` does for the others. Returns whether the replica's stream began anew."""
        state = self._generator.get_state()
        renew = replica_id != self._replica_id or self._shared is None or not torch.equal(state, self._shared)
        if renew:
            self._replica_id = replica_id
            if self._marks:
                state = _unmarked(state)
            self.key = _fold(state.numpy().tobytes(), replica_id)
            self._own = self.derive(self.key)
            self._shared = _marked(state) if self._marks else state
        self._generator.set_state(self._own)
        return renew


_MARK_AT = slice(-8, None)
_MARK = torch.tensor([0, 0, 0, 63, 1, 0, 0, 0], dtype=torch.uint8)  # 0.5, valid


def _marked(state: torch.Tensor) -> torch.Tensor:
    if bool(state[_MARK_AT].any()):
        return state  # somebody cached a number there after all
    state = state.clone()
    state[_MARK_AT] = _MARK
    return state


def _unmarked(state: torch.Tensor) -> torch.Tensor:
    if torch.equal(state[_MARK_AT], _MARK):
        state = state.clone()
        state[_MARK_AT] = 0
    return state


def _mark_is_safe() -> bool:
    """Whether the mark survives, changes no number drawn, and is cleared by seeding."""
    plain, marked = torch.Generator(), torch.Generator()
    state = plain.manual_seed(1).get_state()
    if bool(state[_MARK_AT].any()):
        return False
    try:
        marked.set_state(_marked(state))
    except RuntimeError:
        return False
    kinds = [(count, dtype) for count in (1, 3, 20) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    drawn = [[torch.randn(count, dtype=dtype, generator=g) for count, dtype in kinds] for g in (plain, marked)]
    same = all(torch.equal(first, second) for first, second in zip(*drawn, strict=True))
    kept = torch.equal(marked.get_state()[_MARK_AT], _MARK)
    return same and kept and torch.equal(marked.manual_seed(1).get_state(), state)


class CudaStream(Stream):
    """The generator of one CUDA device."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._generator = torch.cuda.default_generators[index]

    def read(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()

    def write(self, state: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def derive(self, seed: int) -> bytes:
        return self._generator.clone_state().manual_seed(seed).get_state().numpy().tobytes()


_STATE_NBYTES = 2500  # a Mersenne Twister: 624 words, and an index before or after them


class PythonStream(Stream):
    """The `random` module's generator.

    Its state as a tuple of 625 integers costs 9 µs to swap; as memory, a fraction of one. Whether the memory is laid
    out as expected is tried out once; if not, the tuples are used.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator: random.Random = random._inst
        self._memory = _memory_of(self._generator)
        self._scratch = random.Random(0)
        self._scratch_memory = _memory_of(self._scratch)

    def read(self) -> Any:
        if self._memory is None:
            return self._generator.getstate()
        return self._memory.raw, self._generator.gauss_next  # type: ignore[attr-defined]

    def write(self, state: Any) -> None:
        if self._memory is None:
            self._generator.setstate(state)
        else:
            self._memory.raw, self._generator.gauss_next = state  # type: ignore[attr-defined]

    def derive(self, seed: int) -> Any:
        self._scratch.seed(seed)
        return self._scratch.getstate() if self._memory is None else (self._scratch_memory.raw, None)


def _memory_of(generator: random.Random) -> Any:
    """The state as memory, or None where an interpreter lays it out in another way."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + _STATE_NBYTES:
        return None
    memory = (c_char * _STATE_NBYTES).from_address(id(generator) + object.__basicsize__)
    words = struct.unpack("=i624I", memory.raw)
    return memory if (*words[1:], words[0]) == generator.getstate()[1] else None


class NumpyStream(Stream):
    """NumPy's legacy global generator; its memory is used as that of `random` is, with the same precaution."""

    def __init__(self) -> None:
        super().__init__()
        import numpy as np

        self._random = np.random
        self._bit_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]
        self._generator = np.random.mtrand._rand
        self._cached_normal_at = _cached_normal_at(np.random)
        self._bits: Any = None
        self._memory: Any = None
        self._normal: Any = None
        self._scratch = np.random.RandomState(np.random.MT19937(0))
        self._scratch_memory = (c_char * _STATE_NBYTES).from_address(_bits_address(self._scratch))

    def _attach(self) -> bool:
        """Find the memory; False where there is none, or a user has set another kind of bit generator."""
        bits = self._bit_generator()
        if bits is not self._bits:
            self._bits, self._memory = bits, None
            if self._cached_normal_at is not None and type(bits) is self._random.MT19937:
                self._memory = (c_char * _STATE_NBYTES).from_address(bits.ctypes.state_address)
                self._normal = (c_char * 16).from_address(id(self._generator) + self._cached_normal_at)
        return self._memory is not None

    def read(self) -> Any:
        if self._attach():
            return self._memory.raw, self._normal.raw
        return pickle.dumps(self._generator.get_state(legacy=False))

    def write(self, state: Any) -> None:
        if isinstance(state, tuple) and self._attach():
            self._memory.raw, self._normal.raw = state
        else:
            self._generator.set_state(pickle.loads(state))

    def derive(self, seed: int) -> Any:
        if self._attach():
            self._scratch.seed([seed & 0xFFFFFFFF, seed >> 32])
            return self._scratch_memory.raw, bytes(16)
        kind = type(self._bit_generator())
        return pickle.dumps(self._random.RandomState(kind(seed)).get_state(legacy=False))


def _bits_address(generator: Any) -> int:
    return int(generator._bit_generator.ctypes.state_address)


def _cached_normal_at(numpy_random: Any) -> int | None:
    """Where, in a RandomState, the flag and the value of the cached normal are; None if they are not found."""
    probe = numpy_random.RandomState(1)
    memory = (c_char * type(probe).__basicsize__).from_address(id(probe))
    bits = (c_char * _STATE_NBYTES).from_address(_bits_address(probe))
    words = probe.get_state()
    if bits.raw != struct.pack("=624Ii", *map(int, words[1]), words[2]):
        return None
    probe.standard_normal()
    cached = struct.pack("=qd", 1, probe.get_state()[4])
    at = memory.raw.find(cached)
    if at < 0 or memory.raw.find(cached, at + 1) >= 0:
        return None
    probe.standard_normal()
    return at if memory.raw[at : at + 4] == bytes(4) else None
