"""One process that reads and writes files for all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from distnb.errors import CheckpointError, DistnbError
from distnb.runtime import choice
from distnb.runtime.reduction.gathering import broadcast_tree
from distnb.runtime.this_process import this_process

__all__ = ["agreed", "on_chief"]

T = TypeVar("T")


def on_chief(do: Callable[[], T]) -> T:
    """Have replica 0 do something for all: they get what it returns, or raise as it does.

    The notebook, and a process without others, does it itself.
    """
    if this_process.replica is None and this_process.remote is None and choice.started_by_launcher():
        from distnb.runtime.spmd import join_from_env

        join_from_env()  # a script's replicas may not have met yet
    process = this_process.replica
    if process is None or process.size == 1:
        return do()
    result: Any = None
    if process.rank == 0:
        try:
            result = do()
        except Exception as error:
            broadcast_tree(process.group, (None, _told(error)), 0)
            raise
    result, told = broadcast_tree(process.group, (result, None), 0)
    if told is not None:
        kind, text = told
        raise kind(text)
    known: T = result  # the chief's own, or a copy of it
    return known


def _told(error: Exception) -> tuple[type[Exception], str]:
    if isinstance(error, (DistnbError, OSError)):
        return type(error), str(error)
    return CheckpointError, f"Replica 0 could not save or restore. {type(error).__name__}: {error}"


def agreed(lines: list[str]) -> list[str]:
    """Collect every replica's lines on all, without repetitions."""
    process = this_process.replica
    if process is None or process.size == 1:
        return lines
    return list(dict.fromkeys(line for told in process.group.all_gather_object(lines) for line in told))
