"""Copies of the engines' objects for a cell that runs in the notebook itself."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from distnb.notebook.handles.handle import HANDLES, RemoteState, state_of_handle
from distnb.notebook.namespace.handle_operations import HandleOperations
from distnb.notebook.namespace.tracked_objects import MISSING
from distnb.notebook.namespace.user_names import user_names
from distnb.objects.code import content_of, names_of_code
from distnb.objects.reads import Reads
from distnb.values import Mirrored

__all__ = ["LocalCopies"]

_VISITED_AT_MOST = 20_000


class LocalCopies:
    """Puts copies in the place of handles, and takes them out again."""

    def __init__(self, user_ns: dict[str, Any], operations: HandleOperations, announce: Callable[[str], None]) -> None:
        self._user_ns = user_ns
        self._operations = operations
        self._announce = announce
        self._places: list[tuple[Any, Any, Any, Any]] = []  # container or namespace, key, handle, copy
        self._digests: dict[str, bytes] = {}  # of the copies that names hold

    def bind(self, reads: Reads) -> tuple[str, ...]:
        """Bind names, and items of lists and dicts, that are handles of mirrored objects to copies of replica 0's."""
        found = list(self._handles(reads))
        handles = {id(handle): handle for _, _, handle in found}
        for handle in handles.values():
            state_of_handle(handle).check()
        copies: dict[int, Any] = {}
        for tracked in {state_of_handle(handle).tracked for handle in handles.values()}:
            group = [each for each in handles.values() if state_of_handle(each).tracked is tracked]
            fetched = self._operations.copies([state_of_handle(handle) for handle in group])
            copies.update(zip(map(id, group), fetched, strict=True))
            for each in group:
                if state_of_handle(each).together:
                    copies[id(each)] = self._whole(each, copies[id(each)])
        for container, key, handle in found:
            container[key] = copy = copies[id(handle)]
            self._places.append((container, key, handle, copy))
            if container is self._user_ns:
                self._digests[key] = _digest(state_of_handle(handle), copy)
        if self._digests:
            what = ", ".join(f"`{name}`" for name in self._digests)
            self._announce(f"distnb: this cell runs in the notebook, on a copy of replica 0's {what}.")
        return tuple(self._digests)

    def _whole(self, handle: Any, component: Any) -> Any:
        """Copy what replicas hold in parts, a metric or a sync-on-read variable: with what it is as a whole."""
        whole = self._operations.read(handle)
        if not hasattr(component, "assign"):
            return whole
        component.assign(whole)
        return component

    def unbind(self) -> None:
        """Bind the names to the handles again, those that the cell assigned excepted."""
        changed = []
        for container, key, handle, copy in self._places:
            with contextlib.suppress(LookupError, TypeError):
                if container[key] is copy:
                    container[key] = handle
                    if container is self._user_ns and _digest(state_of_handle(handle), copy) != self._digests[key]:
                        changed.append(f"`{key}`")
        if changed:
            self._announce(
                f"distnb: the cell changed its copy of {', '.join(changed)}; the replicas' own is as it was. To keep "
                "such a change, assign the object to a name of its own in the cell."
            )

    def _handles(self, reads: Reads) -> Iterator[tuple[Any, Any, Any]]:
        """Places that hold handles of mirrored objects: (container, key, handle); the namespace is one container."""
        waiting = sorted(user_names(self._user_ns) if reads.dynamic else reads.names)
        for name in waiting:  # it grows
            value = self._user_ns.get(name, MISSING)
            if type(value) in HANDLES:
                if isinstance(value, Mirrored):
                    yield self._user_ns, name, value
                    more = {each for fact in state_of_handle(value).facts.values() for each in fact.reads}
                    waiting += sorted(more.difference(waiting))
                continue
            for obj in _reachable(value):
                if isinstance(obj, types.FunctionType) and obj.__globals__ is self._user_ns:
                    waiting += sorted(names_of_code(obj.__code__).names.difference(waiting))
                elif type(obj) in (list, dict) and obj is not self._user_ns:
                    for key, held in list(obj.items() if type(obj) is dict else enumerate(obj)):
                        if isinstance(held, HANDLES) and isinstance(held, Mirrored):
                            yield obj, key, held


def _reachable(value: Any) -> Iterator[Any]:
    """What a value holds, itself included."""
    queue, seen = [value], {id(value)}
    for obj in queue:  # it grows
        yield obj
        for part in _parts(obj) if len(seen) < _VISITED_AT_MOST else ():
            if id(part) not in seen:
                seen.add(id(part))
                queue.append(part)


def _parts(obj: Any) -> list[Any]:
    if isinstance(obj, types.FunctionType):
        return [*map(content_of, obj.__closure__ or ()), *(obj.__defaults__ or ())]
    if isinstance(obj, (str, bytes, int, float, types.ModuleType, type(None), *HANDLES)):
        return []
    if isinstance(obj, type):
        return [*vars(obj).values(), *obj.__bases__]
    if isinstance(obj, dict):
        return list(obj.values())
    if isinstance(obj, list | tuple | set | frozenset):
        return list(obj)
    if isinstance(obj, types.MethodType):
        return [obj.__func__, obj.__self__]
    attributes = getattr(obj, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, dict) else []


def _digest(state: RemoteState, copy: Any) -> bytes:
    digest: bytes = state.tracked.tracker.look({"": copy}).digests[""]
    return digest
