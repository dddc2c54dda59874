"""Errors of the chief that all replicas raise."""

from __future__ import annotations

import pickle
from typing import Any, NoReturn

import cloudpickle

from distnb.collectives.group.interface import Group
from distnb.errors import RemoteError
from distnb.objects.constructors import open_exception
from distnb.runtime.reduction.gathering import broadcast_tree

__all__ = ["raise_together"]


def raise_together(group: Group, error: BaseException | None, note: str) -> NoReturn:
    """Raise replica 0's error on all replicas. All replicas call this.

    Args:
        group: The replicas.
        error: The error, on replica 0.
        note: A note on the error's origin for the users of the other replicas.
    """
    packed = broadcast_tree(group, _packed(error) if error is not None else b"", 0)
    if group.rank == 0:
        assert error is not None
        raise error
    opened = _opened(packed)
    opened.add_note(note)
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


def _opened(packed: bytes) -> BaseException:
    try:
        make, args, *state = pickle.loads(packed)
        error: BaseException = make(*args)
        if state and state[0]:
            error.__setstate__(state[0])
    except Exception as failure:  # noqa: BLE001  # the constructor of its class raised
        return RemoteError(f"Replica 0 failed, and its error cannot be opened here: {failure}")
    return error
