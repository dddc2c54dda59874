"""The global generators of random numbers, and how each of them is switched between two states quickly."""

from __future__ import annotations

import hashlib
import pickle
import random
from abc import ABC, abstractmethod
from ctypes import string_at
from typing import Any

import torch

from distnb.wire.twisters import NumpyTwister, PythonTwister, bits_memory

__all__ = ["DeviceStream", "NumpyStream", "PythonStream", "Stream", "TorchStream"]


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

    def enter(self, replica_id: int, key: int, renew: bool) -> bool:
        """Switch to the replica's own state, which begins anew when asked, or when the shared one moved.

        Returns:
            Whether it began anew.
        """
        state = self.read()
        renew = renew or state != self._shared or replica_id != self._replica_id
        if renew:
            self._replica_id = replica_id
            self._shared = state
            self._own = self.derive(_fold(pickle.dumps((key, state)), replica_id))
        self.write(self._own)
        return renew

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
        self._raw_shared = b""

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
        renew = replica_id != self._replica_id or self._shared is None or _raw(state) != self._raw_shared
        if renew:
            self._replica_id = replica_id
            if self._marks:
                state = _unmarked(state)
            self.key = _fold(_raw(state), replica_id)
            self._own = self.derive(self.key)
            self._shared = _marked(state) if self._marks else state
            self._raw_shared = _raw(self._shared)
        self._generator.set_state(self._own)
        return renew


def _raw(state: torch.Tensor) -> bytes:
    return string_at(state.data_ptr(), state.numel())


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


class DeviceStream(Stream):
    """The generator of an accelerator.

    Args:
        generator: As `accelerators.generator` gives it.
    """

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self._generator = generator

    def read(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()  # type: ignore[no-any-return]

    def write(self, state: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def derive(self, seed: int) -> bytes:
        self._generator.manual_seed(seed)
        return self.read()


class PythonStream(Stream):
    """The `random` module's generator."""

    def __init__(self) -> None:
        super().__init__()
        self._twister = PythonTwister()
        self._scratch = random.Random(0)
        self._scratch_twister = PythonTwister(self._scratch)

    def read(self) -> Any:
        return self._twister.read() if self._twister.works else random.getstate()

    def write(self, state: Any) -> None:
        if self._twister.works:
            self._twister.write(state)
        else:
            random.setstate(state)

    def derive(self, seed: int) -> Any:
        self._scratch.seed(seed)
        return self._scratch_twister.read() if self._twister.works else self._scratch.getstate()


class NumpyStream(Stream):
    """NumPy's legacy global generator."""

    def __init__(self) -> None:
        super().__init__()
        import numpy as np

        self._random = np.random
        self._twister = NumpyTwister()
        self._scratch = np.random.RandomState(np.random.MT19937(0))
        self._scratch_memory = bits_memory(self._scratch._bit_generator)

    def read(self) -> Any:
        return self._twister.read() if self._twister.works else pickle.dumps(self._random.get_state(legacy=False))

    def write(self, state: Any) -> None:
        if isinstance(state, tuple) and self._twister.works:
            self._twister.write(state)
        else:
            self._random.set_state(pickle.loads(state))

    def derive(self, seed: int) -> Any:
        if self._twister.works:
            self._scratch.seed([seed & 0xFFFFFFFF, seed >> 32])
            return self._scratch_memory.raw, bytes(16)
        kind = type(self._random.get_bit_generator())  # type: ignore[attr-defined]
        return pickle.dumps(self._random.RandomState(kind(seed)).get_state(legacy=False))
