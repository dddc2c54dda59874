"""A plan of a call: what it read, and the check that it would read the same again."""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping
from typing import Any

from distnb.notebook.doubts import latest_doubt
from distnb.notebook.handles.handle import HANDLES, state_of_handle
from distnb.notebook.namespace.needs import SimpleReads
from distnb.notebook.namespace.tracked_objects import MISSING, TrackedObjects
from distnb.objects.code.function_parts import FunctionParts
from distnb.options import StrategySpec
from distnb.topology import Team
from distnb.values import Mirrored
from distnb.wire.exchange import Inquiry, argument_name
from distnb.wire.messages import ObjectId
from distnb.wire.planned import BARE, SECTION, SHORT

__all__ = ["CallPlan", "UnplannedError"]


class UnplannedError(Exception):
    """A value that planned calls do not send."""


class CallPlan:
    """A plan of a call.

    Args:
        program: The program that made the plan.
        spec, team, tracked: The strategy, its team, and the objects of the team's engines.
        fn: The function. Without a name, the same `lambda` or `def` may make it again for each call.
        found: The values that the call read.
        inquiry: The inquiry of the call's snapshot.
        reads: The ids of the engine objects that the call read, with the names that these read and hold.
    """

    def __init__(
        self,
        program: int,
        spec: StrategySpec,
        team: Team,
        tracked: TrackedObjects,
        fn: types.FunctionType,
        found: SimpleReads,
        inquiry: Inquiry,
        reads: frozenset[ObjectId],
    ) -> None:
        self.program = program
        self.spec = spec
        self.team = team
        self.tracked = tracked
        self.inquiry = inquiry
        self.reads = reads
        names, functions, data = found
        # The notebook's data, and the variables of closures, can be changed in place.
        self.is_changing = bool(data) or any(each.__closure__ for each in functions)
        self._fn = fn
        self._is_named = names.get(fn.__name__) is fn
        self._doubt = latest_doubt()
        # A plan keeps neither data nor objects alive: `del model` frees them.
        self._arguments = frozenset(name for name in data if name[0] == "@")
        self._data = tuple(name for name in data if name not in self._arguments)
        self._names = {name: each for name, each in names.items() if type(each) not in HANDLES and name not in data}
        self._handles = {name: weakref.ref(value) for name, value in names.items() if type(value) in HANDLES}
        self._functions = [(each, FunctionParts(each)) for each in functions]
        self._parts = FunctionParts(fn)

    def rebound(self, fn: types.FunctionType, user_ns: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the names that are bound to other numbers or handles now; None if the plan does not hold."""
        if self._doubt != latest_doubt() or not self._parts.are_of(fn) or (self._is_named and fn is not self._fn):
            return None
        found, get = {}, user_ns.get
        for name, value in self._names.items():
            now = get(name, MISSING)
            if now is not value:
                if not (type(now) in BARE and type(value) in BARE):
                    return None
                found[name] = now
        for name, reference in self._handles.items():
            now = get(name)
            if now is not reference():
                if type(now) not in HANDLES:
                    return None
                found[name] = now
        for function, parts in self._functions:
            if not parts.are_of(function):
                return None
        # If a name was deleted that the engines have bound, an ordinary call deletes it there.
        if not (self.tracked.bound.exist(user_ns) and self.tracked.surroundings.are_current()):
            return None
        return found

    def named_data(self, user_ns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data that the call reads by names, as it is now."""
        return {name: user_ns.get(name) for name in self._data} if self._data else {}

    def coded(self, value: Any, batch: Any, reads: list[ObjectId], data: dict[str, Any]) -> Any:
        """Return a value as planned calls send it.

        Args:
            batch: The value whose lists and dicts may be rebuilt on the replicas (`NotebookNamespace.batch`).
            reads: Gets the ids of its handles.
            data: Gets its data that the engines have, by the names of its sections.

        Raises:
            UnplannedError: Only an ordinary call can send the value.
        """
        kind = type(value)
        if kind in BARE:
            if kind is not str or len(value) <= SHORT:
                return value
        elif kind is tuple:
            return tuple([self.coded(each, batch, reads, data) for each in value])
        elif kind in HANDLES:
            state = state_of_handle(value)
            if state.tracked is self.tracked and (state.identity in self.reads or state.is_simple):
                reads.append(state.identity)
                return [state.identity, "Mirrored" if isinstance(value, Mirrored) else "PerReplica"]
        elif value is batch and kind is list:
            return [None, *[self.coded(each, each, reads, data) for each in value]]
        elif value is batch and kind is dict:
            return {name: self.coded(each, each, reads, data) for name, each in value.items()}
        else:
            name = argument_name(value)
            if name in self._arguments:
                data[name] = value
                return [name, SECTION]
        raise UnplannedError

    def note_rebound(self, values: Mapping[str, Any]) -> None:
        """Note that a call, of this plan or of another, binds names to other numbers or handles on the engines."""
        for name, value in values.items():
            if name in self._names:
                self._names[name] = value
            elif name in self._handles:
                self._handles[name] = weakref.ref(value)
