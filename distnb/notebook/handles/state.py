"""What the notebook knows of an object on the engines without asking: the state of a handle."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distnb.errors import StaleHandleError, UnassignedError
from distnb.values import DistributedValues
from distnb.wire.exchange import Described
from distnb.wire.messages import ObjectId

if TYPE_CHECKING:
    from distnb.notebook.namespace.handle_operations import HandleOperations
    from distnb.notebook.namespace.tracked_objects import TrackedObjects

__all__ = ["RemoteState", "state_of_handle"]


@dataclass
class RemoteState:
    """What a handle knows without asking.

    Attributes:
        identity: The object's id on every replica.
        facts: How it was described, by replica; a replica that never assigned the name has none.
        local: Components that only the notebook holds, by replica: the name's value where it was not assigned.
        name: The name that a cell made it under; "" for what calls returned.
        gone: Engines that held a component and have ended since.
        apart: Components that only the notebook holds, by engine, of engines that have ended and not been replaced.
        as_of: What `operations.changes` was when its summaries were made; -1: they are to be asked for in any case.
        ancestors: The handles that it was asked of, nearest first: they hold, too, what this one is given. Each is
            referred to by itself, since those between may be gone (`a` of `a[0][1][2]`).
        given: How many values it has given to the notebook since it was described: it may hold them.
    """

    tracked: TrackedObjects
    operations: HandleOperations
    identity: ObjectId
    facts: dict[int, Described]
    local: dict[int, Any] = field(default_factory=dict)
    name: str = ""
    gone: set[int] = field(default_factory=set)
    apart: dict[int, Any] = field(default_factory=dict)
    as_of: int = -1
    ancestors: tuple[weakref.ref[Any], ...] = ()
    given: int = 0

    @property
    def label(self) -> str:
        """How messages call it: by a name that the notebook has for it."""
        name = self.operations.name_of(self) or self.name
        return f"`{name}`" if name else "this handle"

    @property
    def dated(self) -> bool:
        """Whether what the summaries tell may be out of date: it is asked for again when it is shown."""
        return self.as_of != self.operations.changes

    def give(self, names: Iterable[str]) -> None:
        """The object may hold from now on what the notebook has under these names."""
        given = tuple(names)
        alive = [handle for each in self.ancestors if (handle := each()) is not None]
        for state in (self, *map(state_of_handle, alive)):
            for replica, fact in state.facts.items():
                more = tuple(name for name in given if name not in fact.holds)
                if more:
                    state.facts[replica] = fact._replace(holds=fact.holds + more)

    def known(self, replica: int, *, detached: bool = False) -> Any:
        """A copy of a replica's component, if the notebook has heard what it is; else None.

        Of what autograd computed a copy is had only `detached`.
        """
        fact = self.facts.get(replica)
        summary = None if fact is None or self.dated else fact.summary
        if summary is None or summary.number is None or (summary.graph and not detached):
            return None
        import torch

        return torch.tensor(summary.number, dtype=getattr(torch, summary.dtype), device="cpu")

    def all_known(self, engines: tuple[int, ...] | None = None) -> list[Any]:
        """Detached copies of all components, by replica, if they are known; else nothing.

        With `engines`: if they live on these.
        """
        team = self.tracked.key[0]
        if self.tracked.ended or self.gone or self.local or (engines or team) != team:
            return []
        found = [self.known(replica, detached=True) for replica in range(len(team))]
        return [] if any(value is None for value in found) else found

    @property
    def type_name(self) -> str:
        """The class of the object, on the first replica that has one."""
        return next((fact.summary.type for fact in self.facts.values() if fact.summary), "object")

    @property
    def why(self) -> str:
        """The reason why the object stays although it is no device object; "" if there is none."""
        return next((fact.why for fact in self.facts.values() if fact.why), "")

    @property
    def together(self) -> bool:
        """Whether the replicas hold parts, of which they make one value together."""
        return any(fact.together for fact in self.facts.values())

    @property
    def lost(self) -> set[int]:
        """Replicas whose component has ended with its engine."""
        return {replica for replica, engine in enumerate(self.tracked.key[0]) if engine in self.gone}

    def check(self, replicas: Iterable[int] | None = None) -> None:
        """Raise StaleHandleError if components of these replicas are gone; None: of all that there ever were."""
        lost = self.lost if self.gone else set()
        left = sorted({*self.facts, *self.local} - lost)
        missing = lost if replicas is None or not left else lost.intersection(replicas)
        if not (self.tracked.ended or missing):
            return
        what = self.label
        cure = "Run the cell that makes it again."
        if left and not self.tracked.ended:
            name = what.strip("`")
            each = f"{name if name.isidentifier() else 'value'}.component({left[0]})"
            raise StaleHandleError(
                f"{what} ({self.type_name}) has lost its component of replica {', '.join(map(str, sorted(missing)))}: "
                f"the engine that it lived on has ended. Replica {', '.join(map(str, left))} still has its own, which "
                f"can be fetched: {each}. {cure}"
            )
        where = "the engines were" if self.tracked.ended else f"the engine of replica {min(lost)} was"
        raise StaleHandleError(
            f"{what} ({self.type_name}) is gone: {where} restarted or stopped since it was made, and it lived there. "
            f"{cure}"
        )

    def move(self, before: Sequence[int], now: Sequence[int]) -> None:
        """The replicas are on other engines: components are renumbered, those of engines that have ended are lost."""
        places = {old: now.index(engine) for old, engine in enumerate(before) if engine in now}
        self.gone.update(before[replica] for replica in self.facts if replica not in places)
        self.facts = {places[replica]: fact for replica, fact in self.facts.items() if replica in places}
        values = self.apart | {before[replica]: value for replica, value in self.local.items()}
        self.local = {now.index(engine): value for engine, value in values.items() if engine in now}
        self.apart = {engine: value for engine, value in values.items() if engine not in now}
        if not (self.facts or values):
            self.gone.update(now)

    def restored(self, replicas: Iterable[int], survivor: int) -> None:
        """New engines have got the component that another replica has."""
        if survivor in self.facts:
            self.facts.update({replica: self.facts[survivor] for replica in replicas if replica not in self.local})
        self.gone.difference_update(self.tracked.key[0][replica] for replica in replicas)

    def check_assigned(self, replica: int) -> None:
        """Raise UnassignedError if a replica never assigned it."""
        if replica not in self.facts and replica not in self.local:
            raise UnassignedError(
                f"name {self.name!r} is not defined on replica {replica}: only replicas "
                f"{sorted(self.facts)} assigned it."
            )


def state_of_handle(handle: DistributedValues) -> RemoteState:
    """The state of a handle."""
    state: RemoteState = object.__getattribute__(handle, "_components")
    return state
