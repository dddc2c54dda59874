"""File access by the chief on behalf of all replicas, and by all replicas together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from distnb.errors import CheckpointError, DistnbError
from distnb.runtime import choice
from distnb.runtime.reduction.gathering import broadcast_tree
from distnb.runtime.this_process import this_process

__all__ = ["gather_lines", "gather_values", "on_chief", "raise_together"]

T = TypeVar("T")


def on_chief(do: Callable[[], T]) -> T:
    """Call a function on replica 0 alone. All replicas return its result, or raise its error.

    The notebook, and a process without other replicas, calls it itself.
    """
    if this_process.replica is None and this_process.remote is None and choice.started_by_launcher():
        from distnb.runtime.spmd import join_from_env

        join_from_env()  # the replicas of a script may not have joined yet
    process = this_process.replica
    if process is None or process.size == 1:
        return do()
    result: Any = None
    if process.rank == 0:
        try:
            result = do()
        except Exception as error:
            broadcast_tree(process.group, (None, _describe(error, 0)), 0)
            raise
    result, failure = broadcast_tree(process.group, (result, None), 0)
    if failure is not None:
        kind, text = failure
        raise kind(text)
    known: T = result  # the chief's own result, or a copy of it
    return known


def _describe(error: Exception, rank: int) -> tuple[type[Exception], str]:
    if isinstance(error, (DistnbError, OSError)):
        return type(error), str(error)
    return CheckpointError, f"Replica {rank} could not save or restore. {type(error).__name__}: {error}"


def gather_values(value: T) -> list[T]:
    """Return the values of all replicas, in replica order. All replicas call this."""
    process = this_process.replica
    return [value] if process is None or process.size == 1 else process.group.all_gather_object(value)


def gather_lines(lines: list[str]) -> list[str]:
    """Return the lines of all replicas, without repetitions. All replicas call this."""
    return list(dict.fromkeys(line for received in gather_values(lines) for line in received))


def raise_together(error: Exception | None) -> None:
    """Raise an error on all replicas if one of them has one. All replicas call this.

    A replica with an error of its own raises that one. The others raise the first replica's.
    """
    process = this_process.replica
    rank = process.rank if process is not None else 0
    failures = gather_values(None if error is None else _describe(error, rank))
    if error is not None:
        raise error
    for failing, failure in enumerate(failures):
        if failure is not None:
            kind, text = failure
            raise kind(f"{text} (on replica {failing})")
