"""Private behaviour of CPython's picklers: their memo, whose copy makes two objects for each object in it."""

from __future__ import annotations

import gc
import io
import pickle
from typing import Any

__all__ = ["objects_in_memo"]


def objects_in_memo(pickler: pickle.Pickler) -> list[Any]:
    """Return the objects in a pickler's memo, and perhaps a few others that it refers to."""
    if _SHOWS_MEMO:
        return gc.get_referents(pickler)
    memo: Any = pickler.memo
    return [obj for _, obj in memo.copy().values()]


def _shows_memo() -> bool:
    """Return whether picklers show their memo to Python's garbage collector, as those of CPython do."""
    pickler, pickled = pickle.Pickler(io.BytesIO()), [object]
    pickler.dump(pickled)
    return any(found is pickled for found in gc.get_referents(pickler))


_SHOWS_MEMO = _shows_memo()
