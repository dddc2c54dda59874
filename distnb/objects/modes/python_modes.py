"""The modes of the interpreter, and the random states of `random` and `numpy.random`."""

from __future__ import annotations

import importlib
import logging
import operator
import os
import random
import sys
import warnings
from typing import Any

from distnb.objects.modes.mode import Mode
from distnb.objects.modes.seeds import random_mode
from distnb.objects.rng_state import numpy_state, set_numpy_state

__all__ = ["MODES", "own_path_entries", "raw_modes"]

own_path_entries: list[str] = []
"""The first entries of `sys.path` that belong to this process. They are not sent, and stay when a path is received."""


def _directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the directory was removed
        return None


def _set_directory(directory: str | None) -> None:
    if directory is not None and os.path.isdir(directory):
        os.chdir(directory)


def _path() -> tuple[str, ...]:
    return tuple([entry for entry in sys.path if entry not in own_path_entries])


def _set_path(path: tuple[str, ...]) -> None:
    sys.path[:] = [*own_path_entries, *path]


_OF_THE_PROCESS = frozenset(
    {
        # Variables that torchrun sets, or that assign devices and cores to processes.
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"),
        *("PWD", "OLDPWD", "LINES", "COLUMNS", "PYTEST_CURRENT_TEST"),
    }
)
# As bytes: reading `os.environ` decodes every item each time, which takes 16 µs for 35 of them instead of 0.3 µs.
_variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
_variables_at_first = dict(_variables)
_variables_now = _variables_at_first  # at the latest comparison, and their changes until then
_changed_now: dict[str, str | None] = {}


def process_began() -> None:
    """Note the environment variables as those with which this process began: a process that was forked got its own."""
    global _variables_at_first, _variables_now
    _variables_at_first = _variables_now = dict(_variables)


def _changed_variables() -> dict[str, str | None]:
    """Return the environment variables that were set, changed or deleted (None) since this process began.

    The other variables belong to the machine.
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
    """Return IPython's shell, if this process has one."""
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
    warnings.resetwarnings()  # this notifies the interpreter of the change
    warnings.filters[:] = found  # type: ignore[index]


def _category(module: str, name: str) -> Any:
    """Return a class of warnings, or None if this process does not know it (a class defined in the notebook)."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


_own_loggers: list[logging.Logger] = []
_loggers_known = (0, 0)


def _loggers() -> list[logging.Logger]:
    """Return the loggers that are not named after a loaded module: those of modules are set when these are imported."""
    global _own_loggers, _loggers_known
    known = logging.Logger.manager.loggerDict
    if _loggers_known != (len(known), len(sys.modules)):
        _loggers_known = len(known), len(sys.modules)
        _own_loggers = [
            each
            for name, each in list(known.items())
            if isinstance(each, logging.Logger)
            and ((package := name.partition(".")[0]) not in sys.modules or package == "__main__")
        ]
    return _own_loggers


def _log_levels() -> dict[str, int]:
    return {each.name: each.level for each in _loggers() if each.level}


def _set_log_levels(levels: dict[str, int]) -> None:
    for name in _log_levels().keys() | levels.keys():
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))


_level = operator.attrgetter("level")


def raw_modes() -> tuple[Any, ...]:
    """Return the modes below that are compared around calls. See `environment._raw_modes`.

    Nothing is called that need not be: this is a part of each call of `run`, in the notebook and on the replicas.
    """
    try:
        directory = os.getcwd()
    except FileNotFoundError:  # the directory was removed
        directory = None
    variables = _changed_now if _variables == _variables_now else _changed_variables()
    known = len(logging.Logger.manager.loggerDict), len(sys.modules)
    loggers = _own_loggers if known == _loggers_known else _loggers()
    return directory, sys.path.copy(), variables, list(map(_level, loggers))


MODES: tuple[Mode, ...] = (
    Mode(name="working directory", capture=_directory, apply=_set_directory, early=True),
    Mode(name="import path", capture=_path, apply=_set_path, early=True),
    Mode(name="environment variables", capture=_changed_variables, apply=_set_variables, early=True),
    Mode(name="warning filters", capture=_warning_filters, apply=_set_warning_filters, when="beginning"),
    Mode(name="tracebacks", capture=_traceback_mode, apply=_set_traceback_mode, when="beginning"),  # %xmode
    Mode(name="log levels", capture=_log_levels, apply=_set_log_levels),
    random_mode("random", random.getstate, random.setstate),
    random_mode("numpy.random", numpy_state, set_numpy_state),
)
