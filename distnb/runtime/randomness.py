"""Two streams of random numbers: one that all replicas share, and one of each replica's own.

Outside replicas every process draws from the same state, so initial values and shuffles are equal. In `run` the global
generators of torch, NumPy and `random` hold a state that was folded with the replica's id. Their states are swapped,
because user code and torch's kernels draw from the global generators and from nothing else.

A replica's own stream begins anew, derived from the shared one, whenever the shared one moved (drawn from, seeded, or
set) since the last `run`; otherwise it goes on. So a program that seeds at its beginning repeats itself exactly, and
the shared stream is the same as in a run with one replica.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char
from typing import TYPE_CHECKING, Any

import torch

from distnb.runtime.gathering import broadcast_bytes

if TYPE_CHECKING:
    from distnb.collectives.groups import Group

__all__ = ["capture", "restore", "share", "streams"]


class _Stream(ABC):
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
    return int.from_bytes(hashlib.blake2b(state, digest_size=8, salt=replica_id.to_bytes(8, "little")).digest(), "little")


class _TorchStream(_Stream):
    """torch's CPU generator.

    Seeding it with the number that it was seeded with before must begin the replica's stream anew, but yields a state
    that is equal to an earlier one. So the shared state, when it is written back, carries a mark in a field that seeding
    clears: the cached single-precision normal, which CPU kernels never use (they cache a double). `_mark_is_safe`
    tries that out; where it is not so, there is no mark.

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


class _CudaStream(_Stream):
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


class _PythonStream(_Stream):
    """The `random` module's generator.

    Its state as a tuple of 625 integers costs 9 µs to swap; as memory, a fraction of one. Whether the memory is laid
    out as expected is tried out once; if not, the tuples are used.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator: random.Random = random._inst  # type: ignore[attr-defined]
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


class _NumpyStream(_Stream):
    """NumPy's legacy global generator; its memory is used as that of `random` is, with the same precaution."""

    def __init__(self) -> None:
        super().__init__()
        import numpy as np

        self._random = np.random
        self._generator = np.random.mtrand._rand
        self._cached_normal_at = _cached_normal_at(np.random)
        self._bits: Any = None
        self._memory: Any = None
        self._normal: Any = None
        self._scratch = np.random.RandomState(np.random.MT19937(0))
        self._scratch_memory = (c_char * _STATE_NBYTES).from_address(_bits_address(self._scratch))

    def _attach(self) -> bool:
        """Find the memory; False where there is none, or a user has set another kind of bit generator."""
        bits = self._random.get_bit_generator()
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
        kind = type(self._random.get_bit_generator())
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


class Streams:
    """All global generators of this process, switched together. There is one instance, `streams`."""

    def __init__(self) -> None:
        self._torch: _TorchStream | None = None
        self._streams: list[_Stream] = []
        self._has_numpy = False
        self._cuda: set[int] = set()
        self._inside = False
        self._lent = False

    def _find_generators(self) -> None:
        if self._torch is None:
            self._torch = _TorchStream()
            self._streams = [self._torch, _PythonStream()]
        if not self._has_numpy and "numpy" in sys.modules:
            self._has_numpy = True
            self._streams.append(_NumpyStream())

    def use_cuda(self, index: int) -> None:
        """Switch this CUDA device's generator too."""
        if index not in self._cuda:
            self._cuda.add(index)
            self._find_generators()
            torch.cuda.init()
            self._streams.append(_CudaStream(index))

    def enter(self, replica_id: int) -> None:
        """From the shared streams to the replica's own."""
        if self._inside:  # run within merge_call within run
            self._swap(to_shared=False)
            return
        if not self._has_numpy:
            self._find_generators()
        assert self._torch is not None
        # Who seeds torch expects that everything begins anew.
        renew = self._torch.switch(replica_id)
        for stream in self._streams[1:]:
            stream.enter(replica_id, self._torch.key, renew)
        self._inside = True

    def leave(self) -> None:
        """Back to the shared streams."""
        if self._lent:
            self._swap(to_shared=True)
            return
        for stream in self._streams:
            stream.leave()
        self._inside = False

    def _swap(self, *, to_shared: bool) -> None:
        for stream in self._streams:
            if to_shared:
                stream.swap_to_shared()
            else:
                stream.swap_to_own()
        self._lent = to_shared

    def reset(self) -> None:
        """Be outside replicas: what runs now may follow on a program that was ended in their midst."""
        if self._inside and not self._lent:
            for stream in self._streams:
                stream.leave()
        self._inside = self._lent = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Draw from the shared streams, also in the midst of a `run`."""
        if not self._inside or self._lent:
            yield
            return
        self._swap(to_shared=True)
        try:
            yield
        finally:
            self._swap(to_shared=False)


streams = Streams()


def capture() -> dict[str, Any]:
    """The states of the global generators, ready to be pickled."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: dict[str, Any]) -> None:
    """Set what `capture` gave."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def share(group: Group) -> None:
    """Give every replica the shared streams of replica 0. All replicas call it together."""
    with streams.shared():
        data = pickle.dumps(capture()) if group.rank == 0 else None
        received = broadcast_bytes(group, data, 0)
        if group.rank != 0:
            restore(pickle.loads(received))
