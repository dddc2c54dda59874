"""What a program sees besides names: working directory, import path, default dtype, random state.

The notebook's is delivered to the engines when it changed, and what a program left behind comes back, so that the
notebook stands where it would had it run the program itself.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["Environment", "Generators", "apply_environment", "capture_environment", "capture_generators"]


@dataclass(frozen=True)
class Generators:
    """States of the global random generators; None where the library is not loaded.

    Attributes:
        torch: The CPU generator's state, as bytes.
        torch_seed: Its seed, if nothing has been drawn since it was seeded: other devices are then seeded alike.
    """

    python: Any = None
    numpy: Any = None
    torch: bytes | None = None
    torch_seed: int | None = None


@dataclass(frozen=True)
class Environment:
    """The parts that changed; None for those that did not."""

    cwd: str | None = None
    path: tuple[str, ...] | None = None
    dtype: Any = None
    generators: Generators | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing changed."""
        return self.cwd is None and self.path is None and self.dtype is None and self.generators is None

    def since(self, earlier: Environment | None) -> Environment:
        """The parts in which this differs from an earlier capture."""
        if earlier is None:
            return self
        return Environment(
            None if self.cwd == earlier.cwd else self.cwd,
            None if self.path == earlier.path else self.path,
            None if self.dtype == earlier.dtype else self.dtype,
            None if self.generators == earlier.generators else self.generators,
        )


def capture_environment() -> Environment:
    """The environment of this process."""
    try:
        cwd: str | None = os.getcwd()
    except FileNotFoundError:  # the directory was removed under us
        cwd = None
    torch = sys.modules.get("torch")
    return Environment(cwd, tuple(sys.path), torch.get_default_dtype() if torch else None, capture_generators())


def capture_generators() -> Generators:
    """The states of the global generators of this process."""
    # numpy seeds itself from the system's entropy: loaded on the replicas alone, it would differ on each.
    import numpy.random

    torch = sys.modules.get("torch")
    return Generators(
        random.getstate(),
        _numpy_state(numpy.random),
        torch.get_rng_state().numpy().tobytes() if torch is not None and hasattr(torch, "get_rng_state") else None,
    )


_last_numpy: tuple[Any, bytes, Any] = (None, b"", None)
_MT19937_NBYTES = 624 * 4 + 4


def _numpy_state(numpy_random: Any) -> Any:
    """The state of numpy's global generator. It is asked for around every call, and asking numpy takes 25 µs."""
    global _last_numpy
    generator = numpy_random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return numpy_random.get_state(legacy=False)
    raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_NBYTES)
    last, last_raw, last_state = _last_numpy
    # A spare Gaussian lies outside that memory; without one, nothing can be drawn that leaves it as it is.
    if last is generator and last_raw == raw and not last_state[3]:
        return last_state
    state = numpy_random.get_state(legacy=False)
    inner = state["state"]
    found = ("MT19937", inner["key"].tobytes(), int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"]))
    _last_numpy = generator, raw, found
    return found


def with_fresh_seed(generators: Generators) -> Generators:
    """The same states, with `torch_seed` set when torch's generator stands just behind its seeding."""
    torch = sys.modules.get("torch")
    if torch is None or generators.torch is None:
        return generators
    seed = torch.initial_seed()
    fresh = torch.Generator().manual_seed(seed).get_state().numpy().tobytes()
    return Generators(
        generators.python, generators.numpy, generators.torch, seed if fresh == generators.torch else None
    )


def apply_environment(environment: Environment) -> None:
    """Make this process's environment what a capture says; parts that are None stay."""
    if environment.cwd is not None and os.path.isdir(environment.cwd):
        os.chdir(environment.cwd)
    if environment.path is not None:
        sys.path[:] = environment.path
    if environment.dtype is not None:
        import torch

        torch.set_default_dtype(environment.dtype)
    if environment.generators is not None:
        _apply_generators(environment.generators)


def _apply_generators(generators: Generators) -> None:
    if generators.python is not None:
        random.setstate(generators.python)
    if generators.numpy is not None:
        _set_numpy_state(generators.numpy)
    if generators.torch is not None:
        import numpy
        import torch

        if generators.torch_seed is not None:
            torch.manual_seed(generators.torch_seed)
        torch.set_rng_state(torch.from_numpy(numpy.frombuffer(generators.torch, dtype=numpy.uint8).copy()))


def _set_numpy_state(state: Any) -> None:
    import numpy

    if isinstance(state, tuple):
        name, key, position, has_gauss, gauss = state
        state = {
            "bit_generator": name,
            "state": {"key": numpy.frombuffer(key, dtype=numpy.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": gauss,
        }
    numpy.random.set_state(state)
