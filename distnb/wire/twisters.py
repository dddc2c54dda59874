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

__all__ = ["NumpyTwister", "PythonTwister"]

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
