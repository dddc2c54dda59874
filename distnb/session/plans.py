"""Plans: what a function that is called again and again reads, so that a small call costs little."""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distnb.session.handles import HANDLES, state_of_handle
from distnb.session.luggage import Luggage, is_simple_code
from distnb.session.modules import State, reloaded, state_of
from distnb.session.spaces import NotebookSpace
from distnb.session.travel import Packer
from distnb.wire.bindings import Delivery
from distnb.wire.codec import Parcel
from distnb.wire.fingerprints import fingerprint
from distnb.wire.graph import Side
from distnb.wire.messages import ObjectId
from distnb.wire.outlines import fits, outline
from distnb.wire.twins import NOT_THERE

__all__ = ["Plan", "Plans"]

_KEPT = 64


@dataclass
class Plan:
    """What a call with certain functions among its arguments reads.

    Attributes:
        version: Of the engines' bindings when it was made: another delivery may have bound the names anew since.
        functions: Those functions.
        names: Names that they read, as they are bound on the engines.
        data: Objects whose content must be compared at each call.
        code: Functions and classes, each with what it was made of.
        handles: Engine objects that they read, each with what it read and held itself.
        watch: Objects to be compared after the call.
        modules: Modules that they read, and local ones, each as it was: they may be reloaded.
        arguments, blob: The latest arguments of nothing but functions and plain values, and how they were packed.
        place: Where the engines keep those arguments, if a call with them can be repeated without a word.
        kept: The serial of the delivery that they came with.
    """

    version: int
    functions: tuple[weakref.ref[Any], ...]
    names: tuple[str, ...]
    data: tuple[ObjectId, ...]
    code: dict[ObjectId, tuple[Any, ...]]
    handles: dict[ObjectId, Any]
    watch: tuple[ObjectId, ...]
    modules: tuple[tuple[types.ModuleType, State], ...]
    arguments: Any = None
    blob: Parcel | None = None
    place: int | None = None
    kept: int = 0

    def packed(self, arguments: Any) -> Parcel | None:
        """The same arguments, packed earlier; None if they are others."""
        return self.blob if fits(self.arguments, arguments) else None

    def repeats(self, arguments: Any) -> bool:
        """Whether a call with these arguments is the kept one again."""
        return self.place is not None and fits(self.arguments, arguments)


class Plans:
    """The plans of one space."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[int, ...], Plan] = OrderedDict()
        self._places: OrderedDict[int, Plan | None] = OrderedDict.fromkeys(range(_KEPT))
        self._repeatable: dict[int, Plan] = {}  # by the `id()` of a call's first argument, nearly always its function

    def keep(self, plan: Plan, arguments: Any, delivery: Delivery) -> Delivery:
        """Remember how a plan's arguments, functions and plain values, were packed, if nothing in them got an id.

        Returns:
            The delivery, which asks the engines to keep them, too, if the call can be repeated.
        """
        if delivery.nodes or delivery.updates:
            return delivery
        plan.arguments, plan.blob = outline(arguments), delivery.blob
        if delivery.watch or delivery.handles:
            return delivery
        if plan.place is None:
            plan.place, before = self._places.popitem(last=False)
            if before is not None:
                before.place = None
                self._repeatable = {first: each for first, each in self._repeatable.items() if each is not before}
            self._places[plan.place] = plan
        plan.kept = delivery.serial
        self._repeatable[id(arguments[0][0])] = plan
        return replace(delivery, keep=plan.place)

    def repeated(self, arguments: Any, version: int, space: NotebookSpace, side: Side) -> Plan | None:
        """The plan that a call with these arguments repeats, if all that it reads is on the engines as it is here."""
        first = arguments[0]
        plan = self._repeatable.get(id(first[0])) if first else None
        if plan is None or not plan.repeats(arguments) or not self._is_current(plan, version, space, side):
            return None
        return plan

    def find(self, functions: Sequence[Any], version: int, space: NotebookSpace, side: Side) -> Plan | None:
        """The plan for a call with these functions, if all that they read is on the engines as it is here."""
        plan = self._plans.get(tuple(map(id, functions)))
        return plan if plan is not None and self._is_current(plan, version, space, side) else None

    def _is_current(self, plan: Plan, version: int, space: NotebookSpace, side: Side) -> bool:
        if plan.version != version:
            return False
        for function in plan.functions:
            if function() is None:
                return False
        for name in plan.names:
            if name not in space.bound or not space.is_current(name, side.user_ns):
                return False
        for module, state in plan.modules:
            if reloaded(state, state_of(module)) is not None:
                return False
        for identity, parts in plan.code.items():
            if _parts_of(space.twins.get(identity)) != parts:
                return False
        for identity, facts in plan.handles.items():
            handle = space.twins.get(identity)
            if not isinstance(handle, HANDLES) or _facts_of(handle) != facts:
                return False
        for identity in plan.data:
            value = space.twins.get(identity)
            if value is NOT_THERE:
                return False
            found = fingerprint(value, side, space.twins, space.rules)
            if not found.matches(space.records.get(identity)):
                return False
        return True

    def make(
        self, functions: Sequence[Any], version: int, space: NotebookSpace, luggage: Luggage, packer: Packer
    ) -> Plan | None:
        """Remember what a call with these functions read, unless it cannot be told cheaply next time."""
        data: list[ObjectId] = []
        code: dict[ObjectId, tuple[Any, ...]] = {}
        for root in luggage.roots:
            identity = space.twins.id_of(root.value)
            if identity is None:
                return None  # a tuple with something mutable in it: always looked at
            if is_simple_code(root.value):
                code[identity] = _parts_of(root.value)
            else:
                data.append(identity)
        handles = {}
        for identity in luggage.handles:
            handle = space.twins.get(identity)
            if not isinstance(handle, HANDLES):
                return None
            handles[identity] = _facts_of(handle)
        references = tuple(weakref.ref(function) for function in functions)
        watch = tuple(packer.watched(luggage.roots))
        read = [value for value in luggage.bindings.values() if isinstance(value, types.ModuleType)]
        # A module that is read may call another one, which may be reloaded alone.
        modules = {id(module): module for module in (*read, *packer.local_modules())}
        states = tuple((module, state_of(module)) for module in modules.values())
        plan = Plan(version, references, tuple(luggage.bindings), tuple(data), code, handles, watch, states)
        self._plans[tuple(map(id, functions))] = plan
        self._plans.move_to_end(tuple(map(id, functions)))
        if len(self._plans) > _KEPT:
            self._plans.popitem(last=False)
        return plan


def _parts_of(code: Any) -> tuple[Any, ...]:
    """What a simple function or class is made of; equal parts, by identity, are an unchanged one."""
    if isinstance(code, types.FunctionType):
        return id(code.__code__), id(code.__defaults__), id(code.__kwdefaults__)
    return (
        tuple(id(value) for cls in code.__mro__[:-1] for value in vars(cls).values()) if isinstance(code, type) else ()
    )


def _facts_of(handle: Any) -> Any:
    return [(fact.reads, fact.holds) for fact in state_of_handle(handle).facts.values()]
