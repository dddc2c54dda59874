"""The part of the notebook's namespace that a program needs: the names that it reads, and the values they refer to."""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

from distnb.frames import cell_name
from distnb.notebook.handles.handle import HANDLES, state_of_handle
from distnb.notebook.namespace.tracked_objects import MISSING, TrackedObjects
from distnb.notebook.namespace.user_names import is_user_name, user_names
from distnb.objects.code.definitions import UNPICKLING, is_code
from distnb.objects.code.function_parts import has_constant_parts
from distnb.objects.digesting import Digests
from distnb.objects.plain import is_plain
from distnb.wire.messages import ObjectId

__all__ = ["Needs", "SimpleReads"]


class SimpleReads(NamedTuple):
    """The values that a program reads.

    Attributes:
        names: The values of all names that it looks up; `MISSING` for an absent name.
        functions: The functions among its sections.
        data: The other sections.
    """

    names: dict[str, Any]
    functions: list[types.FunctionType]
    data: dict[str, Any]


class Needs:
    """The collection of the needs of one program.

    Attributes:
        names: The names to be bound on the engines.
        imports: The modules by the names that are bound to them.
        plain: The immutable values and handles by name.
        sections: All other values by name. An argument without a name gets one that begins with "@".
        digests: The digests of the sections, and the names that functions among them read.
        own_source: The cell's file name, text and name in tracebacks.
        more: The names still to be added. Names that the notebook does not have are skipped.
        unseen: The values still to be added, by their section names.
    """

    def __init__(self, tracked: TrackedObjects, user_ns: dict[str, Any]) -> None:
        self._tracked = tracked
        self._user_ns = user_ns
        self.names: list[str] = []
        self.imports: dict[str, str] = {}
        self.plain: dict[str, Any] = {}
        self.sections: dict[str, Any] = {}
        self.digests = Digests()
        self.unseen: dict[str, Any] = {}
        self.own_source: tuple[str, str, str] | None = None
        self._done: set[str] = set()
        self._followed: set[ObjectId] = set()
        self.more: list[str] = []
        tracked.references.met.clear()

    def collect(self) -> None:
        """Add everything that the added names and values refer to, such as the names that functions read."""
        references, user_ns = self._tracked.references, self._user_ns
        unpickles = False
        while True:
            if not unpickles and not UNPICKLING.isdisjoint(self.digests.attributes):
                unpickles = True
                self.more += [name for name in user_names(user_ns) if _is_own_class(user_ns[name])]
            if not (self.more or self.unseen):
                return
            more, self.more = self.more, []
            for name in more:
                if name not in self._done:
                    self._done.add(name)
                    value = user_ns.get(name, MISSING)
                    if value is not MISSING:
                        self._add(name, value)
            if not self.unseen:
                continue
            unseen, self.unseen = self.unseen, {}
            digests = self._tracked.tracker.digest(unseen, self.digests)
            self.sections |= unseen | digests.classes
            self.more.extend(digests.names - self._done)
            if digests.dynamic:
                self.more.extend(user_names(user_ns))
            for handle in list(references.met.values()):
                self.follow_handle(handle)

    def simple_reads(self) -> SimpleReads | None:
        """Return the reads of the program, if the names that it looks up depend on nothing but its functions' code.

        Return None for others, such as a program that reads a class or an object with methods of the user's.
        """
        found = self.digests
        if found.dynamic or found.classes or found.refused or not UNPICKLING.isdisjoint(found.attributes):
            return None
        functions = {name: value for name, value in self.sections.items() if has_constant_parts(value)}
        data = {name: value for name, value in self.sections.items() if name not in functions}
        if data and not self._tracked.has_only_data(data):
            return None
        names = {name: self._user_ns.get(name, MISSING) for name in self._done}
        return SimpleReads(names, list(functions.values()), data)

    def sources(self) -> dict[str, tuple[str, str]]:
        """Return the texts of the program and of the functions that it reads, and names, by file name."""
        found = {name: (text, cell_name(name)) for name, text in self.digests.sources.items()}
        if self.own_source is not None:
            name, text, label = self.own_source
            found[name] = text, label
        return found

    def awaited(self) -> tuple[str, ...]:
        """Return the submodules that the program's text imports and the notebook does not have."""
        return tuple(name for name in sorted(self.digests.attributes) if "." in name and name not in sys.modules)

    def imported(self) -> list[types.ModuleType]:
        """Return the modules that the program reads."""
        return [value for name in self.imports if isinstance(value := self._user_ns.get(name), types.ModuleType)]

    def modules(self) -> set[str]:
        """Return the modules that the program reads or imports, and those that define its values and their classes."""
        values = (*self.sections.values(), *self.plain.values())
        defined = {getattr(value, "__module__", None) if is_code(value) else type(value).__module__ for value in values}
        return {name for name in (*self.digests.imports, *self.imports.values(), *defined) if isinstance(name, str)}

    def _add(self, name: str, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, types.ModuleType):
            self.imports[name] = value.__name__
        elif kind in HANDLES:
            self.plain[name] = value
            self.follow_handle(value)
        elif is_plain(value):
            self.plain[name] = value
        elif not is_user_name(name, self._user_ns) and name not in ("__annotations__", "__all__", "Out"):
            return
        else:
            self.unseen[name] = value
        self.names.append(name)

    def follow_handle(self, handle: Any) -> None:
        """Add the names that an engine object's code reads, and the notebook's objects and handles that it holds."""
        state = state_of_handle(handle)
        if state.identity in self._followed:
            return
        self._followed.add(state.identity)
        for fact in state.facts.values():
            for name in (*fact.reads, *fact.holds):
                if isinstance(name, tuple):
                    held = self._tracked.handle(name)
                    if held is not None:
                        self._tracked.references.met[name] = held
                        self.follow_handle(held)
                    continue
                if name in self._done:
                    continue
                tracker = self._tracked.tracker
                held = tracker.root(name) if name in tracker else MISSING
                if held is MISSING or self._user_ns.get(name, MISSING) is held:
                    self.more.append(name)
                elif name not in self.sections:
                    self._done.add(name)
                    self.unseen[name] = held


def _is_own_class(value: Any) -> bool:
    return issubclass(type(value), type) and not is_plain(value)
