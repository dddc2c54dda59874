"""What of the notebook's namespace a program needs: the names that it reads, and what they lead to."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from distnb.notebook.handles.handle import HANDLES, state_of_handle
from distnb.notebook.namespace.tracked_objects import MISSING, TrackedObjects
from distnb.notebook.namespace.user_names import is_user_name, user_names
from distnb.objects.code import is_code
from distnb.objects.looking import Look
from distnb.objects.plain import is_plain
from distnb.wire.messages import ObjectId

__all__ = ["Needs"]


class Needs:
    """Collected for one program.

    Args:
        tracked: Of the engines that run it.
        user_ns: The notebook's namespace.

    Attributes:
        names: Those that are to be bound on the engines.
        imports: Modules, by the names that are bound to them.
        plain: Immutable values and handles, by name.
        sections: All other values, by name; of a call's arguments by their place, "@0".
        look: How these look, and what functions among them read.
    """

    def __init__(self, tracked: TrackedObjects, user_ns: dict[str, Any]) -> None:
        self._tracked = tracked
        self._user_ns = user_ns
        self.names: list[str] = []
        self.imports: dict[str, str] = {}
        self.plain: dict[str, Any] = {}
        self.sections: dict[str, Any] = {}
        self.look = Look()
        self._unseen: dict[str, Any] = {}
        self._done: set[str] = set()
        self._behind: set[ObjectId] = set()
        self._more: list[str] = []
        tracked.references.met.clear()

    def take_names(self, names: Iterable[str]) -> None:
        """Take in what names are bound to. Those that the notebook does not have are left out."""
        self._more.extend(names)

    def take_value(self, name: str, value: Any) -> None:
        """Take in a value that is bound to no name, under a name of its own."""
        self._unseen[name] = value

    def take_handle(self, handle: Any) -> None:
        """Take in what an engine object leads to."""
        self._look_behind(handle)

    def collect(self) -> Needs:
        """Follow what was taken in: functions read names, and so on."""
        references, user_ns = self._tracked.references, self._user_ns
        while self._more or self._unseen:
            more, self._more = self._more, []
            for name in more:
                if name not in self._done:
                    self._done.add(name)
                    value = user_ns.get(name, MISSING)
                    if value is not MISSING:
                        self._take(name, value)
            if not self._unseen:
                continue
            unseen, self._unseen = self._unseen, {}
            look = self._tracked.tracker.look(unseen, self.look)
            self.sections |= unseen | look.classes
            self._more.extend(look.names - self._done)
            if look.dynamic:
                self._more.extend(user_names(user_ns))
            for handle in list(references.met.values()):
                self._look_behind(handle)
        return self

    def ordered(self) -> dict[str, Any]:
        """The sections in the order in which they are opened: what others need to be opened comes first."""
        return dict(sorted(self.sections.items(), key=lambda section: not is_code(section[1])))

    def _take(self, name: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, types.ModuleType):
            self.imports[name] = value.__name__
        elif kind in HANDLES:
            self.plain[name] = value
            self._look_behind(value)
        elif is_plain(value):
            self.plain[name] = value
        elif not is_user_name(name, self._user_ns) and name not in ("__annotations__", "__all__", "Out"):
            return
        else:
            self._unseen[name] = value
        self.names.append(name)

    def _look_behind(self, handle: Any) -> None:
        """What an engine object's code reads, and what it holds of the notebook's objects and of other handles'."""
        state = state_of_handle(handle)
        if state.identity in self._behind:
            return
        self._behind.add(state.identity)
        for fact in state.facts.values():
            for name in (*fact.reads, *fact.holds):
                if isinstance(name, tuple):
                    self._tracked.references.meet(name)
                    held = self._tracked.handle(name)
                    if held is not None:
                        self._look_behind(held)
                    continue
                if name in self._done:
                    continue
                tracker = self._tracked.tracker
                held = tracker.root(name) if name in tracker else MISSING
                if held is MISSING or self._user_ns.get(name, MISSING) is held:
                    self._more.append(name)
                elif name not in self.sections:
                    self._done.add(name)
                    self._unseen[name] = held
