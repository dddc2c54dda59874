"""Copies of the engines' objects for a cell that runs in the notebook itself."""

from __future__ import annotations

import collections
import reprlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from distnb.notebook.handles.handle import HANDLES, RemoteState, state_of_handle
from distnb.notebook.namespace.handle_operations import HandleOperations
from distnb.notebook.namespace.tracked_objects import MISSING
from distnb.notebook.namespace.user_names import user_names
from distnb.objects.code.definitions import content_of, names_of_code
from distnb.objects.code.reads import Reads
from distnb.objects.placeholder import Placeholder
from distnb.values import Mirrored

__all__ = ["LocalCopies"]

_VISITED_AT_MOST = 20_000


class _HandlePlace(NamedTuple):
    """The place of a handle, or of a tuple that holds one.

    Attributes:
        container: A namespace, a list, a dict, a cell, a class, a function.
        key: A name, an index, a key, an attribute.
        before: The handle, or the tuple.
        within: The place where the container was found.
        form: The name of this place in messages, which follows the name of `within`.
    """

    container: Any
    key: Any
    before: Any
    within: _HandlePlace | None = None
    form: str = "{key}"

    @property
    def label(self) -> str:
        """The place in messages: `cfg['model']`."""
        outer = self.within.label if self.within is not None else ""
        key = self.key if "." in self.form or self.within is None else reprlib.repr(self.key)
        return outer + self.form.format(key=key)

    def get(self) -> Any:
        """Return the current value of the place, or MISSING."""
        if isinstance(self.container, _BY_ITEM):
            try:
                return self.container[self.key]
            except LookupError:
                return MISSING
        return getattr(self.container, self.key, MISSING)

    def put(self, value: Any) -> None:
        """Put a value into the place."""
        if isinstance(self.container, _BY_ITEM):
            self.container[self.key] = value
        else:
            setattr(self.container, self.key, value)


_BY_ITEM = (dict, list, collections.deque)


class LocalCopies:
    """The copies that replace handles for the duration of a cell."""

    def __init__(self, user_ns: dict[str, Any], operations: HandleOperations, announce: Callable[[str], None]) -> None:
        self._user_ns = user_ns
        self._operations = operations
        self._announce = announce
        self._put: list[tuple[_HandlePlace, Any]] = []  # with the copy
        self._copied: dict[int, tuple[Any, Any, bytes, str]] = {}  # by handle id: handle, copy, digest, label

    def bind(self, reads: Reads) -> tuple[str, ...]:
        """Put copies of replica 0's objects in the places of the mirrored handles that a cell may read.

        Return the names that hold copies.
        """
        places = list(self._places(reads))
        labels: dict[int, tuple[Any, str]] = {}
        for place in places:
            for handle in _handles_in(place.before):
                labels.setdefault(id(handle), (handle, place.label))
        for handle, _ in labels.values():
            state_of_handle(handle).check()
        copies: dict[int, Any] = {}
        for tracked in {state_of_handle(handle).tracked for handle, _ in labels.values()}:
            group = [each for each, _ in labels.values() if state_of_handle(each).tracked is tracked]
            originals = self._operations.gathered(group)
            fetched = self._operations.copies([state_of_handle(originals.get(id(each), each)) for each in group])
            copies.update(zip(map(id, group), fetched, strict=True))
            for each in group:
                if state_of_handle(each).together and id(each) not in originals:
                    copies[id(each)] = self._whole(each, copies[id(each)])
        # An object that cannot be copied, such as an open file, is used on the engines, by its handle.
        copies = {key: copy for key, copy in copies.items() if type(copy) is not Placeholder}
        places = [place for place in places if any(id(handle) in copies for handle in _handles_in(place.before))]
        for place in places:
            made = _with_copies(place.before, copies)
            place.put(made)
            self._put.append((place, made))
        for key, copy in copies.items():
            handle, label = labels[key]
            self._copied[key] = handle, copy, _digest(state_of_handle(handle), copy), label
        if copies:
            what = ", ".join(f"`{labels[key][1]}`" for key in copies)
            self._announce(f"distnb: this cell runs in the notebook, on a copy of replica 0's {what}.")
        return tuple(place.key for place in places if place.container is self._user_ns)

    def _whole(self, handle: Any, component: Any) -> Any:
        """Return a copy, with the whole value, of a metric or sync-on-read variable of which replicas hold parts."""
        whole = self._operations.read(handle)
        if not hasattr(component, "assign"):
            return whole
        component.assign(whole)
        return component

    def unbind(self) -> None:
        """Put the handles back, except in places that the cell has assigned."""
        back: set[int] = set()
        for place, made in self._put:
            if place.get() is made:
                place.put(place.before)
                back.update(map(id, _handles_in(place.before)))
        changed = [
            f"`{label}`"
            for key, (handle, copy, digest, label) in self._copied.items()
            if key in back and _digest(state_of_handle(handle), copy) != digest
        ]
        if changed:
            self._announce(
                f"distnb: the cell changed its copy of {', '.join(changed)}, but not the original on the replicas. To "
                "keep such a change, assign the object to a name of its own in the cell."
            )

    def _places(self, reads: Reads) -> Iterator[_HandlePlace]:
        """Yield the places of the mirrored handles that the cell may reach by names, and within the names' values."""
        known: set[str] = set()
        queue: list[_HandlePlace] = []
        seen: set[int] = {id(self._user_ns)}

        def read_also(names: Iterable[str]) -> None:
            for name in sorted(set(names) - known):
                known.add(name)
                if name in self._user_ns:
                    queue.append(_HandlePlace(container=self._user_ns, key=name, before=self._user_ns[name]))

        read_also(user_names(self._user_ns) if reads.dynamic else reads.names)
        for place in queue:  # the loop appends to it
            value = place.before
            if handles := _handles_in(value):
                yield place
                facts = [fact for each in handles for fact in state_of_handle(each).facts.values()]
                read_also(name for fact in facts for name in fact.reads)
            if id(value) in seen or len(seen) > _VISITED_AT_MOST:
                continue
            seen.add(id(value))
            if isinstance(value, types.FunctionType) and value.__globals__ is self._user_ns:
                read_also(names_of_code(value.__code__).names)
            queue.extend(_parts(value, place))


def _handles_in(value: Any) -> list[Any]:
    """Return the value itself if it is a mirrored handle, or the mirrored handles within a tuple."""
    if isinstance(value, HANDLES):
        return [value] if isinstance(value, Mirrored) else []
    if isinstance(value, tuple):
        return [handle for part in value for handle in _handles_in(part)]
    return []


def _with_copies(value: Any, copies: Mapping[int, Any]) -> Any:
    """Return the copy of a handle, or a tuple in which copies replace the handles."""
    if id(value) in copies:
        return copies[id(value)]
    if not isinstance(value, tuple) or not _handles_in(value):
        return value
    return tuple.__new__(type(value), [_with_copies(part, copies) for part in value])


def _parts(obj: Any, within: _HandlePlace) -> Iterator[_HandlePlace]:
    """Yield the places within an object. The shell is left out, since it holds everything."""
    if isinstance(obj, (str, bytes, int, float, types.ModuleType, type(None), *HANDLES)):
        return
    if type(obj).__module__.startswith(("IPython.", "ipykernel.")):
        return
    attributes: Any = getattr(obj, "__dict__", None)
    if isinstance(obj, dict | list | collections.deque):
        for key, value in obj.items() if isinstance(obj, dict) else enumerate(obj):
            yield _HandlePlace(container=obj, key=key, before=value, within=within, form="[{key}]")
    elif isinstance(obj, tuple | set | frozenset):
        for index, part in enumerate(obj):
            form = "[{key}]" if isinstance(obj, tuple) else ""
            yield from _parts(part, _HandlePlace(container=obj, key=index, before=part, within=within, form=form))
    elif isinstance(obj, types.FunctionType):
        for cell in obj.__closure__ or ():
            yield _HandlePlace(container=cell, key="cell_contents", before=content_of(cell), within=within, form="")
        yield _HandlePlace(container=obj, key="__defaults__", before=obj.__defaults__, within=within, form="")
    elif isinstance(obj, types.MethodType):
        yield from _parts(obj.__func__, within)
        yield from _parts(obj.__self__, within)
    elif isinstance(obj, type):
        for name, value in attributes.items():
            if not name.startswith("__"):
                yield _HandlePlace(container=obj, key=name, before=value, within=within, form=".{key}")
        for base in obj.__bases__:
            if base is not object:
                yield from _parts(base, within)
    elif isinstance(attributes, dict):
        for name, value in attributes.items():
            yield _HandlePlace(container=attributes, key=name, before=value, within=within, form=".{key}")
        if type(obj).__module__ == "__main__":
            yield from _parts(type(obj), within)


def _digest(state: RemoteState, copy: Any) -> bytes:
    digest: bytes = state.tracked.tracker.digest({"": copy}).by_name[""]
    return digest
