"""Copies of the engines' objects for a cell that runs in the notebook itself."""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from distnb.notebook.handles.handle import HANDLES, RemoteState, state_of_handle
from distnb.notebook.namespace.handle_operations import Operations
from distnb.notebook.namespace.tracked_objects import MISSING
from distnb.objects.code import EMPTY, content_of, names_of_code
from distnb.objects.reads import Reads
from distnb.values import DistributedValues, Mirrored

__all__ = ["LocalCopies"]

_VISITED_AT_MOST = 20_000


class LocalCopies:
    """Puts copies in the place of handles, and takes them out again.

    Args:
        user_ns: The notebook's namespace.
        operations: Fetches the copies.
        announce: Told what happened.
    """

    def __init__(self, user_ns: dict[str, Any], operations: Operations, announce: Callable[[str], None]) -> None:
        self._user_ns = user_ns
        self._operations = operations
        self._announce = announce
        self._bound: dict[str, tuple[Any, Any]] = {}
        self._inner: list[tuple[Any, Any, Any, Any]] = []
        self._prints: dict[str, bytes] = {}

    def bind(self, reads: Reads) -> tuple[str, ...]:
        """Bind names, and items of containers, that are handles of mirrored objects to copies of replica 0's.

        Returns:
            The names.
        """
        names, handles, places = self._look(reads)
        by_team: dict[int, list[DistributedValues]] = {}
        for handle in handles:
            by_team.setdefault(id(state_of_handle(handle).tracked), []).append(handle)
        copies: dict[int, Any] = {}
        for group in by_team.values():
            states = [state_of_handle(handle) for handle in group]
            for state in states:
                state.check()
            copies.update(zip(map(id, group), self._operations.copies(states), strict=True))
        for name in names:
            handle = self._user_ns[name]
            copy = copies[id(handle)]
            self._bound[name] = handle, copy
            self._user_ns[name] = copy
            self._prints[name] = _digest(state_of_handle(handle), copy)
        for container, key, handle in places:
            self._inner.append((container, key, handle, copies[id(handle)]))
            container[key] = copies[id(handle)]
        if names:
            what = ", ".join(f"`{name}`" for name in names)
            self._announce(f"distnb: this cell runs in the notebook, on a copy of replica 0's {what}.")
        return tuple(names)

    def unbind(self) -> None:
        """Bind the names to the handles again, those that the cell assigned excepted."""
        changed = []
        for name, (handle, copy) in self._bound.items():
            if self._user_ns.get(name, MISSING) is copy:
                self._user_ns[name] = handle
                if _digest(state_of_handle(handle), copy) != self._prints[name]:
                    changed.append(name)
        for container, key, handle, copy in self._inner:
            with contextlib.suppress(LookupError, TypeError):
                if container[key] is copy:
                    container[key] = handle
        if changed:
            what = ", ".join(f"`{name}`" for name in changed)
            self._announce(
                f"distnb: the cell changed its copy of {what}; the replicas' own is as it was. To keep such a change, "
                "assign the object to a name of its own in the cell."
            )

    def _look(self, reads: Reads) -> tuple[list[str], list[DistributedValues], list[tuple[Any, Any, Any]]]:
        """Names that are handles, every handle, and places in containers that hold one."""
        names: list[str] = []
        handles: dict[int, DistributedValues] = {}
        places: list[tuple[Any, Any, Any]] = []
        wanted = deque(
            sorted(reads.names) if not reads.dynamic else [name for name in self._user_ns if not name.startswith("_")]
        )
        done: set[str] = set()
        while wanted:
            name = wanted.popleft()
            value = self._user_ns.get(name, MISSING)
            if name in done or value is MISSING:
                continue
            done.add(name)
            if isinstance(value, HANDLES):
                if isinstance(value, Mirrored):
                    names.append(name)
                    handles[id(value)] = value
                    for fact in state_of_handle(value).facts.values():
                        wanted.extend(fact.reads or ())
                continue
            for container, key, held in self._held(value, wanted):
                places.append((container, key, held))
                handles[id(held)] = held
        return names, list(handles.values()), places

    def _held(self, value: Any, wanted: deque[str]) -> list[tuple[Any, Any, Any]]:
        found: list[tuple[Any, Any, Any]] = []
        queue, seen = deque([value]), {id(value)}
        while queue and len(seen) < _VISITED_AT_MOST:
            obj = queue.popleft()
            if isinstance(obj, types.FunctionType) and obj.__globals__ is self._user_ns:
                wanted.extend(names_of_code(obj.__code__).names)
            if type(obj) in (list, dict):
                items = obj.items() if type(obj) is dict else enumerate(obj)
                found += [
                    (obj, key, held) for key, held in items if isinstance(held, Mirrored) and isinstance(held, HANDLES)
                ]
            if isinstance(obj, types.ModuleType) or obj is self._user_ns:
                continue
            for part in _parts(obj):
                if id(part) not in seen:
                    seen.add(id(part))
                    queue.append(part)
        return found


def _parts(obj: Any) -> list[Any]:
    if isinstance(obj, types.FunctionType):
        return [*(obj.__closure__ or ()), *(obj.__defaults__ or ())]
    if type(obj) in (str, bytes, int, float, bool, type(None)) or isinstance(obj, HANDLES):
        return []
    if isinstance(obj, type):
        return [*vars(obj).values(), *obj.__bases__]
    if isinstance(obj, dict):
        return list(obj.values())
    if isinstance(obj, list | tuple | set | frozenset):
        return list(obj)
    if isinstance(obj, types.CellType):
        content = content_of(obj)
        return [] if content is EMPTY else [content]
    if isinstance(obj, types.MethodType):
        return [obj.__func__, obj.__self__]
    attributes = getattr(obj, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, dict) else []


def _digest(state: RemoteState, copy: Any) -> bytes:
    return state.tracked.tracker.look({"": copy}).digests[""]
