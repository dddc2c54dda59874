"""The memory of the global Mersenne Twisters of `random` and `numpy.random`, to compare and to swap states cheaply.

As a tuple of 625 integers a state costs 9 µs to swap and 40 µs to read and compare; as memory, a fraction of one.
Whether an interpreter, and a NumPy, lay it out as expected is tried out; where they do not, there is no memory.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable
from ctypes import c_char
from typing import Any

__all__ = ["NumpyTwister", "PythonTwister", "TorchTwister"]

_STATE_NBYTES = 2500  # 624 words, and an index before or after them


class PythonTwister:
    """A generator of the `random` module; the global one unless another is given.

    Attributes:
        works: Whether its memory can be used.
    """

    def __init__(self, generator: random.Random | None = None) -> None:
        self._generator: Any = random._inst if generator is None else generator
        self._memory = memory_of(self._generator)
        self.works = self._memory is not None

    def read(self) -> tuple[bytes, float | None]:
        """The state, ready to be compared with another and to be written back."""
        return self._memory.raw, self._generator.gauss_next

    def write(self, state: tuple[bytes, float | None]) -> None:
        """Give the generator a state that `read` returned."""
        self._memory.raw, self._generator.gauss_next = state


def memory_of(generator: random.Random) -> Any:
    """The state as memory, or None where an interpreter lays it out in another way."""
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + _STATE_NBYTES:
        return None
    memory = (c_char * _STATE_NBYTES).from_address(id(generator) + object.__basicsize__)
    words = struct.unpack("=i624I", memory.raw)
    return memory if (*words[1:], words[0]) == generator.getstate()[1] else None


class NumpyTwister:
    """NumPy's legacy global generator."""

    def __init__(self) -> None:
        import numpy as np

        self._random = np.random
        self._bit_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]
        self._generator = np.random.mtrand._rand
        self._cached_normal_at = cached_normal_at(np.random)
        self._bits: Any = None
        self._memory: Any = None
        self._normal: Any = None

    @property
    def works(self) -> bool:
        """Whether its memory can be used now: a user may have set another kind of bit generator."""
        bits = self._bit_generator()
        if bits is not self._bits:
            self._bits, self._memory = bits, None
            if self._cached_normal_at is not None and type(bits) is self._random.MT19937:
                self._memory = bits_memory(bits)
                self._normal = (c_char * 16).from_address(id(self._generator) + self._cached_normal_at)
        return self._memory is not None

    def read(self) -> tuple[bytes, bytes]:
        """The state and the spare Gaussian, ready to be compared and to be written back. Only where it `works`."""
        return self._memory.raw, self._normal.raw

    def write(self, state: tuple[bytes, bytes]) -> None:
        """Give the generator a state that `read` returned."""
        self._memory.raw, self._normal.raw = state


def bits_memory(bits: Any) -> Any:
    """The memory of a bit generator of kind MT19937."""
    return (c_char * _STATE_NBYTES).from_address(int(bits.ctypes.state_address))


def cached_normal_at(numpy_random: Any) -> int | None:
    """Where, in a RandomState, the flag and the value of the spare Gaussian are; None if they are not found."""
    probe = numpy_random.RandomState(1)
    memory = (c_char * type(probe).__basicsize__).from_address(id(probe))
    words = probe.get_state()
    if bits_memory(probe._bit_generator).raw != struct.pack("=624Ii", *map(int, words[1]), words[2]):
        return None
    probe.standard_normal()
    cached = struct.pack("=qd", 1, probe.get_state()[4])
    at = memory.raw.find(cached)
    if at < 0 or memory.raw.find(cached, at + 1) >= 0:
        return None
    probe.standard_normal()
    return at if memory.raw[at : at + 4] == bytes(4) else None


_TORCH_HEADER_NBYTES = 20  # seed, words left, whether seeded, next word
_TORCH_NORMALS_NBYTES = 28  # a float and a double that were drawn in advance, each with its flag
_TORCH_SEARCHED_NBYTES = 512


class TorchTwister:
    """torch's generator of the CPU; the global one unless another is given. To be read only.

    Attributes:
        works: Whether its memory can be used.
    """

    def __init__(self, generator: Any = None) -> None:
        import torch

        self._generator = torch.default_generator if generator is None else generator
        at = torch_state_at()
        self.works = at is not None
        self._memory = None if at is None else torch_memory(self._generator, at)

    def read(self) -> bytes:
        """What is equal as long as the state is."""
        found: bytes = self._memory.raw  # type: ignore[union-attr]
        return found


def torch_memory(generator: Any, at: int) -> Any:
    """The memory of a generator whose state begins at an offset."""
    nbytes = _TORCH_HEADER_NBYTES + 4 * 624 + _TORCH_NORMALS_NBYTES
    return (c_char * nbytes).from_address(generator._cdata + at)


def torch_state_at() -> int | None:
    """Where, in a generator, its state begins; None if it is not found, or if it is not all that there is."""
    import torch

    probe = torch.Generator()
    state = probe.manual_seed(1).get_state()
    words = state[:5048].view(torch.int64)
    if sys.implementation.name != "cpython" or len(state) != 5056 or not hasattr(probe, "_cdata"):
        return None
    first = struct.pack("=8I", *(int(word) for word in words[3:11]))
    found = (c_char * _TORCH_SEARCHED_NBYTES).from_address(probe._cdata).raw.find(first)
    at = found - _TORCH_HEADER_NBYTES
    return at if at >= 0 and _shows_all(probe, torch_memory(probe, at), state) else None


def _shows_all(probe: Any, memory: Any, state: Any) -> bool:
    """Whether nothing of a state can change unseen. What else is seen (a flag's padding) does no harm."""
    for place in (0, 24, 24 + 8 * 623):  # the seed, the first and the last word
        changed = state.clone()
        changed[place] ^= 1
        probe.set_state(changed)
        seen = _words(memory)
        probe.set_state(state)
        if seen == _words(memory):
            return False
    probe.set_state(state)
    for _ in range(2):  # the first number makes new words, the second only moves on
        seen = _words(memory)
        state.new_empty(1).random_(generator=probe)
        if seen == _words(memory):
            return False
    for kind, place, valid in (("=f", 5048, 5052), ("=d", 5024, 5040)):
        changed = state.clone()
        number = struct.pack(kind, 0.7)
        changed[place : place + len(number)] = changed.new_tensor(list(number))
        changed[valid] = 1
        probe.set_state(changed)
        found = memory.raw[-_TORCH_NORMALS_NBYTES:].find(number)
        if found < 0 or found + len(number) >= _TORCH_NORMALS_NBYTES:  # its flag comes after it
            return False
    return True


def _words(memory: Any) -> bytes:
    seen: bytes = memory.raw[:-_TORCH_NORMALS_NBYTES]
    return seen[:13] + seen[16:]  # without the padding behind a flag
