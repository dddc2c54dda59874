"""The modes that a program sees in addition to names, from the working directory to autocast, and random states.

One table says of each mode how it is read and set, and when. The notebook's modes travel to the engines when they
changed, and what a program left behind comes back, so that the notebook stands where it would had it run the program
itself. What is no row of the table does not travel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distnb.objects.rng_state import generator_state, numpy_state, set_numpy_state

__all__ = [
    "MODES",
    "NO_CHANGES",
    "RANDOM",
    "Environment",
    "Mode",
    "Moment",
    "apply_environment",
    "capture_early",
    "capture_environment",
    "cell_began",
    "outside_inference",
]


@dataclass(frozen=True)
class Environment:
    """Modes by name, all of them or those that changed, and the number of the cell in which they were captured."""

    modes: Mapping[str, Any] = field(default_factory=dict)
    cell: int = field(default=0, compare=False)

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

        The notebook's `cuda:0` becomes each replica's own device, as it does for tensors that travel; `cpu` and `meta`
        stay. A process whose device is the CPU needs no GPU.
        """
        wanted = self.modes.get(_DEFAULT_DEVICE)
        if wanted is None or wanted.partition(":")[0] in ("cpu", "meta"):
            return self
        return Environment({**self.modes, _DEFAULT_DEVICE: device}, self.cell)


_DEFAULT_DEVICE = "default device"

NO_CHANGES = Environment()

Moment = Literal["call", "end", "beginning"]
_MOMENTS: tuple[Moment, ...] = ("call", "end", "beginning")


@dataclass(frozen=True)
class Mode:
    """A mode: a row of the table.

    Attributes:
        name: Under which it travels.
        capture: Reads it. The value is plain data, and opens where none of the user's modules is.
        apply: Sets it to a value that `capture` read in another process.
        library: It is read only where this is loaded.
        when: It is looked at around each "call" and cell; around cells only, at their "end", too; or at a cell's
            "beginning" only, so that it does not come back (imports on the replicas change filters, too). The beginning
            of an ordinary cell is the first call in it.
        early: It is set before what comes with it is opened; the others, which would disturb that, afterwards.
    """

    name: str
    capture: Callable[[], Any]
    apply: Callable[[Any], Any]
    library: str = ""
    when: Moment = "call"
    early: bool = False


def capture_environment(before: Environment | None = None, moment: Moment = "beginning") -> Environment:
    """Return the modes of this process.

    Args:
        before: An earlier capture. It is returned itself if nothing has changed.
        moment: A cell's beginning, its end, or around a call. Modes that are not looked at then are taken from
            `before`, but not at the first call in a cell.
    """
    loaded = "", *filter(_is_loaded, ("torch", "numpy"))
    if before is None or before.cell != _cell or len(before.modes) < len(_compared("beginning", loaded)):
        moment = "beginning"  # of the cell; or a library was loaded since
    known = before.modes if before is not None else {}
    changed = {}
    for mode in _compared(moment, loaded):
        value = mode.capture()
        if mode.name not in known or value != known[mode.name]:
            changed[mode.name] = value
    if before is not None and before.cell == _cell and not changed:
        return before
    return Environment({**known, **changed}, _cell)


def capture_early() -> Environment:
    """Return the modes that a process needs before it opens an object: paths, environment variables and the like."""
    found = {
        mode.name: mode.capture() for mode in MODES if mode.early and (not mode.library or _is_loaded(mode.library))
    }
    return Environment(found, _cell)


@functools.cache
def _compared(moment: Moment, loaded: tuple[str, ...]) -> tuple[Mode, ...]:
    """Return the modes that are compared at a moment, if these libraries are loaded."""
    whens = _MOMENTS[: _MOMENTS.index(moment) + 1]
    return tuple(mode for mode in MODES if mode.when in whens and mode.library in loaded)


_cell = 0


def cell_began() -> None:
    """Note that a cell of the notebook begins."""
    global _cell
    _cell += 1


def apply_environment(environment: Environment, *, early: bool | None = None) -> None:
    """Set this process's modes to those of a capture. Modes that are not in it stay.

    Args:
        early: Only those that are set before objects are made that came with them, or only the others; None for all.
    """
    for mode in MODES:
        if mode.name in environment.modes and early in (None, mode.early):
            value = environment.modes[mode.name]
            if mode.capture() != value:
                mode.apply(value)


def _is_loaded(library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


# -- the interpreter ---------------------------------------------------------------------------------------------------


def _directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed under us
        return None


def _set_directory(directory: str | None) -> None:
    if directory is not None and os.path.isdir(directory):
        os.chdir(directory)


def _set_path(path: tuple[str, ...]) -> None:
    sys.path[:] = path


_OF_THE_PROCESS = frozenset(
    {
        # What torchrun would set, and what says which devices and cores are whose.
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"),
        *("PWD", "OLDPWD", "LINES", "COLUMNS", "PYTEST_CURRENT_TEST"),
    }
)
# Bytes by bytes. `os.environ` itself decodes each item every time: 16 µs for 35 of them, where this takes 0.3.
_variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
_variables_at_first = dict(_variables)
_variables_now = _variables_at_first  # when they were last looked at, and what had changed then
_changed_now: dict[str, str | None] = {}


def _changed_variables() -> dict[str, str | None]:
    """Environment variables that were set, changed or deleted (None) since this process began.

    Not all of them: on another machine the others are another's.
    """
    global _variables_now, _changed_now
    if _variables == _variables_now:
        return _changed_now
    names = {os.fsdecode(name) for name, _ in _variables.items() ^ _variables_at_first.items()}
    own = sorted(name for name in names if name not in _OF_THE_PROCESS and not name.startswith("DISTNB_"))
    _variables_now, _changed_now = dict(_variables), {name: os.environ.get(name) for name in own}
    return _changed_now


def _set_variables(wanted: dict[str, str | None]) -> None:
    for name in _changed_variables().keys() | wanted.keys():
        at_first = _variables_at_first.get(os.fsencode(name))
        value = wanted[name] if name in wanted else None if at_first is None else os.fsdecode(at_first)
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _shell() -> Any:
    """IPython's, if this is one's process."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _traceback_mode() -> str | None:
    shell = _shell()
    return None if shell is None else str(shell.InteractiveTB.mode)


def _set_traceback_mode(mode: str | None) -> None:
    shell = _shell()
    if shell is not None and mode is not None:
        shell.InteractiveTB.set_mode(mode)


def _warning_filters() -> list[tuple[Any, ...]]:
    return [
        (action, message, category.__module__, category.__qualname__, module, line)
        for action, message, category, module, line in warnings.filters
        if isinstance(category, type)
    ]


def _set_warning_filters(filters: list[tuple[Any, ...]]) -> None:
    found = [
        (action, message, category, module, line)
        for action, message, of, name, module, line in filters
        if (category := _category(of, name)) is not None
    ]
    warnings.resetwarnings()  # this lets the interpreter see that they changed
    warnings.filters[:] = found  # type: ignore[index]


def _category(module: str, name: str) -> Any:
    """Return a class of warnings, or None if it is unknown here (a class of the notebook)."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


# -- torch -------------------------------------------------------------------------------------------------------------


@functools.cache
def _torch() -> Any:
    import torch

    return torch


@functools.cache
def _internals() -> Any:
    from distnb.compat import torch_internals

    return torch_internals


def _default_device() -> str | None:
    device = _internals().default_device()
    return None if device is None else str(device)


_inference_entered: list[tuple[bool, Any]] = []


def _set_inference(on: bool) -> None:
    """Enter inference mode, or leave it by the guard that entered it."""
    if _inference_entered and _inference_entered[-1][0] != on:
        _inference_entered.pop()[1].__exit__(None, None, None)
        return
    guard = _torch().inference_mode(on)
    guard.__enter__()
    _inference_entered.append((on, guard))


@functools.cache
def _kinds_to_cast_on() -> tuple[str, ...]:
    accelerator = _torch().accelerator.current_accelerator()  # to ask for all that torch knows takes 15 µs
    return tuple({"cpu": 0, "cuda": 0, accelerator.type if accelerator is not None else "cpu": 0})


def _autocast() -> list[tuple[Any, ...]]:
    enabled, dtype = _torch().is_autocast_enabled, _torch().get_autocast_dtype
    return [(kind, enabled(kind), dtype(kind)) for kind in _kinds_to_cast_on()]


def _set_autocast(value: list[tuple[Any, ...]]) -> None:
    import torch

    for kind, enabled, dtype in value:
        torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_enabled(kind, enabled)
    torch.clear_autocast_cache()


def _deterministic() -> tuple[bool, bool]:
    torch = _torch()
    on = torch.are_deterministic_algorithms_enabled()
    return on, on and torch.is_deterministic_algorithms_warn_only_enabled()


def _matmul_precision() -> Any:
    torch = _torch()
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by `fp32_precision`, of one backend or more
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def _set_matmul_precision(value: Any) -> None:
    torch = _torch()
    if isinstance(value, str):
        torch.set_float32_matmul_precision(value)
    else:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = value


def _cudnn_flags() -> tuple[bool, bool]:
    flags: tuple[bool, bool] = _internals().cudnn_flags()
    return flags


def _set_cudnn_flags(value: tuple[bool, bool]) -> None:
    cudnn = _torch().backends.cudnn
    cudnn.benchmark, cudnn.deterministic = value


def _set_torch_random(state: bytes) -> None:
    import torch

    generator = torch.default_generator
    wanted = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    seed_before = generator.initial_seed()
    generator.set_state(wanted)
    seed = generator.initial_seed()
    if seed != seed_before or torch.equal(torch.Generator().manual_seed(seed).get_state(), wanted):
        torch.manual_seed(seed)  # who seeds torch seeds the generators of all devices
        generator.set_state(wanted)


def _torch_printing() -> dict[str, Any]:
    from distnb.compat.torch_internals import PRINT_OPTS

    return dict(vars(PRINT_OPTS))


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Make tensors that are ordinary ones, whatever the user's mode is."""
    if not _is_loaded("torch") or not _torch().is_inference_mode_enabled():
        yield
        return
    with _torch().inference_mode(False):
        yield


# -- NumPy -------------------------------------------------------------------------------------------------------------


def _numpy_printing() -> dict[str, Any]:
    import numpy

    # Formatters are functions, mostly the notebook's own.
    options: dict[str, Any] = dict(numpy.get_printoptions())
    return {name: value for name, value in options.items() if name not in ("formatter", "override_repr")}


def _set_numpy_printing(options: dict[str, Any]) -> None:
    import numpy

    numpy.set_printoptions(**options)


# -- the table ---------------------------------------------------------------------------------------------------------

RANDOM = ("torch random state", "random", "numpy.random")
"""The modes that are random states."""

MODES = (
    Mode(name="working directory", capture=_directory, apply=_set_directory, early=True),
    Mode(name="import path", capture=lambda: tuple(sys.path), apply=_set_path, early=True),
    Mode(name="environment variables", capture=_changed_variables, apply=_set_variables, early=True),
    Mode(name="warning filters", capture=_warning_filters, apply=_set_warning_filters, when="beginning"),
    Mode(name="tracebacks", capture=_traceback_mode, apply=_set_traceback_mode, when="beginning"),  # %xmode
    Mode(
        name="default dtype",
        capture=lambda: _torch().get_default_dtype(),
        apply=lambda dtype: _torch().set_default_dtype(dtype),
        library="torch",
        early=True,
    ),
    Mode(
        name="inference mode",
        capture=lambda: _torch().is_inference_mode_enabled(),
        apply=_set_inference,
        library="torch",
    ),
    Mode(
        name="gradients",
        capture=lambda: _torch().is_grad_enabled(),
        apply=lambda on: _torch().set_grad_enabled(on),
        library="torch",
    ),
    Mode(
        name=_DEFAULT_DEVICE,
        capture=_default_device,
        apply=lambda device: _torch().set_default_device(device),
        library="torch",
    ),
    Mode(name="autocast", capture=_autocast, apply=_set_autocast, library="torch"),
    Mode(
        name="deterministic algorithms",
        capture=_deterministic,
        apply=lambda value: _torch().use_deterministic_algorithms(value[0], warn_only=value[1]),
        library="torch",
    ),
    Mode(name="matmul precision", capture=_matmul_precision, apply=_set_matmul_precision, library="torch"),
    Mode(name="cudnn flags", capture=_cudnn_flags, apply=_set_cudnn_flags, library="torch"),
    Mode(
        name="torch printing",
        capture=_torch_printing,
        apply=lambda options: _torch().set_printoptions(**options),
        library="torch",
        when="beginning",
    ),
    Mode(name="numpy printing", capture=_numpy_printing, apply=_set_numpy_printing, library="numpy", when="beginning"),
    Mode(
        name="torch random state",
        capture=lambda: generator_state(_torch().default_generator),
        apply=_set_torch_random,
        library="torch",
    ),
    Mode(name="random", capture=random.getstate, apply=random.setstate, when="end"),
    Mode(name="numpy.random", capture=numpy_state, apply=set_numpy_state, when="end"),
)
