"""The environment of a program: all modes of a process, which are sent to the engines, and returned, when they change.

A row of a table describes each mode: how it is read and set, and when (`python_modes`, `torch_modes`, `numpy_modes`,
`keras_modes`). The notebook sends the modes that changed since the last program. The engines return the modes that the
program changed, so that the notebook ends up in the same state as if it had run the program itself. State without a row
is not sent.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distnb.compat import patches
from distnb.objects.modes import python_modes
from distnb.objects.modes.mode import MOMENTS, Mode, Moment
from distnb.objects.modes.seeds import count_seed

__all__ = [
    "NO_CHANGES",
    "CONTEXTS",
    "RANDOM",
    "RESTORED",
    "Environment",
    "Moment",
    "apply_environment",
    "capture_early",
    "capture_environment",
    "cell_began",
    "current_cell",
    "is_current",
    "outside_inference",
    "watch_seeds",
]

RANDOM = ("torch random state", "random", "numpy.random", "keras.random")
"""The modes that are random states."""

CONTEXTS = ("inference mode", "gradients", "default device", "autocast")
"""The modes that `with` statements set and restore."""

RESTORED = frozenset(
    (
        *RANDOM,
        *CONTEXTS,
        *("default dtype", "deterministic algorithms", "matmul precision", "cudnn benchmark", "cudnn deterministic"),
        "Keras's settings",
    )
)
"""The modes that a notebook takes over from engines that stayed when another notebook ended. The others, such as the
working directory and environment variables, are its own."""


@dataclass(frozen=True)
class Environment:
    """Modes by name, all of them or those that changed, and the number of the cell in which they were captured.

    `raw` has what `_raw_modes` returned at the capture. It is not sent.
    """

    modes: Mapping[str, Any] = field(default_factory=dict)
    cell: int = field(default=0, compare=False)
    raw: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> Any:
        return Environment, (self.modes, self.cell)

    def since(self, earlier: Environment | None) -> Environment:
        """Return the modes that differ from an earlier capture."""
        known = {} if earlier is None else earlier.modes
        changed = {name: value for name, value in self.modes.items() if name not in known or known[name] != value}
        return Environment(changed, self.cell)

    def with_changes(self, changes: Environment | None) -> Environment:
        """Return these modes with some changes."""
        return self if changes is None else Environment({**self.modes, **changes.modes}, self.cell)

    def on(self, device: str) -> Environment:
        """Return the modes of another process for one that computes on `device`.

        Each replica's own device replaces the notebook's `cuda:0`, as it does for tensors; `cpu` and `meta` stay. A
        process whose device is the CPU needs no GPU.
        """
        wanted = self.modes.get("default device")
        if wanted is None or wanted.partition(":")[0] in ("cpu", "meta"):
            return self
        return Environment({**self.modes, "default device": device}, self.cell)


NO_CHANGES = Environment()


def capture_environment(before: Environment | None = None, moment: Moment = "beginning") -> Environment:
    """Return the modes of this process.

    Args:
        before: An earlier capture. It is returned itself if nothing has changed.
        moment: A cell's beginning, its end, or around a call. Modes that are not compared then are taken from
            `before`, but not at the first call in a cell.
    """
    raw, libraries = _raw_modes(), _loaded_libraries()
    is_same = before is not None and before.raw == raw
    if before is None or before.cell != _cell or len(before.modes) < len(_compared("beginning", libraries)):
        moment = "beginning"  # this is the first call in the cell, or a library was loaded meanwhile
    elif moment == "call" and is_same:
        return before
    known = before.modes if before is not None else {}
    changed = {}
    for mode in _compared(moment, libraries):
        if is_same and mode.when == "call" and mode.name in known:
            continue
        value = mode.capture()
        if mode.name not in known or value != known[mode.name]:
            changed[mode.name] = value
    if before is not None and before.cell == _cell and not changed:
        object.__setattr__(before, "raw", raw)
        return before
    return Environment({**known, **changed}, _cell, raw)


def is_current(environment: Environment, *, random: bool = True) -> bool:
    """Return whether no mode that is compared around calls has changed since a capture in the current cell.

    Args:
        random: Whether to compare torch's random state, too.
    """
    raw = environment.raw
    return raw is not None and environment.cell == _cell and raw == _raw_modes(None if random else raw[-1])


def capture_early() -> Environment:
    """Return the modes that a process needs before it opens an object: paths, environment variables and the like."""
    found = {mode.name: mode.capture() for mode in _compared("beginning", _loaded_libraries()) if mode.early}
    return Environment(found, _cell)


_cell = 0


def cell_began() -> None:
    """Note that a cell of the notebook begins, or that all modes must be compared as if one did."""
    global _cell
    _cell += 1


def watch_seeds() -> None:
    """Have the next program get the random states whenever the user sets a seed. Idempotent."""
    for target in _SEEDING:
        patches.wrap(target, _seed)


_SEEDING = ("random:seed", "random:setstate", "numpy.random:seed", "numpy.random:set_state")


def _seed(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if count_seed():
        cell_began()
    return plain(*args, **kwargs)


def current_cell() -> int:
    """Return the number of the notebook's current or latest cell; 0 in a script."""
    return _cell


def apply_environment(environment: Environment, *, early: bool | None = None) -> None:
    """Set this process's modes to those of a capture. Modes that are not in it stay.

    Args:
        early: True for the modes that are set before the objects that were sent with them are opened, False for the
            others; None for all.
    """
    modes = _compared("beginning", _loaded_libraries())
    if not environment.modes.keys() <= {mode.name for mode in modes}:
        modes = _compared("beginning", _LIBRARIES)  # a mode belongs to a library that this process has not loaded yet
    for mode in modes:
        if mode.name in environment.modes and early in (None, mode.early):
            value = environment.modes[mode.name]
            if mode.capture() != value:
                mode.apply(value)


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Return a context in which new tensors are ordinary ones, whatever the user's mode is."""
    if "torch" not in _loaded_libraries():
        yield
        return
    import torch

    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False):
        yield


# -- the tables --------------------------------------------------------------------------------------------------------

_LIBRARIES = ("torch", "numpy", "keras")
_loaded: tuple[str, ...] = ()
_not_loaded = frozenset(_LIBRARIES)


def _loaded_libraries() -> tuple[str, ...]:
    global _loaded, _not_loaded
    if not sys.modules.keys().isdisjoint(_not_loaded):  # looks up each of the few names
        _loaded = tuple(filter(_is_loaded, _LIBRARIES))
        _not_loaded = frozenset(_LIBRARIES).difference(_loaded)
    return _loaded


def _raw_modes(random: bytes | None = None) -> tuple[Any, ...]:
    """Return the modes that are compared around calls, as values that are cheap to read: equal if no mode has changed.

    A capture takes several times as long, and most calls change no mode.

    Args:
        random: The value to return for torch's random state, which comes last, if it is not to be read.
    """
    libraries = _loaded_libraries()
    *readers, read_random = _raw_readers(libraries)
    return libraries, *map(operator.call, readers), read_random() if random is None else random


@functools.cache
def _raw_readers(libraries: tuple[str, ...]) -> tuple[Callable[[], Any], ...]:
    readers: list[Callable[[], Any]] = [python_modes.raw_modes]
    if "keras" in libraries:
        from distnb.compat.keras_core import read_settings

        readers.append(read_settings)
    if "torch" not in libraries:
        return *readers, bytes
    from distnb.objects.modes import torch_modes

    return *readers, torch_modes.raw_modes, torch_modes.random_state


def _is_loaded(library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


@functools.cache
def _compared(moment: Moment, libraries: tuple[str, ...]) -> tuple[Mode, ...]:
    """Return the modes of the interpreter and of some libraries that are compared at a moment.

    Load no library that the user has not loaded: torch takes seconds.
    """
    modes = python_modes.MODES
    if "torch" in libraries:
        from distnb.objects.modes import torch_modes

        modes += torch_modes.MODES
    if "numpy" in libraries:
        from distnb.objects.modes import numpy_modes

        modes += numpy_modes.MODES
    if "keras" in libraries:
        from distnb.objects.modes import keras_modes

        modes += keras_modes.MODES
    moments = MOMENTS[: MOMENTS.index(moment) + 1]
    return tuple(mode for mode in modes if mode.when in moments)
