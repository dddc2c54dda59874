"""Refusal of processes that a cell would start as replicas of its own.

Most programs for several processes end in `mp.spawn(worker, args=(2,), nprocs=2)`, or start a `Process` for each rank.
In a distributed cell the engines are these processes, and the function can be called directly. Other processes (a
DataLoader's workers, a pool that prepares data) start as usual.
"""

from __future__ import annotations

import functools
import reprlib
import types
from collections.abc import Callable
from typing import Any

from distnb.compat import patches
from distnb.compat.loader_internals import call_of
from distnb.errors import ContextError
from distnb.objects.code.definitions import content_of, names_of_code

__all__ = ["install"]

_FORMS_GROUP = "init_process_group"
_LIBRARIES = ("torch", "numpy", "distnb", "multiprocessing")
_MOST_FUNCTIONS = 200


def install() -> None:
    """Check each process that this one starts from now on. Idempotent."""
    patches.wrap("multiprocessing.process:BaseProcess.start", _checked_start)


def _checked_start(start: Callable[[Any], None], process: Any) -> None:
    _check(*call_of(process))
    start(process)


def _check(target: Any, args: tuple[Any, ...]) -> None:
    """Raise ContextError for a process of torch's launcher, and for a function that forms a process group."""
    if getattr(target, "__module__", "") == "torch.multiprocessing.spawn":  # _wrap(function, rank, args, error_file)
        function, _, given = args[:3]
        # accelerate's notebook_launcher wraps the function, and passes it no rank.
        inner = getattr(function, "launcher", function)
        ranked = [] if inner is not function else ["distnb.replica_id()"]
        call = f"{_name(inner)}({', '.join([*ranked, *map(reprlib.repr, given)])})"
        raise _refusal("torch.multiprocessing.spawn", inner, f"Call the function directly: {call}.")
    if _forms_group(target):
        raise _refusal("Process", target, "Call the function directly, with distnb.replica_id() as its rank.")


def _refusal(launcher: str, function: Any, cure: str) -> ContextError:
    return ContextError(
        f"{launcher} would start `{_name(function)}` in processes of its own, as ranks of another process group. In a "
        "distributed cell the engines are the processes: every replica runs this cell, and RANK, WORLD_SIZE and "
        f"MASTER_ADDR are set. {cure}"
    )


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _forms_group(target: Any) -> bool:
    """Return whether a function, or one that it calls by a global name, refers to `init_process_group`."""
    waiting, seen = [target], set[int]()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function = _function_of(waiting.pop())
        if function is None or id(function) in seen or function.__module__.partition(".")[0] in _LIBRARIES:
            continue
        seen.add(id(function))
        code = names_of_code(function.__code__)
        if _FORMS_GROUP in code.names or _FORMS_GROUP in code.attributes:
            return True
        waiting += [function.__globals__[name] for name in code.names & function.__globals__.keys()]
        waiting += [content_of(cell) for cell in function.__closure__ or ()]
    return False


def _function_of(value: Any) -> types.FunctionType | None:
    """Return the Python function behind a callable, or None."""
    if isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None
