"""Ambient modes: what a program sees besides names, and can set by a statement or for the length of a `with`.

One table says of each mode how it is read and how it is set. Modes are looked at around every call, so there are marks
that are cheap to take: equal marks mean that nothing has changed. What is no row of this table does not travel.
"""

from __future__ import annotations

import contextlib
import decimal
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distnb.wire import codec, log_levels
from distnb.wire.immutables import is_importable

__all__ = ["Mode", "ambient", "forget_casts", "outside_inference"]


@dataclass(frozen=True)
class Mode:
    """One ambient mode.

    Attributes:
        name: Under which it travels.
        read: Its value: what plain pickle takes, and what can be compared.
        write: Makes this process's mode a value that `read` gave in another.
        early: It is set before what a program brings is opened; the others, which would disturb that, afterwards.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    early: bool = False


@dataclass(frozen=True)
class Rows:
    """The rows of the table for one library.

    Attributes:
        marks: Gives what is equal as long as no mode of these is changed. One function for all of them, without a
            call that is not needed: it is on the way of every call.
    """

    modes: tuple[Mode, ...]
    marks: Callable[[], Any]


# -- of the interpreter ------------------------------------------------------------------------------------------------


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed under us
        return None


def _change_directory(directory: str | None) -> None:
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
_variables_at_first = dict(os.environ)


def _variables() -> dict[str, str | None]:
    """Environment variables that were set, changed or deleted (None) since this process began.

    Not all of them: on another machine the others are another's.
    """
    now = dict(os.environ)
    names = {name for name, value in now.items() if _variables_at_first.get(name) != value}
    names |= _variables_at_first.keys() - now.keys()
    return {name: now.get(name) for name in sorted(names) if not _is_of_the_process(name)}


def _is_of_the_process(name: str) -> bool:
    return name in _OF_THE_PROCESS or name.startswith("DISTNB_")


def _set_variables(wanted: dict[str, str | None]) -> None:
    as_at_first = {name: _variables_at_first.get(name) for name in _variables() if name not in wanted}
    for name, value in {**as_at_first, **wanted}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _warning_filters() -> list[Any]:
    # A class that only the notebook knows cannot be named where nothing else has travelled yet.
    return [each for each in warnings.filters if is_importable(each[2])]


def _set_warning_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()  # this lets the interpreter see that they changed
    warnings.filters[:] = filters  # type: ignore[index]


_DECIMAL_PARTS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _decimal_context() -> tuple[Any, ...]:
    context = decimal.getcontext()
    traps = tuple(sorted(signal.__name__ for signal, trapped in context.traps.items() if trapped))
    return (*(getattr(context, part) for part in _DECIMAL_PARTS), traps)


def _set_decimal_context(value: tuple[Any, ...]) -> None:
    context = decimal.getcontext()
    for part, wanted in zip(_DECIMAL_PARTS, value, strict=False):
        setattr(context, part, wanted)
    for signal in context.traps:
        context.traps[signal] = signal.__name__ in value[-1]


def _set_recursion_limit(limit: int) -> None:
    with contextlib.suppress(RecursionError):  # it is as deep already
        sys.setrecursionlimit(limit)


def _interpreter_rows() -> Rows:
    modes = (
        Mode("working directory", _working_directory, _change_directory, early=True),
        Mode("import path", lambda: tuple(sys.path), _set_path, early=True),
        Mode("environment variables", _variables, _set_variables, early=True),
        Mode("recursion limit", sys.getrecursionlimit, _set_recursion_limit, early=True),
        Mode("warnings", _warning_filters, _set_warning_filters),
        Mode("logging", log_levels.read, log_levels.write),
        Mode("decimal context", _decimal_context, _set_decimal_context),
    )
    variables: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    root, cache = logging.root, log_levels.cache
    limit, context, getcwd = sys.getrecursionlimit, decimal.getcontext, os.getcwd
    kept: list[Any] = [[], [], [], {}]
    changes = 0

    def marks() -> Any:
        nonlocal kept, changes
        path, filters, handlers, others = kept
        # What changes in place is compared, and copied only when it did.
        if (
            sys.path != path
            or warnings.filters != filters
            or root.handlers != handlers
            or variables != others
            or log_levels.UNCHANGED not in cache
        ):
            kept = [sys.path[:], warnings.filters[:], root.handlers[:], variables.copy()]
            cache[log_levels.UNCHANGED] = True
            changes += 1
        try:
            directory: str | None = getcwd()
        except FileNotFoundError:
            directory = None
        number = context()
        return directory, changes, limit(), number, number.prec, number.rounding

    return Rows(modes, marks)


# -- of torch ----------------------------------------------------------------------------------------------------------


class _Inference:
    """Inference mode is entered, and left by whoever entered it."""

    def __init__(self) -> None:
        self._entered: list[Any] = []

    def write(self, on: bool) -> None:
        import torch

        if on == torch.is_inference_mode_enabled():
            return
        if self._entered and self._entered[-1][0] != on:
            self._entered.pop()[1].__exit__(None, None, None)
            return
        guard = torch.inference_mode(on)
        guard.__enter__()
        self._entered.append((on, guard))


_inference = _Inference()


@contextmanager
def outside_inference() -> Iterator[None]:
    """Make tensors that are ordinary ones, whatever the user's mode is."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "inference_mode") or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False):
        yield


def forget_casts() -> None:
    """Before a program: what autocast cast for an earlier one may be out of date.

    Whoever leaves an autocast context forgets it; but the notebook may have left it, and entered it again, unheard.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch._C._is_any_autocast_enabled():
        torch.clear_autocast_cache()


def _set_default_device(device: str | None) -> None:
    import torch

    # The notebook's cuda:0 is each replica's own device, as it is for tensors that travel.
    here = device if device is None or device.partition(":")[0] in ("cpu", "meta") else codec.place_storage(device)
    if codec.place_storage is codec.on_the_cpu:
        here = device  # in the notebook the user's word is kept, for the next cell
    torch.set_default_device(here)


def _autocast_modes() -> tuple[Any, ...]:
    import torch

    kinds = torch._C._autocast_supported_devices()
    each = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return each, torch.is_autocast_cache_enabled()


def _set_autocast(value: tuple[Any, ...]) -> None:
    import torch

    for kind, enabled, dtype in value[0]:
        torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_cache_enabled(value[1])
    torch.clear_autocast_cache()


def _torch_rows() -> Rows:
    import torch
    import torch._tensor_str
    import torch.utils._device

    c: Any = torch._C
    devices: Any = torch.utils._device
    shown: dict[str, Any] = vars(torch._tensor_str.PRINT_OPTS)
    dtype, inference, gradients = torch.get_default_dtype, torch.is_inference_mode_enabled, torch.is_grad_enabled
    autocast, precision = c._is_any_autocast_enabled, c._get_float32_matmul_precision
    exact, warn = c._get_deterministic_algorithms, c._get_deterministic_algorithms_warn_only
    benchmark, same_each_time = c._get_cudnn_benchmark, c._get_cudnn_deterministic
    anomaly, check = torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled
    modes = (
        Mode("default dtype", torch.get_default_dtype, torch.set_default_dtype, early=True),
        Mode("inference mode", torch.is_inference_mode_enabled, _inference.write),
        Mode("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
        Mode(
            "default device",
            lambda: None if devices.CURRENT_DEVICE is None else str(devices.CURRENT_DEVICE),
            _set_default_device,
        ),
        Mode("autocast", _autocast_modes, _set_autocast),
        Mode(
            "deterministic algorithms",
            lambda: (exact(), exact() and warn()),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        Mode("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        Mode("cudnn benchmark", c._get_cudnn_benchmark, c._set_cudnn_benchmark),
        Mode("cudnn deterministic", c._get_cudnn_deterministic, c._set_cudnn_deterministic),
        Mode(
            "anomaly detection",
            lambda: (anomaly(), not anomaly() or check()),
            lambda value: torch.set_anomaly_enabled(*value),
        ),
        Mode("torch printing", lambda: dict(shown), shown.update),
    )
    printed = shown.copy()
    changes = 0

    def marks() -> Any:
        nonlocal printed, changes
        if shown != printed:
            printed = shown.copy()
            changes += 1
        return (
            *(dtype(), inference(), gradients(), devices.CURRENT_DEVICE, autocast() and _autocast_modes()),
            *(
                exact() and (True, warn()),
                precision(),
                benchmark(),
                same_each_time(),
                anomaly() and (True, check()),
                changes,
            ),
        )

    return Rows(modes, marks)


# -- of NumPy ----------------------------------------------------------------------------------------------------------


def _numpy_rows() -> Rows:
    import numpy

    def printing() -> dict[str, Any]:
        # Formatters are functions, mostly the notebook's own.
        options: dict[str, Any] = dict(numpy.get_printoptions())
        return {name: value for name, value in options.items() if name not in ("formatter", "override_repr")}

    modes = (
        Mode("NumPy errors", numpy.geterr, lambda value: numpy.seterr(**value)),
        Mode("NumPy printing", printing, lambda value: numpy.set_printoptions(**value)),
    )
    errors, printed = (
        _found("umath", "_extobj_contextvar", numpy.geterr),
        _found("printoptions", "format_options", numpy.get_printoptions),
    )
    return Rows(modes, lambda: (errors(), printed()))


def _found(module: str, variable: str, otherwise: Callable[[], Any]) -> Callable[[], Any]:
    """How to get at what one of NumPy's context variables holds; it is replaced, and never changed, when it is set."""
    found = getattr(sys.modules.get(f"numpy._core.{module}"), variable, None)
    get: Callable[[], Any] = getattr(found, "get", otherwise)
    return get


# -- all of them -------------------------------------------------------------------------------------------------------


class Ambient:
    """The ambient modes of this process. There is one instance, `ambient`."""

    def __init__(self) -> None:
        rows = _interpreter_rows()
        self._modes = list(rows.modes)
        self._rows = [rows.marks]
        self._waiting = {"torch": _torch_rows, "numpy": _numpy_rows}
        self._marks: list[Any] = []
        self._values: dict[str, Any] = {}

    def _find_libraries(self) -> None:
        for library, make in list(self._waiting.items()):
            found = sys.modules.get(library)
            if found is not None and not _is_being_loaded(found):
                del self._waiting[library]
                rows = make()
                self._modes += rows.modes
                self._rows.append(rows.marks)

    def read(self) -> dict[str, Any]:
        """The value of each mode, by name; the same object as long as none changes. Not to be changed."""
        if self._waiting:
            self._find_libraries()
        marks = [row() for row in self._rows]
        if marks != self._marks:
            values = {mode.name: mode.read() for mode in self._modes}
            if values != self._values:
                self._values = values
            self._marks = marks
        return self._values

    def write(self, values: Mapping[str, Any], *, early: bool | None = None) -> None:
        """Set modes; those that are not told of stay.

        Args:
            values: By name.
            early: Only those that are set early, or that are not; None for all.
        """
        now = self.read()
        for mode in self._modes:
            if mode.name in values and early in (None, mode.early) and now[mode.name] != values[mode.name]:
                mode.write(values[mode.name])


def _is_being_loaded(module: Any) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


ambient = Ambient()
