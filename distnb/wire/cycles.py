"""Finding objects that only refer to each other: lists and dicts that a table holds and nobody else does."""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

__all__ = ["held_by_none"]

K = TypeVar("K", bound=Hashable)

# What these refer to is as good as the whole process. What is found only through them counts as held.
_NOT_ENTERED = (type, types.ModuleType, types.FunctionType, types.FrameType)
_OURS = 2  # the dict of what was found, and getrefcount's argument


def held_by_none(objects: Mapping[K, Any], tables: int) -> list[K]:
    """The keys of the objects that nothing refers to but the caller's tables, and each other.

    Like Python's own collector it compares each object's count of references with those that were found among the
    objects: what has more is held from outside, and so is all that it leads to.

    Args:
        objects: What is asked about.
        tables: In how many tables of the caller each of them is, this mapping included.
    """
    found: dict[int, Any] = {}
    inside: Counter[int] = Counter()
    waiting = list(objects.values())
    while waiting:
        obj = waiting.pop()
        if id(obj) in found:
            continue
        found[id(obj)] = obj
        referents = _referents(obj)
        inside.update(map(id, referents))
        waiting += referents
        del obj, referents
    for obj in objects.values():
        inside[id(obj)] += tables
    alive: set[int] = set()
    # Not by items(): their tuples would hold the objects, too.
    reached = [found[key] for key in found if sys.getrefcount(found[key]) - _OURS > inside[key]]
    while reached:
        obj = reached.pop()
        if id(obj) not in alive:
            alive.add(id(obj))
            reached += _referents(obj)
    return [key for key, obj in objects.items() if id(obj) not in alive]


def _referents(obj: Any) -> list[Any]:
    if isinstance(obj, _NOT_ENTERED) or type(obj).__module__.startswith("distnb."):
        return []
    return [each for each in gc.get_referents(obj) if gc.is_tracked(each)]
