"""The state of a handle: the facts about an object on the engines that the notebook has without a message."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distnb.errors import StaleHandleError, UnassignedError
from distnb.notebook.doubts import doubt
from distnb.values import DistributedValues
from distnb.wire.described_values import UNKNOWN, DescribedObject
from distnb.wire.messages import ObjectId

if TYPE_CHECKING:
    from distnb.notebook.namespace.handle_operations import HandleOperations
    from distnb.notebook.namespace.tracked_objects import TrackedObjects

__all__ = ["RemoteState", "state_of_handle"]

_FLOATS = frozenset({"float32", "float64"})


@dataclass
class RemoteState:
    """The state of a handle.

    Attributes:
        identity: The object's id on every replica.
        facts: The object's description by replica. A replica that never assigned the name has none.
        local: The components that only the notebook holds, by replica: the name's value where it was not assigned.
        name: The name that a cell assigned; "" for results of calls.
        gone: The engines that held a component and have ended.
        apart: The components that only the notebook holds, by engine, of ended engines without a replacement.
        as_of: The value of `operations.changes` when the summaries were created; -1 if they are out of date.
        ancestors: The handles from which this one was obtained, nearest first. Their objects may hold the values that
            are passed to this one's object. Each has its own reference, since handles in between may be gone, as for
            `a` of `a[0][1][2]`.
        given: The number of values that the object has returned to the notebook since its latest description. The
            object may still hold them.
    """

    tracked: TrackedObjects
    operations: HandleOperations
    identity: ObjectId
    facts: dict[int, DescribedObject]
    local: dict[int, Any] = field(default_factory=dict)
    name: str = ""
    gone: set[int] = field(default_factory=set)
    apart: dict[int, Any] = field(default_factory=dict)
    as_of: int = -1
    ancestors: tuple[weakref.ref[Any], ...] = ()
    given: int = 0

    @property
    def label(self) -> str:
        """The handle's name in messages: a name that the notebook has bound to it."""
        name = self.operations.name_of(self) or self.name
        return f"`{name}`" if name else "this handle"

    @property
    def outdated(self) -> bool:
        """True if the summaries may be out of date, and are fetched again before they are shown."""
        return self.as_of != self.operations.changes

    def add_held(self, names: Iterable[str]) -> None:
        """Record that the object may hold the notebook's objects of these names from now on."""
        added = tuple(names)
        if added:
            doubt()
        alive = [handle for each in self.ancestors if (handle := each()) is not None]
        for state in (self, *map(state_of_handle, alive)):
            for replica, fact in state.facts.items():
                more = tuple(name for name in added if name not in fact.holds)
                if more:
                    state.facts[replica] = fact._replace(holds=fact.holds + more)

    @property
    def is_whole(self) -> bool:
        """True if the engines have all components."""
        return not (self.local or self.gone or self.apart)

    @property
    def is_simple(self) -> bool:
        """True if the engines have all of the object, and it neither reads nor holds names of the notebook."""
        waiting, seen = [self], {self.identity}
        for state in waiting:  # the loop appends to it
            if not state.is_whole:
                return False
            for fact in state.facts.values():
                if not (fact.reads or fact.holds):
                    continue
                if fact.reads or any(isinstance(held, str) for held in fact.holds):
                    return False
                held = {each for each in fact.holds if not isinstance(each, str)} - seen
                handles = [handle for each in held if (handle := self.tracked.handle(each)) is not None]
                seen |= held
                waiting += map(state_of_handle, handles)
        return True

    def known(self, replica: int, *, detached: bool = False) -> Any:
        """Return a copy of a replica's component if the notebook knows it, else None.

        Args:
            detached: Whether to return a detached copy of a tensor that autograd computed. If False, return None for
                such a tensor.
        """
        fact = self.facts.get(replica)
        summary = UNKNOWN if fact is None or self.outdated else fact.summary
        number = summary.number
        if number is None or (summary.graph and not detached):
            return None
        import torch

        if summary.dtype in _FLOATS:  # a third of the time
            return torch.scalar_tensor(number, dtype=getattr(torch, summary.dtype), device=torch.device("cpu"))
        return torch.tensor(number, dtype=getattr(torch, summary.dtype), device="cpu")

    def all_known(self, engines: tuple[int, ...] | None = None) -> list[Any]:
        """Return detached copies of all components in replica order, or [] if one is unknown.

        Args:
            engines: The engines that must hold the components; None for any.
        """
        team = self.tracked.key.engines
        if self.tracked.ended or self.gone or self.local or (engines or team) != team:
            return []
        found = [self.known(replica, detached=True) for replica in range(len(team))]
        for value in found:
            if value is None:
                return []
        return found

    @property
    def type_name(self) -> str:
        """The name of the object's class, on the first replica that has the object."""
        return next((fact.summary.type for fact in self.facts.values() if fact.summary != UNKNOWN), UNKNOWN.type)

    @property
    def why(self) -> str:
        """The reason why the object stays on the engines although it is not a device object; "" if there is none."""
        return next((fact.why for fact in self.facts.values() if fact.why), "")

    @property
    def together(self) -> bool:
        """True if the replicas hold parts of one value, which they combine together."""
        return any(fact.sharing.together for fact in self.facts.values())

    @property
    def divided(self) -> bool:
        """True if the replicas hold shards of the object."""
        return any(fact.sharing.divided for fact in self.facts.values())

    @property
    def lost(self) -> set[int]:
        """The replicas whose component was lost with its engine."""
        return {replica for replica, engine in enumerate(self.tracked.key.engines) if engine in self.gone}

    def check(self, replicas: Iterable[int] | None = None) -> None:
        """Raise StaleHandleError if components of these replicas are gone; None for all replicas."""
        if self.divided and self.gone and not self.tracked.ended:
            ended = ", ".join(map(str, sorted(self.gone)))
            raise StaleHandleError(
                f"{self.label} ({self.type_name}) has lost the shards of engine {ended}, which ended or left. Replace "
                "the engine (%distnb restart --missing), and restore a checkpoint: "
                "distnb.Checkpoint(model=model, optimizer=optimizer).restore(path)."
            )
        lost = self.lost if self.gone else set()
        left = sorted({*self.facts, *self.local} - lost)
        missing = lost if replicas is None or not left else lost.intersection(replicas)
        if not (self.tracked.ended or missing):
            return
        what = self.label
        cure = "Rerun the cell that created it."
        if left and not self.tracked.ended:
            name = what.strip("`")
            each = f"{name if name.isidentifier() else 'value'}.component({left[0]})"
            raise StaleHandleError(
                f"{what} ({self.type_name}) has lost its component of replica {', '.join(map(str, sorted(missing)))}: "
                f"the engine with this component has ended. Replica {', '.join(map(str, left))} still has its own, "
                f"which can be fetched: {each}. {cure}"
            )
        where = "the engines were" if self.tracked.ended else f"the engine of replica {min(lost)} was"
        raise StaleHandleError(
            f"{what} ({self.type_name}) is gone: {where} restarted, removed, stopped or left after it was created. "
            f"{cure}"
        )

    def move(self, before: Sequence[int], now: Sequence[int]) -> None:
        """Renumber the components for other engines. The components of engines that have ended are lost."""
        places = {old: now.index(engine) for old, engine in enumerate(before) if engine in now}
        self.gone.update(before[replica] for replica in self.facts if replica not in places)
        self.facts = {places[replica]: fact for replica, fact in self.facts.items() if replica in places}
        values = self.apart | {before[replica]: value for replica, value in self.local.items()}
        self.local = {now.index(engine): value for engine, value in values.items() if engine in now}
        self.apart = {engine: value for engine, value in values.items() if engine not in now}
        if not (self.facts or values):
            self.gone.update(now)

    def restored(self, replicas: Iterable[int], survivor: int) -> None:
        """Note that new engines have received a copy of a survivor's component."""
        if survivor in self.facts:
            self.facts.update({replica: self.facts[survivor] for replica in replicas if replica not in self.local})
        self.gone.difference_update(self.tracked.key.engines[replica] for replica in replicas)

    def forget(self, engines: Iterable[int]) -> None:
        """Forget engines that the cluster no longer has. Another engine of the same number has nothing of theirs."""
        self.gone.difference_update(engines)
        for engine in engines:
            self.apart.pop(engine, None)
        if not (self.facts or self.local or self.apart):
            self.gone.update(self.tracked.key.engines)

    def check_assigned(self, replica: int) -> None:
        """Raise UnassignedError if a replica never assigned the name."""
        if replica not in self.facts and replica not in self.local:
            assigned = sorted({*self.facts, *self.local})
            if not self.name:
                raise UnassignedError(f"This value has no component on replica {replica}, only on {assigned}.")
            raise UnassignedError(
                f"name {self.name!r} is not defined on replica {replica}: only replicas {assigned} assigned it."
            )


def state_of_handle(handle: DistributedValues) -> RemoteState:
    """Return the state of a handle."""
    state: RemoteState = object.__getattribute__(handle, "_components")
    return state
