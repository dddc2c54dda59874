"""Sets whose items each process has in an order of its own, because they are hashed by their addresses."""

from __future__ import annotations

import datetime
import enum
import numbers
import pathlib
import uuid
from typing import Any

__all__ = ["is_unordered"]

_HASHED_BY_VALUE = (str, bytes, numbers.Number, datetime.date, datetime.time, enum.Enum, pathlib.PurePath, uuid.UUID)


def is_unordered(obj: Any) -> bool:
    """Return whether an object is a set whose order may depend on addresses. All engines hash equal values alike."""
    if type(obj) not in (set, frozenset):
        return False
    kinds = set(map(type, obj))
    if tuple in kinds:
        kinds.discard(tuple)
        kinds |= {type(part) for item in obj if type(item) is tuple for part in item}
    return not all(issubclass(kind, _HASHED_BY_VALUE) or kind is type(None) for kind in kinds)
