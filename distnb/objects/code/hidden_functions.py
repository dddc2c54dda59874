"""Functions of the namespace that are hidden in objects whose pickles do not contain them.

A Keras model is pickled as the bytes of a file. Its loss function and its layers may nevertheless be defined in the
notebook, and read names of the namespace.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from distnb.objects.code.definitions import content_of
from distnb.objects.plain import ATOMS, is_importable

__all__ = ["functions_within", "hides_parts"]

_MOST_PARTS = 50_000
# Pickles of their objects hide nothing: those of data, and those of distnb's, which lead to the whole process.
_SHOWING = frozenset({"distnb", "numpy", "pandas", "torch"})
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)


def hides_parts(kind: Any) -> bool:
    """Return whether a class has its own rule for pickling, which may omit attributes of its instances."""
    own = kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__
    if not own or kind.__dictoffset__ == 0 or issubclass(kind, BaseException):
        return False
    return str(kind.__module__).partition(".")[0] not in _SHOWING


def functions_within(obj: Any, user_ns: dict[str, Any], seen: dict[int, Any]) -> Iterator[types.FunctionType]:
    """Yield the functions of a namespace that an object refers to through attributes, items, classes and closures.

    Args:
        obj: The object.
        user_ns: The namespace.
        seen: The objects visited before, by `id()`, which are not visited again. Visited objects are added.
    """
    waiting, most = [obj], len(seen) + _MOST_PARTS
    while waiting and len(seen) < most:
        part = waiting.pop()
        if type(part) is types.FunctionType and part.__globals__ is user_ns:
            yield part
        try:
            parts = _parts_of(part)
        except Exception:  # whatever a user's class raises  # noqa: BLE001
            continue
        for each in parts:
            if type(each) not in ATOMS and id(each) not in seen:
                seen[id(each)] = each
                waiting.append(each)


def _parts_of(obj: Any) -> Iterable[Any]:
    kind = type(obj)
    if issubclass(kind, dict):
        return [*dict.keys(obj), *dict.values(obj)]
    if issubclass(kind, _CONTAINERS):
        return list(obj)
    if kind is types.FunctionType:
        cells = map(content_of, obj.__closure__ or ())
        return [*cells, *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values(), *vars(obj).values()]
    if kind is types.MethodType:
        return obj.__func__, obj.__self__
    if kind is functools.partial:
        return obj.func, *obj.args, *obj.keywords.values()
    if kind in (staticmethod, classmethod):
        return (obj.__func__,)
    if kind is property:
        return obj.fget, obj.fset, obj.fdel
    if issubclass(kind, type):
        return () if is_importable(obj) else [*vars(obj).values(), *obj.__bases__]
    if issubclass(kind, types.ModuleType) or kind.__dictoffset__ == 0:
        return ()
    return [kind, *vars(obj).values()]
