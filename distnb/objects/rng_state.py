"""The state of the global random generators: of torch, of `random` and of NumPy."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distnb.compat import patches

__all__ = ["RngState", "content_of", "generator_state", "numpy_state", "set_generator_state", "set_numpy_state"]

_MT19937_NBYTES = 625 * 4


class RngState(NamedTuple):
    """State of the global random generators, as plain data that can be sent, stored and compared.

    Attributes:
        torch: The states of torch's generators: the CPU's generator, or the generators that `capture` was given.
        python: The state of `random`.
        numpy: The state of `numpy.random`.

    Example:
        >>> state = RngState.capture()
        >>> first = random.random()
        >>> state.restore()
        >>> random.random() == first
        True
    """

    torch: tuple[bytes, ...]
    python: Any
    numpy: tuple[Any, ...]

    @classmethod
    def capture(cls, generators: Sequence[Any] = ()) -> RngState:
        """Return the current state. If generators are given, they replace torch's generator of the CPU."""
        of_torch = tuple(map(generator_state, generators or _cpu()))
        return cls(torch=of_torch, python=random.getstate(), numpy=numpy_state())

    @classmethod
    def seeded(cls, seed: int) -> RngState:
        """Return the state of generators that were seeded with a number of up to 64 bits."""
        import numpy.random
        import torch

        words = [seed & 0xFFFFFFFF, seed >> 32]
        return cls(
            torch=(generator_state(torch.Generator().manual_seed(seed)),),
            python=random.Random(seed).getstate(),
            numpy=_plain(numpy.random.RandomState(words).get_state(legacy=True)),
        )

    def restore(self, generators: Sequence[Any] = ()) -> None:
        """Set the generators to this state. Pass the same torch generators as to `capture`."""
        for generator, state in zip(generators or _cpu(), self.torch, strict=True):
            set_generator_state(generator, state)
        random.setstate(self.python)
        set_numpy_state(self.numpy)


def generator_state(generator: Any) -> bytes:
    """Return the state of a torch generator as bytes. Unlike pickled tensors, they are equal for equal states."""
    return content_of(generator.get_state())


def content_of(state: Any) -> bytes:
    """Return the bytes of the tensor that a torch generator's `get_state` returned."""
    content: bytes = _bytes_at(state.nbytes)(state.data_ptr()).raw  # `numpy()` takes several times as long
    return content


@functools.cache
def _bytes_at(nbytes: int) -> Callable[[int], Any]:
    return (ctypes.c_char * nbytes).from_address


def set_generator_state(generator: Any, state: bytes) -> None:
    """Set a torch generator to the state that `generator_state` returned."""
    import torch

    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


_known: tuple[bytes, tuple[Any, ...]] | None = None  # the memory of NumPy's generator, and its state


def numpy_state() -> tuple[Any, ...]:
    """Return the state of `numpy.random`, and import it if necessary.

    NumPy seeds itself from the system's entropy. If only the replicas imported it, their states would differ.
    """
    global _known
    import numpy.random

    generator: Any = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, numpy.random.MT19937):
        return _plain(numpy.random.get_state(legacy=True))
    # Comparing the generator's memory takes a hundredth of the time of NumPy's own copy, which has one thing more: a
    # normal number that may be kept for the next call. One appears only when numbers are drawn, or a state is set.
    memory = _bytes_at(_MT19937_NBYTES)(generator.ctypes.state_address).raw
    if _known is not None and _known[0] == memory:
        return _known[1]
    patches.wrap("numpy.random:set_state", _forget)
    _, key, _, keeps_number, _ = state = _plain(numpy.random.get_state(legacy=True))
    _known = None if keeps_number or not memory.startswith(key) else (memory, state)
    return state


def _forget(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _known
    _known = None
    return plain(*args, **kwargs)


def set_numpy_state(state: tuple[Any, ...]) -> None:
    """Set `numpy.random` to the state that `numpy_state` returned."""
    import numpy.random

    name, key, *rest = state
    numpy.random.set_state((name, numpy.frombuffer(key, numpy.uint32), *rest))


def _cpu() -> tuple[Any]:
    import torch

    return (torch.default_generator,)


def _plain(state: Any) -> tuple[Any, ...]:
    name, key, *rest = state
    return (name, key.tobytes(), *rest)
