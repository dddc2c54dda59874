"""Telling why the value of a name cannot be sent to the engines: what in it, where, and the cure."""

from __future__ import annotations

import collections
import types
from typing import Any

from distnb.errors import CannotTravelError, NamespaceError
from distnb.wire.graph import Unsendable

__all__ = ["explain"]

_LOOKED_AT = 10_000
_DEPTH = 6
_ANY_CURE = "make it inside the distributed cell, or keep it out of what the cell reads"


def explain(value: Any, label: str, error: BaseException) -> Exception:
    """The error to raise when pickling a value failed.

    Args:
        value: The value of the name.
        label: What to call it, "`data`" for a name.
        error: What the pickler raised.
    """
    if isinstance(error, NamespaceError) and not isinstance(error, Unsendable):
        return error
    cure, culprit, detail = _ANY_CURE, value, f" ({error})"
    if isinstance(error, Unsendable):
        cure, culprit, detail = error.cure, error.obj, ""
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
    held = f"is a {kind}"
    if culprit is not value:
        where = _path_to(value, culprit)
        held = f"holds a {kind}" + (f" at {label.strip('`')}{where}" if where else "")
    return CannotTravelError(f"{label} cannot be sent to the engines: it {held}{detail}. The cure: {cure}.")


def _path_to(value: Any, culprit: Any, depth: int = _DEPTH) -> str:
    """Where in a value an object is, as one would write it after a name; "" if it is not found soon."""
    queue = collections.deque([(value, "", 0)])
    seen = {id(value)}
    while queue and len(seen) < _LOOKED_AT:
        obj, path, level = queue.popleft()
        if obj is culprit and path:
            return path
        if level >= depth:
            continue
        for part, step in _parts_of(obj):
            if id(part) not in seen:
                seen.add(id(part))
                queue.append((part, path + step, level + 1))
    return ""


def _parts_of(obj: Any) -> list[tuple[Any, str]]:
    if isinstance(obj, dict):
        return [(part, f"[{key!r}]") for key, part in obj.items()]
    if isinstance(obj, list | tuple):
        return [(part, f"[{index}]") for index, part in enumerate(obj)]
    if isinstance(obj, types.FunctionType):
        names = zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False)
        return [(cell.cell_contents, f" (closed over as {name})") for name, cell in names]
    attributes = getattr(obj, "__dict__", None)
    return [(part, f".{name}") for name, part in attributes.items()] if type(attributes) is dict else []
