"""Outlines of a call's arguments, functions and plain values: kept on both sides, so that a repeated call names them.

An outline does not hold the functions: what they close over must be free to end.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

from distnb.errors import NamespaceError
from distnb.wire.immutables import same

__all__ = ["fill", "fits", "outline"]


def outline(arguments: Any) -> Any:
    """The outline of arguments: their tuples and dicts, their plain values, and references to their functions."""
    if type(arguments) is tuple:
        return tuple([outline(value) for value in arguments])
    if type(arguments) is dict:
        return {key: outline(value) for key, value in arguments.items()}
    return weakref.ref(arguments) if type(arguments) is types.FunctionType else arguments


def fits(kept: Any, value: Any) -> bool:
    """Whether arguments are those of an outline: the same functions, and equal values."""
    kind = type(kept)
    if kind is weakref.ref:
        return kept() is value
    if kind is not type(value):
        return False
    if kind is tuple:
        return len(kept) == len(value) and all(map(fits, kept, value))
    if kind is dict:
        return kept.keys() == value.keys() and (not kept or all(fits(part, value[key]) for key, part in kept.items()))
    return same(kept, value)


def fill(kept: Any) -> Any:
    """The arguments of an outline.

    Raises:
        NamespaceError: A function in it is gone.
    """
    kind = type(kept)
    if kind is tuple:
        return tuple(map(fill, kept)) if kept else kept
    if kind is dict:
        return {key: fill(value) for key, value in kept.items()} if kept else {}
    if kind is not weakref.ref:
        return kept
    found = kept()
    if found is None:
        raise NamespaceError("The function that this call repeats is gone on this replica. Call it again.")
    return found
