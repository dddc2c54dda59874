"""Work and errors of one replica that concern all of them: replica 0 works for all, and all raise a replica's error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import cloudpickle

from distnb.errors import RemoteError
from distnb.objects.constructors import open_exception
from distnb.runtime import choice
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
    from distnb.runtime.reduction.gathering import broadcast_tree  # loads torch

    result: Any = None
    if process.rank == 0:
        try:
            result = do()
        except Exception as error:
            broadcast_tree(process.group, (None, _packed(error)), 0)
            raise
    result, failure = broadcast_tree(process.group, (result, None), 0)
    if failure is not None:
        raise _opened(failure, 0)
    known: T = result  # the chief's own result, or a copy of it
    return known


def gather_values(value: T) -> list[T]:
    """Return the values of all replicas, in replica order. All replicas call this."""
    process = this_process.replica
    return [value] if process is None or process.size == 1 else process.group.all_gather_object(value)


def gather_lines(lines: list[str]) -> list[str]:
    """Return the lines of all replicas, without repetitions. All replicas call this."""
    return list(dict.fromkeys(line for received in gather_values(lines) for line in received))


def raise_together(error: BaseException | None, note: str = "") -> None:
    """Raise an error on all replicas if one of them has one. All replicas call this.

    A replica with an error of its own raises that one. The others raise the first replica's.

    Args:
        error: This replica's error, if it has one.
        note: A note on the error's origin for the users of the other replicas.
    """
    failures = gather_values(None if error is None else _packed(error))
    if error is not None:
        raise error
    for failing, failure in enumerate(failures):
        if failure is not None:
            opened = _opened(failure, failing)
            opened.add_note(note or f"Replica {failing} raised this.")
            raise opened


def _packed(error: BaseException) -> bytes:
    """Pickle an error for the other replicas, with its class by name, so that their `except` clauses match."""
    plain = type(error).__reduce__ is BaseException.__reduce__
    for pack in (pickle.dumps, cloudpickle.dumps):
        try:
            made_of: Any = (open_exception, (type(error), error.args), vars(error))
            packed: bytes = pack(made_of if plain else error.__reduce_ex__(4))
        except Exception:  # noqa: BLE001  # an attribute of the error cannot be pickled
            continue
        return packed
    return pickle.dumps((RemoteError, (f"{type(error).__qualname__}: {error}",)))


def _opened(packed: bytes, replica: int) -> BaseException:
    try:
        make, args, *state = pickle.loads(packed)
        error: BaseException = make(*args)
        if state and state[0]:
            error.__setstate__(state[0])
    except Exception as failure:  # noqa: BLE001  # the constructor of its class raised
        return RemoteError(f"Replica {replica} failed, and its error cannot be opened here: {failure}")
    return error
